"""The templates of prompts: Jinja in its sandbox, narrowed until a template reaches nothing but its inputs.

There are no globals, no calls, no attributes of Python objects (`a.b` is the member `b` of the JSON object `a`), and
few filters: those whose result is about as large as what they are given, or is counted. Arithmetic is for numbers.
Every turn of a loop, also of one inside a filter, looks at the clock.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Final

from jinja2 import Environment, StrictUndefined, TemplateError, Undefined, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from topology.lanes import MIB

MOST_BYTES: Final = MIB
"""Of what a template may become: as large as a request may be."""
WITHIN_S = 1.0
"""Of the worker's loop, for one template."""
FILTERS: Final = frozenset({
    "abs", "count", "default", "d", "first", "float", "int", "items", "last", "length", "list", "lower", "max", "min",
    "reverse", "sort", "title", "trim", "truncate", "unique", "upper",
})  # fmt: skip
LOOPS: Final = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""Filters that call another filter or a test for each item."""
STATEMENTS: Final = (nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Assign)
"""No other one: a block that is kept (`set` without `=`, `filter`, `macro`) grows where nothing is counted."""
COMPARING: Final = ("max", "min", "sort", "unique")
"""Filters that call Python for each item, and cannot look at the clock."""
COMPARED_AT_MOST: Final = 100_000
PRECISION_AT_MOST: Final = 20
_END: Final = "the end"
"""In a template's values: until when it may take. No template can name what has a space in it."""
_TIMED: Final = "looks at the clock"
"""The filter that is put around what a loop goes over."""


class Unrendered(Exception):
    """A template could not be filled in; the text says why, without what was put in."""


class TooLong(Unrendered):
    """It became larger than `MOST_BYTES`."""


class _Sandbox(SandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "//", "/", "+"})

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True, finalize=_text)
        self.globals.clear()
        own: dict[str, Any] = {
            "tojson": _as_json, "string": _text, "join": _join, "round": _round, "sum": _sum, _TIMED: _timed,
        }  # fmt: skip
        own |= {name: _limited(self.filters[name]) for name in COMPARING}
        self.filters = {name: self.filters[name] for name in FILTERS | LOOPS} | own

    def is_safe_callable(self, obj: Any) -> bool:
        return False

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, LoopContext):
            return super().getattr(obj, attribute)
        return self.getitem(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, Undefined):
            return obj
        try:
            if isinstance(obj, (dict, list, str)):
                return obj[argument]
        except (LookupError, TypeError):
            pass
        return self.undefined(f"{_KINDS.get(type(obj), 'the value')} has no {str(argument)[:40]!r}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, (str, list)) and type(left) is type(right):
            if len(left) + len(right) > MOST_BYTES:
                raise TooLong(_GROWS)
        elif operator == "**" or not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            kinds = "two numbers, two texts or two lists" if operator == "+" else "numbers alone"
            raise SecurityError(f"{operator} is for {kinds}" if operator != "**" else "** is not available")
        return super().call_binop(context, operator, left, right)


_KINDS: Final[Mapping[type, str]] = {dict: "the object", list: "the list", str: "the text"}
_GROWS: Final = f"its prompt grows beyond {MOST_BYTES} bytes"


def _as_json(value: Any) -> str:
    if isinstance(value, Undefined):
        str(value)  # raises what says which
    return json.dumps(value, ensure_ascii=False, default=list)  # of what a filter yields, one after the other


def _text(value: Any) -> Any:
    """What is put in, in JSON's notation, unless it is text."""
    return value if isinstance(value, (str, Undefined)) else _as_json(value)


@pass_context
def _timed(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop; raises Unrendered when the template has taken too long."""
    end = context[_END]
    for item in items:
        if time.monotonic() > end:
            raise Unrendered(_LATE)
        yield item


_LATE: Final = f"not rendered within {WITHIN_S:g} s"


def _limited(compare: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compare)
    def limited(environment: Environment, items: Iterable[Any], *how: Any, **named: Any) -> Any:
        if len(compared := list(items)) > COMPARED_AT_MOST:
            raise Unrendered(f"it compares {len(compared)} values, {COMPARED_AT_MOST} are allowed")
        return compare(environment, compared, *how, **named)

    return limited


def _join(items: Iterable[Any], between: str = "") -> str:
    pieces, size = list[str](), 0
    for item in items:
        pieces.append(str(_text(item)))
        size += len(pieces[-1]) + len(between)
        if size > MOST_BYTES:
            raise TooLong(_GROWS)
    return between.join(pieces)


def _round(number: float, precision: int = 0) -> float:
    if not -PRECISION_AT_MOST <= precision <= PRECISION_AT_MOST:
        raise SecurityError(f"round: at most {PRECISION_AT_MOST} digits")
    return float(round(number, precision))


def _sum(items: Iterable[float]) -> float:
    return sum(items)  # of numbers, as without a start the first item is added to 0


class _Bounds(NodeTransformer):
    """Makes every loop look at the clock, and counts what `~` puts together. Raises Unrendered for statements that are
    not available."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.Stmt) and not isinstance(node, STATEMENTS):
            raise Unrendered(f"line {node.lineno}: a template has {{{{ }}}}, for, if and set … = …, and nothing else")
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if nested := next(node.find_all(nodes.For), None):
            # its turns multiply, and templates are rendered in the worker's loop
            raise Unrendered(f"line {nested.lineno}: a loop in a loop is not available; use a step with `each`")
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _TIMED)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name not in (known := _sandbox().filters):
            names = ", ".join(sorted(known.keys() - {_TIMED}))
            raise Unrendered(f"line {node.lineno}: there is no filter {node.name[:40]!r}; there are {names}")
        self.generic_visit(node)
        if node.name in LOOPS and node.node is not None:
            node.node = _filtered(node.node, _TIMED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno, environment=node.environment), "join")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


