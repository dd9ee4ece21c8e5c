"""Reads the messages that a client may send on a WebSocket, and refuses all others.

    {"type": "submit", "body": {…}, "id": "…", "headers": {"x-lane-name": "batch"}, "subscribe": true, "ref": "…"}
    {"type": "subscribe", "id": "…", "after": 0, "ref": "…"}
    {"type": "unsubscribe", "id": "…", "ref": "…"}
    {"type": "cancel", "id": "…", "ref": "…"}

`type` is required in all messages, `body` in `submit`, and `id` in the others. If a message has a `ref`, the answer
contains the same `ref`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from aiohttp import WSCloseCode

from service.gateway.polling import LARGEST_NUMBER
from topology.codec import bounds

LONGEST_REF: Final = 128
"""The maximum length, in characters, of `ref` and of `id` in a client's WebSocket message."""
HEADERS_AT_MOST: Final = 20
"""How many headers a client's WebSocket message may have at most."""
LONGEST_HEADER: Final = 1000
"""The maximum length, in characters, of the value of a header in a client's WebSocket message."""
VALUES_OUTSIDE_BODY: Final = 100
"""How many JSON keys and values a client's WebSocket message may have in addition to those of its request body. Valid
messages have fewer."""
FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "submit": frozenset({"type", "ref", "body", "id", "headers", "subscribe"}),
    "subscribe": frozenset({"type", "ref", "id", "after"}),
    "unsubscribe": frozenset({"type", "ref", "id"}),
    "cancel": frozenset({"type", "ref", "id"}),
}
NEEDED: Final[Mapping[str, str]] = {"submit": "body", "subscribe": "id", "unsubscribe": "id", "cancel": "id"}
"""For each type of WebSocket message: the field that it must have in addition to `type`."""


class InvalidMessage(Exception):
    """Raised if a client's WebSocket message is invalid: the connection is then closed with the close code `code`, and
    with `reason`."""

    def __init__(self, code: int, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientMessage:
    """One message that a client has sent over a WebSocket, after it was checked."""

    type: Literal["submit", "subscribe", "unsubscribe", "cancel"]
    ref: str | None = None
    id: str | None = None
    """The request's id. None, which is possible only for `submit`, means that the gateway creates an id."""
    after: int = 0
    subscribe: bool = True
    """For `submit`: whether the connection follows the request."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def read(text: str, *, max_values: int = bounds.VALUES) -> ClientMessage:
    """Parse and check a client's message. `max_values`: the most JSON keys and values that a body may have. Raises
    InvalidMessage with the close code 1007 if the text is not a JSON object, 1008 if it is not a valid message, 1009 if
    it has too many keys and values."""
    if (excess := bounds.excess(text.encode(), max_values=max_values + VALUES_OUTSIDE_BODY)) is not None:
        raise InvalidMessage(WSCloseCode.MESSAGE_TOO_BIG, excess)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidMessage(WSCloseCode.INVALID_TEXT, "not JSON") from None
    if not isinstance(found, dict):
        raise InvalidMessage(WSCloseCode.INVALID_TEXT, "not a JSON object")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise _wrong(f"type: allowed are {', '.join(FIELDS)}")
    if not found.keys() <= FIELDS[kind]:
        raise _wrong(f"{kind}: allowed are the fields {', '.join(sorted(FIELDS[kind]))}")
    if kind == "submit" and not isinstance(found.get("body"), dict):
        raise _wrong("submit: body: an object is needed")
    if found.get(NEEDED[kind]) is None:
        raise _wrong(f"{kind}: {NEEDED[kind]} is needed")
    for name, (is_valid, wanted) in _VALUES.items():
        if name in found and not is_valid(found[name]):
            raise _wrong(f"{name}: {wanted}")
    if kind == "submit":
        found["body"] = json.dumps(found["body"]).encode()
    return ClientMessage(**found)


def _is_text(value: object) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= LONGEST_REF)


def _are_headers(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= HEADERS_AT_MOST and all(map(_is_header, value.values()))


def _is_header(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_HEADER and value.isascii() and value.isprintable()


_TEXT: Final = f"a string of at most {LONGEST_REF} characters"
_HEADERS: Final = f"an object of at most {HEADERS_AT_MOST} strings, each of at most {LONGEST_HEADER} ASCII characters"
_VALUES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "ref": (_is_text, _TEXT),
    "id": (_is_text, _TEXT),
    "after": (lambda value: type(value) is int and 0 <= value <= LARGEST_NUMBER, "the number of an entry"),
    "subscribe": (lambda value: isinstance(value, bool), "true or false"),
    "headers": (_are_headers, _HEADERS),
}
"""For each field except `type` and `body`: the check of its value, and the error text, which says what is allowed."""


def _wrong(reason: str) -> InvalidMessage:
    return InvalidMessage(WSCloseCode.POLICY_VIOLATION, reason)
