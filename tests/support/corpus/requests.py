"""Bodies that a malicious publisher sends, by name: some take long to read, some are small and unpack to large ones."""

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

MIB = 1024 * 1024
UNPACKED = 8 * MIB


@dataclass(frozen=True)
class Nasty:
    """A request. `code`: the error that must refuse it; None: it must be accepted."""

    make: Callable[[], bytes]
    """Makes the body, not compressed."""
    code: str | None
    packed: bool = False

    @cached_property
    def body(self) -> bytes:
        made = self.make()
        return gzip.compress(made, mtime=0) if self.packed else made

    @property
    def content_encoding(self) -> str | None:
        return "gzip" if self.packed else None


def body(more: bytes = b"", *, content: bytes = b'"hi"', model: bytes = b'"claude-sonnet-5-5"') -> bytes:
    """A complete body with these fields at its end."""
    turn = b'{"role":"user","content":' + content + b"}"
    return b'{"model":' + model + b',"max_tokens":10,"messages":[' + turn + b"]" + more + b"}"


def filled(piece: bytes, *, size: int, first: bytes = b',"x":[', last: bytes = b"0]") -> bytes:
    """A body of about `size` bytes that repeats `piece`."""
    return body(first + piece * (size // len(piece)) + last)


def text(piece: bytes, *, size: int) -> bytes:
    """A body whose prompt repeats `piece`."""
    return body(content=b'"' + piece * (size // len(piece)) + b'"')


def turns(count: int, turn: bytes = b'{"role":"user","content":"a"}') -> bytes:
    return b'{"messages":[' + b",".join([turn] * count) + b"]}"


def keys(count: int) -> bytes:
    """`count` different keys."""
    return b",".join(b'"key-%d":%d' % (n, n) for n in range(count))


def large(piece: bytes) -> Nasty:
    """A body as large as allowed, compressed to 8 to 30 KiB."""
    return Nasty(lambda: filled(piece, size=UNPACKED - 200, first=b',"x":"', last=b'"'), None, packed=True)


REQUESTS: Mapping[str, Nasty] = {
    # many values
    "arrays, 8 KiB of gzip": Nasty(
        lambda: body(b',"x":[' + b"[]," * (UNPACKED // 3 - 99) + b"0]"), "too_large", packed=True
    ),
    "arrays and a model that is null": Nasty(
        lambda: body(b',"x":[' + b"[]," * (MIB // 3 - 99) + b"0]", model=b"null"), "too_large"
    ),
    "as many arrays as may be": Nasty(lambda: body(b',"x":[' + b"[]," * 49_000 + b"0]", model=b"null"), None),
    "objects": Nasty(lambda: filled(b'{"a":{}},', size=MIB - 200), "too_large"),
    "numbers": Nasty(lambda: filled(b"1,", size=MIB - 200), "too_large"),
    "a hundred thousand messages": Nasty(lambda: turns(100_000), "too_large", packed=True),
    "as many messages as may be": Nasty(lambda: turns(19_900), None),
    "wrong messages": Nasty(lambda: turns(19_900, b'{"role":1}'), "invalid_request"),
    "messages that are nothing": Nasty(lambda: turns(300_000, b"{}"), "too_large"),
    "keys": Nasty(lambda: body(b"," + keys(49_000)), None),
    "keys of a message": Nasty(lambda: b'{"messages":[{"role":"user","content":"a",' + keys(49_000) + b"}]}", None),
    "keys of the short form": Nasty(lambda: b'{"prompt":"a",' + keys(49_000) + b"}", "invalid_request"),
    "one key again and again": Nasty(lambda: filled(b'"a":1,', size=MIB - 200, first=b",", last=b'"b":1'), "too_large"),
    "one key twice at the end": Nasty(lambda: body(b"," + keys(49_000) + b',"key-0":1'), "invalid_request"),
    # long keys and values
    "a key of a megabyte": Nasty(lambda: body(b',"' + b"k" * (MIB - 200) + b'":1'), None),
    "an unknown key of a megabyte": Nasty(lambda: b'{"prompt":"a","' + b"k" * (MIB - 200) + b'":1}', "invalid_request"),
    "a number of a megabyte": Nasty(lambda: body(b',"x":' + b"9" * (MIB - 200)), "too_large"),
    "numbers of 4,300 digits": Nasty(lambda: filled(b"9" * 4300 + b",", size=MIB - 200), "too_large"),
    "numbers of 128 digits": Nasty(lambda: filled(b"9" * 128 + b",", size=MIB - 200), None),
    "a fraction of a megabyte": Nasty(lambda: body(b',"x":0.' + b"3" * (MIB - 200)), "too_large"),
    "deeply nested": Nasty(lambda: body(b',"x":' + b"[" * (MIB - 200)), "too_large"),
    "nested until it is too deep": Nasty(lambda: body(b',"x":' + b"[" * 90_000), "invalid_request"),
    # strings, which are valid whatever they contain
    "rows of a table": large(b"2026-11-22,0,0,shop\\n"),
    "zeros": large(b"0"),
    "commas": large(b","),
    "escaped quotes": large(b'\\"'),
    "escaped backslashes": large(b"\\\\"),
    "both": large(b'\\\\\\",'),
    "escaped characters": large(b"\\u00e9,"),
    "escaped control characters": large(b"\\u0000"),
    "JSON in JSON in JSON": Nasty(
        lambda: body(content=json.dumps(json.dumps([{"a": [1, "b"]}] * 20_000)).encode()), None
    ),
    "brackets in the prompt": Nasty(lambda: text(b"[],", size=MIB - 200), None),
    "digits in the prompt": Nasty(lambda: text(b"9", size=MIB - 200), None),
    "emoji": large("😀".encode()),
    # not valid JSON
    "spaces, 8 KiB of gzip": Nasty(lambda: b" " * UNPACKED, "invalid_request", packed=True),
    "spaces, 64 KiB of gzip": Nasty(lambda: b" " * (8 * UNPACKED), "too_large", packed=True),
    "a quote that never ends": Nasty(lambda: body(b',"x":"' + b"[]," * (MIB // 3 - 99)), "invalid_request"),
    "arrays behind a quote that is none": Nasty(lambda: b'"' + b"[]," * (MIB // 3 - 99), "invalid_request"),
    "backslashes outside of strings": Nasty(lambda: filled(b"\\[],", size=MIB - 200), "too_large"),
    "not UTF-8": Nasty(lambda: body(content=b'"' + b"\xff" * (MIB - 200) + b'"'), "invalid_request"),
}
