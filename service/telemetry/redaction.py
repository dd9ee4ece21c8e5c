"""Removes secrets and content from log lines: keys, bearer tokens, the user and password of a URL, prompts, answers.

This is the last line of defence: no code logs secrets on purpose, but an error's text may quote a URL, and a library's
warning may quote a header.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

GONE: Final = "…"
_SECRETS: Final = re.compile(
    r"sk-ant-[A-Za-z0-9_\-]+"
    r"|(?P<bearer>\bbearer\s+)[^\s\"',;]+"
    # Greedy up to the last @, because a password may contain @, and an invalid URL in an error any other text.
    r"|(?P<scheme>(?<![a-z0-9+.\-])[a-z][a-z0-9+.\-]*://)[^\s\"'<>]*@",
    re.IGNORECASE,
)
_HINT: Final = re.compile(r"sk-ant-|bearer\s|://", re.IGNORECASE)  # if this does not match, _SECRETS cannot match
_SECRET_NAME: Final = re.compile(r"api[-_]?key|authorization|passw|secret|(^|[-_])token$|cookie", re.IGNORECASE)
_CONTENT_NAMES: Final = frozenset({"answer", "body", "content", "messages", "prompt"})
_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What controls a terminal, begins a line, or changes the direction of what follows."""
_LINE: Final = re.compile(r"[^\n\t]+")
_LONGEST: Final = 2000
_DEEPEST: Final = 6


def text(value: str) -> str:
    """The text without secrets; control characters are escaped, so that it cannot forge a log line."""
    shown = value if len(value) <= _LONGEST else value[:_LONGEST] + GONE
    if _HINT.search(shown):
        shown = _SECRETS.sub(_gone, shown)
    return one_line(shown)


def one_line(value: str) -> str:
    """The text with control and direction characters escaped: what others wrote controls no terminal, and forges no
    line."""
    return value if value.isprintable() else _CONTROL.sub(_escaped, value)


def lines(value: str) -> str:
    """The same for a text that may have several lines."""
    return value if value.isprintable() else _LINE.sub(lambda found: one_line(found[0]), value)


def json_text(value: str) -> str:
    """The same for a text in JSON, which means what it meant."""
    return _LINE.sub(lambda found: _CONTROL.sub(lambda each: f"\\u{ord(each[0]):04x}", found[0]), value)


def fields(event: Mapping[str, Any], *, with_content: bool) -> dict[str, Any]:
    """Fields as plain values, without secrets, and without prompts and answers unless `with_content`."""
    return {text(str(name)): _field(str(name), value, with_content, _DEEPEST) for name, value in event.items()}


def _field(name: str, value: object, with_content: bool, depth: int) -> Any:
    if _names_secret(name):
        return GONE if value else value
    if name in _CONTENT_NAMES and not with_content:
        return f"<{len(value)}>" if isinstance(value, str | bytes | list | tuple | dict) else GONE
    return _plain(value, with_content, depth)


@lru_cache(maxsize=1024)
def _names_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _plain(value: object, with_content: bool, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if depth == 0:
        return GONE
    if isinstance(value, Mapping):
        return {text(str(name)): _field(str(name), entry, with_content, depth - 1) for name, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, with_content, depth - 1) for item in value]
    return text(str(value))


def _gone(found: re.Match[str]) -> str:
    if (scheme := found["scheme"]) is not None:
        return f"{scheme}{GONE}@"
    return f"{found['bearer']}{GONE}" if found["bearer"] is not None else f"sk-ant-{GONE}"


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
