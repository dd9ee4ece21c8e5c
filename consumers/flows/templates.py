"""The templates of prompts: Jinja in its sandbox, narrowed until a template reaches nothing but its inputs.

There are no globals, no calls, no attributes of Python objects (`a.b` is the member `b` of the JSON object `a`), and
few filters: those whose result is about as large as what they are given, or is counted. Arithmetic is for numbers.

`fill_in` runs in a process of a pool (`rendering.py`). What is bounded there is CPU time, not time by the clock, so
that a busy machine refuses nothing.
"""

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NoReturn

import jiter
from jinja2 import StrictUndefined, TemplateError, Undefined, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from consumers.flows.pool_worker import ANSWERED, FAILED, UNSENDABLE, packed
from topology.lanes import MIB

MOST_BYTES: Final = MIB
"""Of what a template may become: as large as a request may be."""
FILTERS: Final = frozenset({
    "abs", "count", "default", "d", "first", "float", "int", "items", "last", "length", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "title", "trim", "truncate", "unique",
    "upper",
})  # fmt: skip
STATEMENTS: Final = (nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Assign)
"""No other one: a block that is kept (`set` without `=`, `filter`, `macro`) grows where nothing is counted."""
PRECISION_AT_MOST: Final = 20
CPU_S: Final = 1.0
"""The most CPU time for one text, and for what a fan-out goes over."""
TOGETHER_S: Final = 0.25
"""Of a fan-out's items, a call returns those that were filled in after so long, or with `MOST_BYTES` in all, so that
others' turns come, and the worker holds little."""
LATE: Final = f"it takes more than {CPU_S:g} s of CPU time; give it less input, or divide it by a step with `each`"
DOES_NOT_FIT: Final = "its template does not fit the input: "
OUT_OF_MEMORY: Final = 77
"""The exit code of a process that had not enough memory: what is left of it may be too little for the next call."""


class Unrendered(Exception):
    """A template could not be filled in; the text says why, without what was put in."""


class _Late(BaseException):
    """The CPU time is over. No `except Exception` of a filter or of Jinja catches it."""


class Misfit(Exception):
    """The input is not what a step goes on with; the text says why."""


class TooLong(Unrendered):
    """It became larger than `MOST_BYTES`."""


class _Sandbox(SandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "//", "/", "+"})

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True, finalize=_text)
        self.globals.clear()
        own: dict[str, Any] = {"tojson": _as_json, "string": _text, "join": _join, "round": _round, "sum": _sum}
        self.filters = {name: self.filters[name] for name in FILTERS} | own

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


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, default=list)  # a list of what a filter yields


def _as_json(value: Any) -> str:
    if isinstance(value, Undefined):
        str(value)  # raises what says which
    return _ENCODER.encode(value)


def _text(value: Any) -> Any:
    """What is put in, in JSON's notation, unless it is text."""
    return value if isinstance(value, (str, Undefined)) else _as_json(value)


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
    """Counts what `~` puts together. Raises Unrendered for statements and filters that are not available."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.Stmt) and not isinstance(node, STATEMENTS):
            raise Unrendered(f"line {node.lineno}: a template has {{{{ }}}}, for, if and set … = …, and nothing else")
        return super().generic_visit(node, *args, **kwargs)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name not in (known := _sandbox().filters):
            names = ", ".join(sorted(known))
            raise Unrendered(f"line {node.lineno}: there is no filter {node.name[:40]!r}; there are {names}")
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        at: dict[str, Any] = {"lineno": node.lineno, "environment": node.environment}
        return nodes.Filter(nodes.List(node.nodes, **at), "join", [], [], None, None, **at)


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
        pieces, size = list[str](), 0
        with _in_plain_words():
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_BYTES:
                    raise TooLong(_GROWS)
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
            module: Any = self._template.make_module(dict(values))
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
    except (Unrendered, MemoryError):
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


# ---- what a process of the pool does ---------------------------------------------------------------------------------


def fill_in(call: bytes) -> bytes:
    """Carries out an order (`rendering.Order`, a line of JSON) on the state that follows it. Returns, packed, the
    number of a fan-out's items and the texts; or an error."""
    order, _, state = call.partition(b"\n")
    try:
        texts, items = filled_in(state, **json.loads(order))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except TooLong as error:
        return packed([(UNSENDABLE, str(error).encode())])
    except (Unrendered, Misfit) as error:
        why = f"{DOES_NOT_FIT}{error}" if isinstance(error, Unrendered) else str(error)
        return packed([(FAILED, why.encode(errors="replace"))])
    return packed([(ANSWERED, str(items).encode()), *((ANSWERED, text) for text in texts)])


def filled_in(state: bytes, *, prompt: str, value: str, each: str, numbers: Sequence[int]) -> tuple[list[bytes], int]:
    """The texts, and the number of a fan-out's items. Raises Unrendered, Misfit."""
    with _cpu_limited():
        values = _values(state)
        items = _items(each, values) if each else None
    if items is None:
        with _cpu_limited():
            return [_filled_in(prompt, value, values)], 0
    texts, size, began_s = list[bytes](), 0, time.process_time()
    for number in numbers:
        if number >= len(items) or size >= MOST_BYTES or time.process_time() - began_s >= TOGETHER_S:
            break
        try:
            with _cpu_limited():
                texts.append(_filled_in(prompt, value, {**values, "item": items[number], "number": number + 1}))
        except Unrendered:
            if not texts:
                raise
            break  # it will be the first one of the next call
        size += len(texts[-1])
    return texts, len(items)


def _values(state: bytes) -> dict[str, Any]:
    try:
        found = jiter.from_json(state, cache_mode="none")
    except ValueError:  # the parts of the state were read before: together they are deeper
        raise Misfit("its input or an output is nested too deeply to be given to a step") from None
    return {"input": found["input"], **found["outputs"]}


def _items(each: str, values: Mapping[str, Any]) -> list[Any]:
    found = _expression(each).value(values)
    if not isinstance(found, list):
        kind = {dict: "an object", str: "a text", type(None): "null", bool: "a boolean"}.get(type(found), "a number")
        raise Misfit(f"each: found {kind}, allowed is a list")
    return found


def _filled_in(prompt: str, value: str, values: Mapping[str, Any]) -> bytes:
    if prompt:
        return _template(prompt).render(values).encode(errors="replace")
    return json.dumps(values[value], separators=(",", ":")).encode()


@cache
def _template(source: str) -> Template:
    return Template(source)


@cache
def _expression(source: str) -> Expression:
    return Expression(source)


@contextmanager
def _cpu_limited() -> Iterator[None]:
    """Raises Unrendered in the block when it has taken `CPU_S`.

    Python drops what is raised in a destructor or a weak reference's callback, so the signal comes until one is heard.
    """
    signal.signal(signal.SIGPROF, _raise_late)
    signal.setitimer(signal.ITIMER_PROF, CPU_S, CPU_S / 10)
    try:
        yield
    except _Late:
        raise Unrendered(LATE) from None
    finally:
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _raise_late(*_: object) -> NoReturn:
    raise _Late
