"""Answers of a malicious provider: whole HTTP responses as bytes, by name.

    ANSWERS["a huge array"](request)     the pieces to send, in order; a float is a pause in seconds

`request` is the request received; an answer may quote its prompt. Its body says whether it is streamed. Each answer
below suits both kinds, unless its name says otherwise.
"""

import gzip
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

MIB = 1024 * 1024
MESSAGE = b'"type":"message","role":"assistant","model":"m","usage":{"input_tokens":1,"output_tokens":1}'
START = b'{"type":"message_start","message":{"content":[],"stop_reason":null,' + MESSAGE + b"}}"
DELTA = b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1}}'
STOP = b'{"type":"message_stop"}'
TEXT_BLOCK = b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}'


@dataclass(frozen=True)
class Asked:
    """A request as the malicious provider received it."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def streamed(self) -> bool:
        return json.loads(self.body).get("stream") is True


Piece: TypeAlias = bytes | float
Answering: TypeAlias = Callable[[Asked], Iterable[Piece]]


def head(status: int = 200, *, body: bytes | None = None, **headers: str) -> bytes:
    """The head of a response, with its body if that is given; else the body follows in chunks."""
    fields = {
        "connection": "close",
        "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    fields |= {"content-length": str(len(body))} if body is not None else {"transfer-encoding": "chunked"}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


def chunked(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces of a body in HTTP's chunked encoding, for a body of unknown length."""
    for piece in pieces:
        yield piece if isinstance(piece, float) else b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def sse(*events: bytes) -> bytes:
    return b"".join(b"data: " + event + b"\n\n" for event in events)


def whole(content: bytes, *, message: bytes = MESSAGE) -> list[Piece]:
    """A Message without streaming, with this JSON as its content."""
    return [head(body=b'{"stop_reason":"end_turn",' + message + b',"content":' + content + b"}")]