@cache
def _sandbox() -> _Sandbox:
    return _Sandbox()


class Template:
    """The template of a prompt. Raises Unrendered if it cannot be read."""

    def __init__(self, source: str) -> None:
        tree, self.names = _read(source)
        self._template = _sandbox().from_string(tree)

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises Unrendered."""
        pieces, size, end = list[str](), 0, time.monotonic() + WITHIN_S
        with _in_plain_words():
            for piece in self._template.generate({**values, _END: end}):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_BYTES:
                    raise TooLong(_GROWS)
                if time.monotonic() > end:
                    raise Unrendered(_LATE)
        return "".join(pieces)


class Expression:
    """What a fan-out goes over, such as `input.pages`. Raises Unrendered if it cannot be read."""

    def __init__(self, source: str) -> None:
        _read("{{ (" + source + ") }}")
        tree, self.names = _read("{% set found = " + source + " %}")
        self._template = _sandbox().from_string(tree)

    def value(self, values: Mapping[str, Any]) -> Any:
        """Raises Unrendered."""
        with _in_plain_words():
            module: Any = self._template.make_module({**values, _END: time.monotonic() + WITHIN_S})
            found = module.found
            if isinstance(found, Undefined):
                str(found)
            return list(found) if isinstance(found, Iterator) else found


def _read(source: str) -> tuple[nodes.Template, frozenset[str]]:
    try:
        tree = _Bounds().visit(_sandbox().parse(source))
        return tree, frozenset(meta.find_undeclared_variables(tree))
    except TemplateError as error:
        raise Unrendered(f"line {getattr(error, 'lineno', None) or 1}: {error.message}") from None


@contextmanager
def _in_plain_words() -> Iterator[None]:
    """Raises Unrendered for what goes wrong while a template is filled in."""
    try:
        yield
    except Unrendered:
        raise
    except TemplateError as error:
        raise Unrendered(error.message or type(error).__name__) from None
    except Exception as error:  # what Python raises for values that do not fit; its text may have what was put in
        raise Unrendered(_WORDS.get(type(error), "a value has not the kind that the template needs")) from None


_WORDS: Final[Mapping[type[Exception], str]] = {
    ZeroDivisionError: "it divides by zero",
    OverflowError: "a number is too large",
    RecursionError: "a value is nested too deeply",
}
