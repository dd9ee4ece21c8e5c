"""Changes one field of a JSON object. All other bytes stay as they are, also numbers that Python cannot write, such as
1e400. The object is valid, and has no key twice."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"[ \t\n\r]*")


def with_field(body: bytes, name: str, value: Any) -> bytes:
    """With a new value in the field's place; in front, if it is missing."""
    text, written = body.decode(), json.dumps(value, separators=(",", ":"))
    for found, _, begin, end in _members(text):
        if found == name:
            return (text[:begin] + written + text[end:]).encode()
    comma = "," if any(_members(text)) else ""
    return text.replace("{", f"{{{json.dumps(name)}:{written}{comma}", 1).encode()


def without_field(body: bytes, name: str) -> bytes:
    """Unchanged if the field is missing."""
    text, before = body.decode(), None
    members = _members(text)
    for found, begin, _, end in members:
        if found == name:
            after = next(members, None)
            if before is not None:  # with the comma in front
                return (text[:before] + text[end:]).encode()
            return (text[:begin] + text[end if after is None else after[1] :]).encode()
        before = end
    return body


def text_of(text: str, name: str) -> str:
    """The JSON of a field that is there, as it is written. If it is there twice, the last one, which Python reads."""
    begin, end = [(begin, end) for found, _, begin, end in _members(text) if found == name][-1]
    return text[begin:end]


def _members(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Of each member: its name, and where it, its value, and both end."""
    at = _after_space(text, text.index("{") + 1)
    while text[at] == '"':
        name, end = _DECODER.raw_decode(text, at)
        value_at = _after_space(text, _after_space(text, end) + 1)
        _, end = _DECODER.raw_decode(text, value_at)
        yield name, at, value_at, end
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
