"""All log lines that the code can write, read from its source: event, level and fields."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from lanekeeper.telemetry import signals
from tests.support.sources import product

LEVELS = {"debug", "info", "warning", "error", "exception"}


class LogCall(NamedTuple):
    """One call of a logger."""

    at: str
    event: str
    levels: frozenset[str]
    fields: frozenset[str]


@cache
def log_calls() -> Sequence[LogCall]:
    """All calls of loggers. Fails for a call whose fields are not written out in the source."""
    return tuple(
        _read(node, at=f"{path}:{node.lineno}")
        for path, text in product().items()
        if re.search(r"\b_?log\b", text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _is_log(node)
    )


def _is_log(call: ast.Call) -> bool:
    of = call.func
    if not isinstance(of, ast.Attribute) or of.attr not in {*LEVELS, "log"}:
        return False
    owner = of.value
    return (isinstance(owner, ast.Name) and owner.id == "log") or (
        isinstance(owner, ast.Attribute) and owner.attr == "_log"
    )


def _read(call: ast.Call, *, at: str) -> LogCall:
    assert isinstance(call.func, ast.Attribute)
    event = call.args[1 if call.func.attr == "log" else 0]
    assert isinstance(event, ast.Attribute), f"{at}: the event is no constant of signals.py"
    assert all(each.arg for each in call.keywords), f"{at}: fields are hidden behind **"
    fields = frozenset(str(each.arg) for each in call.keywords) - {"exc_info"}
    return LogCall(at, str(getattr(signals, event.attr)), _levels(call), fields)


def _levels(call: ast.Call) -> frozenset[str]:
    """The levels a call may use. `log.log(WARNING if … else INFO, …)` names them; any other expression: `any`."""
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "log":
        named = frozenset(each.id.lower() for each in ast.walk(call.args[0]) if isinstance(each, ast.Name))
        return named & LEVELS or frozenset({"any"})
    return frozenset({"error" if call.func.attr == "exception" else call.func.attr})
