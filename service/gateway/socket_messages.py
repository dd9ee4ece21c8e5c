"""What a client may say on a WebSocket, read strictly.

    {"type": "submit", "body": {…}, "id": "…", "headers": {"x-lane-name": "batch"}, "subscribe": true, "ref": "…"}
    {"type": "subscribe", "id": "…", "after": 0, "ref": "…"}
    {"type": "unsubscribe", "id": "…", "ref": "…"}
    {"type": "cancel", "id": "…", "ref": "…"}

Only `type`, and `body` or `id`, are needed. `ref` comes back with the answer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from aiohttp import WSCloseCode

LONGEST_REF: Final = 128
LARGEST_NUMBER: Final = 1 << 53
HEADERS_AT_MOST: Final = 20
LONGEST_HEADER: Final = 1000
_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "submit": frozenset({"type", "ref", "body", "id", "headers", "subscribe"}),
    "subscribe": frozenset({"type", "ref", "id", "after"}),
    "unsubscribe": frozenset({"type", "ref", "id"}),
    "cancel": frozenset({"type", "ref", "id"}),
}


class Rubbish(Exception):
    """The connection is closed for this, with a code and a reason."""

    def __init__(self, code: int, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message."""

    type: Literal["submit", "subscribe", "unsubscribe", "cancel"]
    ref: str | None = None
    id: str | None = None
    """None: one is made, for a `submit`."""
    after: int = 0
    subscribe: bool = True
    """Whether the request that is submitted is followed on this connection."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def read(text: str) -> Said:
    """Raises Rubbish: 1007 if it is no JSON object, 1008 if it is none of these messages."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise Rubbish(WSCloseCode.INVALID_TEXT, "not JSON") from None
    if not isinstance(found, dict):
        raise Rubbish(WSCloseCode.INVALID_TEXT, "not a JSON object")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _wrong(f"type: allowed are {', '.join(_FIELDS)}")
    if not found.keys() <= _FIELDS[kind]:
        raise _wrong(f"{kind}: allowed are the fields {', '.join(sorted(_FIELDS[kind]))}")
    if kind == "submit" and not isinstance(found.get("body"), dict):
        raise _wrong("submit: body: an object is needed")
    if kind != "submit" and "id" not in found:
        raise _wrong(f"{kind}: id is needed")
    return Said(
        type=kind,  # type: ignore[arg-type]
        ref=_text(found, "ref", LONGEST_REF),
        id=_text(found, "id", LONGEST_REF),
        after=_number(found),
        subscribe=_bool(found),
        headers=_headers(found.get("headers", {})),
        body=json.dumps(found["body"]).encode() if kind == "submit" else b"",
    )


def _text(found: Mapping[str, Any], name: str, longest: int) -> str | None:
    value = found.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= longest):
        raise _wrong(f"{name}: a string of at most {longest} characters")
    return value


def _number(found: Mapping[str, Any]) -> int:
    value = found.get("after", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_NUMBER:
        raise _wrong("after: the number of an entry")
    return value


def _bool(found: Mapping[str, Any]) -> bool:
    value = found.get("subscribe", True)
    if not isinstance(value, bool):
        raise _wrong("subscribe: true or false")
    return value


def _headers(value: object) -> Mapping[str, str]:
    if isinstance(value, dict) and len(value) <= HEADERS_AT_MOST and all(map(_is_header, value.values())):
        return value
    raise _wrong(
        f"headers: an object of at most {HEADERS_AT_MOST} strings, each of at most {LONGEST_HEADER} ASCII characters"
    )


def _is_header(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_HEADER and value.isascii() and value.isprintable()


def _wrong(reason: str) -> Rubbish:
    return Rubbish(WSCloseCode.POLICY_VIOLATION, reason)