def streamed(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """A stream of Server-Sent Events: the pieces between a valid beginning and a valid end."""
    yield head(content_type="text/event-stream")
    yield from chunked(itertools.chain([sse(START, TEXT_BLOCK)], pieces, [sse(DELTA, STOP)]))


def deltas(count: int, delta: bytes, *, at_once: int = 1000) -> Iterator[Piece]:
    """`count` deltas of the first block."""
    one = sse(b'{"type":"content_block_delta","index":0,"delta":' + delta + b"}")
    for start in range(0, count, at_once):
        yield one * min(at_once, count - start)


def _either(not_streamed: Callable[[], Iterable[Piece]], events: Callable[[], Iterable[Piece]]) -> Answering:
    return lambda asked: streamed(events()) if asked.streamed else not_streamed()


def _content(content: Callable[[], bytes]) -> Answering:
    """The same JSON, as the content of a Message or in one event."""
    return _either(
        lambda: whole(content()),
        lambda: [sse(b'{"type":"content_block_start","index":1,"content_block":{"type":"x","x":' + content() + b"}}")],
    )


def _deltas(count: int, delta: bytes) -> Answering:
    return lambda asked: streamed(deltas(count, delta)) if asked.streamed else whole(b"[]")


def _tool_input(text: str, count: int) -> Answering:
    """A tool's input, sent as pieces of JSON: an array that repeats `text` `count` times."""

    def delta(piece: str) -> bytes:
        return b'{"type":"input_json_delta","partial_json":' + json.dumps(piece).encode() + b"}"

    return _either(
        lambda: whole(b"[]"), lambda: itertools.chain(deltas(1, delta("[")), deltas(count, delta(text), at_once=1))
    )


def _error(body: Callable[[Asked], bytes], *, status: int = 400, **headers: str) -> Answering:
    return lambda asked: [head(status, body=body(asked), **headers)]


def error_body(message: str, *, type: str = "invalid_request_error") -> bytes:
    """An error in Anthropic's form, which is the same in the middle of a stream."""
    return json.dumps({"type": "error", "error": {"type": type, "message": message}}).encode()


def _quoting(asked: Asked) -> bytes:
    return error_body(f"I did not like this: {asked.body.decode()}")


def _quoting_streamed(asked: Asked) -> Iterable[Piece]:
    """An error that quotes the prompt; for a streamed request, in the middle of the stream."""
    return streamed([sse(_quoting(asked))]) if asked.streamed else [head(500, body=_quoting(asked))]


@cache
def bomb() -> bytes:
    return gzip.compress(b" " * (100 * MIB))


def _endless(piece: bytes, *, pause_s: float = 0.0) -> Iterator[Piece]:
    while True:
        yield piece
        if pause_s:
            yield pause_s


def redirect(to: str, *, status: int = 307) -> Answering:
    """A redirect that keeps the body. It is not in the corpus, because it needs an address."""
    return lambda _: [head(status, body=b"", location=to)]


ANSWERS: Mapping[str, Answering] = {
    # expensive to parse
    "a huge array": _content(lambda: b"[" + b"[]," * (20 * MIB // 3) + b"[]]"),
    "an array of 12 MiB": _content(lambda: b"[" + b"[]," * (4 * MIB) + b"[]]"),
    "a million keys": _content(lambda: b"[{" + b",".join(b'"key-%d":0' % n for n in range(1_000_000)) + b"}]"),
    "huge numbers": _content(lambda: b"[" + b",".join([b"9" * 4300] * 2500) + b"]"),
    "deeply nested": _content(lambda: b"[" * 3_000_000),
    "a text of 12 MiB": _content(lambda: b'[{"type":"text","text":"' + rb"\n,\"" * (12 * MIB // 5) + b'"}]'),
    # expensive to assemble from parts
    "quadratic citations": _deltas(200_000, b'{"type":"citations_delta","citation":{}}'),
    "quadratic lists": _deltas(200_000, b'{"type":"x_delta","list":[{}]}'),
    "a million tiny deltas": _deltas(1_000_000, b'{"type":"text_delta","text":"a"}'),
    "a million pings": _either(lambda: whole(b"[]"), lambda: _tiny(1_000_000)),
    "a million blocks": _either(lambda: whole(b"[]"), lambda: _blocks(1_000_000)),
    "a tool's input that is a huge array": _tool_input("[]," * 10_000, 400),
    # expensive to read
    "an endless body": _either(
        lambda: itertools.chain([head()], chunked(_endless(b" " * 65536))), lambda: _endless(b": " + b"x" * 65536)
    ),
    "endless pings": _either(lambda: whole(b"[]"), lambda: _endless(sse(b'{"type":"ping"}') * 1000)),
    "one event of 20 MiB": _either(
        lambda: whole(b'["' + b"a" * (20 * MIB) + b'"]'), lambda: [b"data: " + b"a" * (20 * MIB)]
    ),
    "one event of a million lines": _either(lambda: whole(b"[]"), lambda: [b"data:\n" * 500_000]),
    "a trickle": _either(
        lambda: itertools.chain([head()], chunked(_endless(b" ", pause_s=0.05))),
        lambda: _endless(b": a comment\n", pause_s=0.05),
    ),
    "a gzip bomb": lambda _: [head(body=bomb(), content_encoding="gzip")],
    "a gzip bomb in a stream": lambda _: [head(body=bomb(), content_encoding="gzip", content_type="text/event-stream")],
    "a gzip bomb in an error": _error(lambda _: bomb(), content_encoding="gzip"),
    "a packed error": _error(lambda _: gzip.compress(error_body("no such model")), content_encoding="gzip"),
    "an error of a huge array": _error(lambda _: b"[" + b"[]," * 20_000 + b"[]]"),
    "an error that is deeply nested": _error(lambda _: b"[" * 60_000),
    "an error's type of 60 KB": _error(lambda _: error_body("no", type="t" * 60_000)),
    "an error event of 3 MiB": _either(lambda: whole(b"[]"), lambda: [sse(error_body("a " * (3 * MIB // 2)))]),
    "a model's name of a megabyte": _either(
        lambda: whole(b"[]", message=MESSAGE.replace(b'"m"', b'"' + b"m" * MIB + b'"')),
        lambda: [sse(START.replace(b'"m"', b'"' + b"m" * MIB + b'"'))],
    ),
    "counts without end": _either(lambda: whole(b"[]"), lambda: _counts()),
    "an endless error": lambda _: itertools.chain([head(400)], chunked(_endless(b" " * 65536))),
    "an error that quotes the prompt": _error(_quoting),
    "a failure that quotes the prompt": _quoting_streamed,
    "a thousand headers": _error(lambda _: b"{}", status=400, **{f"x-{n}": "a" * 100 for n in range(1000)}),
    "a header of a megabyte": _error(lambda _: b"{}", x_long="a" * MIB),
    "endless headers": lambda _: itertools.chain([b"HTTP/1.1 200 OK\r\n"], _endless(b"x-a: b\r\n" * 1000)),
}


def _tiny(count: int) -> Iterator[Piece]:
    for _ in range(count // 1000):
        yield sse(b'{"type":"ping"}') * 1000


def _blocks(count: int) -> Iterator[Piece]:
    for at in range(0, count, 1000):
        yield sse(
            *(
                b'{"type":"content_block_start","index":%d,"content_block":{"type":"text"}}' % n
                for n in range(at, at + 1000)
            )
        )


def _counts() -> Iterator[Piece]:
    """A usage with many fields, followed by many totals."""
    fields = b",".join(b'"count-%d":1' % n for n in range(40_000))
    yield sse(START.replace(b'"output_tokens":1', fields))
    yield sse(DELTA) * 500
