"""The templates of prompts: Jinja in its sandbox, narrowed until a template reaches nothing but its inputs.

There are no globals, no calls, no attributes of Python objects (`a.b` is the member `b` of the JSON object `a`), and
few filters: those whose result is about as large as what they are given. Arithmetic is for numbers alone.
"""

import json
import time
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from jinja2 import StrictUndefined, TemplateError, Undefined, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import SandboxedEnvironment

from topology.lanes import MIB

MOST_BYTES: Final = MIB
"""Of what a template may become: as large as a request may be."""
WITHIN_S = 1.0
"""Of the worker's loop, for one template."""
FILTERS: Final = frozenset({
    "abs", "count", "default", "d", "first", "float", "int", "items", "join", "last", "length", "list", "lower", "map",
    "max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "sort", "string", "sum", "title",
    "trim", "truncate", "unique", "upper",
})  # fmt: skip


class Unrendered(Exception):
    """A template could not be filled in; the text says why, without what was put in."""


class TooLong(Unrendered):
    """It became larger than `MOST_BYTES`."""


class _Sandbox(SandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "//", "/"})

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
        self.globals.clear()
        self.filters = {name: self.filters[name] for name in FILTERS} | {"tojson": _as_json}

    def is_safe_callable(self, obj: Any) -> bool:
        return False

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, LoopContext):
            return super().getattr(obj, attribute)
        return self.getitem(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        try:
            return obj[argument] if isinstance(obj, (dict, list, str)) else self.undefined(obj=obj, name=argument)
        except (LookupError, TypeError):
            return self.undefined(obj=obj, name=argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            raise SecurityError(f"{operator} is for numbers alone" if operator != "**" else "** is not available")
        return super().call_binop(context, operator, left, right)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def _sandbox() -> _Sandbox:
    return _Sandbox()


class Template:
    """The template of a prompt. Raises Unrendered if it cannot be read."""

    def __init__(self, source: str) -> None:
        try:
            tree = _sandbox().parse(source)
            self.names = frozenset(meta.find_undeclared_variables(tree))
            self._template = _sandbox().from_string(source)
        except TemplateError as error:
            raise Unrendered(f"line {getattr(error, 'lineno', None) or 1}: {error.message}") from None
        if nested := next((inner for loop in tree.find_all(nodes.For) for inner in loop.find_all(nodes.For)), None):
            # its turns multiply, and templates are rendered in the worker's loop
            raise Unrendered(f"line {nested.lineno}: a loop in a loop is not available; use a step with `each`")

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises Unrendered."""
        pieces, size, end = list[str](), 0, time.monotonic() + WITHIN_S
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_BYTES:
                    raise TooLong(f"its prompt grows beyond {MOST_BYTES} bytes")
                if time.monotonic() > end:
                    raise Unrendered(f"not rendered within {WITHIN_S:g} s")
            return "".join(pieces)
        except Unrendered:
            raise
        except TemplateError as error:
            raise Unrendered(error.message or type(error).__name__) from None
        except Exception as error:  # what Python raises for values that do not fit, such as TypeError
            raise Unrendered(type(error).__name__) from None


class Expression:
    """What a fan-out goes over, such as `input.pages`. Raises Unrendered if it cannot be read."""

    def __init__(self, source: str) -> None:
        self.names = Template("{{ (" + source + ") }}").names
        try:
            self._compiled = _sandbox().compile_expression(source, undefined_to_none=False)
        except TemplateError as error:
            raise Unrendered(f"line 1: {error.message}") from None

    def value(self, values: Mapping[str, Any]) -> Any:
        """Raises Unrendered."""
        try:
            found = self._compiled(values)
        except TemplateError as error:
            raise Unrendered(error.message or type(error).__name__) from None
        except Exception as error:
            raise Unrendered(type(error).__name__) from None
        if isinstance(found, Undefined):
            raise Unrendered("there is no such value")
        return found


def unknown(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names that are not known, in order."""
    return sorted(set(names) - set(known))
