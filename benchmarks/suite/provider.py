"""A provider that needs little CPU: a minimal HTTP/1.1 server in its own process, so that it does not limit the
measurement.

It answers each call, with Anthropic's headers, after the time that is written in the request's prompt (`load.py`), and
records when the call began and ended. It also accepts traces, and drops them. `lanekeeper simulate` simulates more, but
one of its answers costs as much CPU as the rest of a request.

    python -m suite.provider CALL_LOG MOST        prints the URL
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar

import uvloop

from suite.call_log import CallLog
from suite.load import MODEL, read_mark

TEXT = "A lane is a queue with a pool of consumers of its own. " * 8
LOOK_EVERY_S = 0.01
PARTS = 20
PART_EVERY_S = 0.02
_TAKEN = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"
_STREAMED = re.compile(rb'"stream": ?true')
_MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "stop_sequence": None}
_USAGE = {"input_tokens": 250, "output_tokens": 100}
ANSWER = json.dumps(
    {**_MESSAGE, "content": [{"type": "text", "text": TEXT}], "stop_reason": "end_turn", "usage": _USAGE}
).encode()


def _event(**fields: object) -> bytes:
    data = f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


OPENING = _event(type="message_start", message={**_MESSAGE, "content": [], "stop_reason": None, "usage": _USAGE})
OPENING += _event(type="content_block_start", index=0, content_block={"type": "text", "text": ""})
PART = _event(type="content_block_delta", index=0, delta={"type": "text_delta", "text": TEXT[:20]})
CLOSING = _event(type="content_block_stop", index=0)
CLOSING += _event(type="message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=_USAGE)
CLOSING += _event(type="message_stop") + b"0\r\n\r\n"


def _heads() -> tuple[bytes, bytes]:
    """The HTTP headers of a whole answer and of a streamed one."""
    reset = (datetime.now(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = ["HTTP/1.1 200 OK", "request-id: req_1", "anthropic-organization-id: benchmark"]
    for name in ("requests", "input-tokens", "output-tokens"):
        prefix = f"anthropic-ratelimit-{name}"
        lines += [f"{prefix}-limit: 900000000", f"{prefix}-remaining: 899999000", f"{prefix}-reset: {reset}"]
    whole = [*lines, "content-type: application/json", f"content-length: {len(ANSWER)}", "", ""]
    streamed = [*lines, "content-type: text/event-stream", "transfer-encoding: chunked", "", ""]
    return "\r\n".join(whole).encode(), "\r\n".join(streamed).encode()


class Connection(asyncio.Protocol):
    """A client's connection, on which calls follow one another."""

    call_log: CallLog
    held: ClassVar[list[Callable[[], None]]] = []
    """Answers that are held back."""
    whole, streamed = _heads()

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        head = self._buffer[:end].lower()
        at = head.index(b"content-length:") + 15
        size = int(head[at : head.index(b"\r", at)])
        if len(self._buffer) < end + size:
            return
        body, self._buffer = self._buffer[end : end + size], self._buffer[end + size :]
        if head.startswith(b"post /v1/traces"):
            self._transport.write(_TAKEN)
        else:
            self._called(body)

    def _called(self, body: bytes) -> None:
        number, call_ms = read_mark(body)
        self.call_log.begin(number, time.monotonic())
        answer = self._stream if _STREAMED.search(body, 0, 128) else self._answer
        if self.call_log.held:
            self.held.append(partial(answer, number))
        elif call_ms:
            asyncio.get_running_loop().call_later(call_ms / 1000, answer, number)
        else:
            answer(number)

    def _answer(self, number: int) -> None:
        self.call_log.ended[number] = time.monotonic()
        if not self._transport.is_closing():
            self._transport.write(self.whole + ANSWER)

    def _stream(self, number: int, left: int = PARTS) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self.call_log.ended[number] = time.monotonic()
            self._transport.write(CLOSING)
            return
        self._transport.write(self.streamed + OPENING + PART if left == PARTS else PART)
        asyncio.get_running_loop().call_later(PART_EVERY_S, self._stream, number, left - 1)


async def main(path: Path, most: int) -> None:
    Connection.call_log = CallLog(path, most=most)
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    looks = 0
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        looks += 1
        if looks % 100 == 0:
            Connection.whole, Connection.streamed = _heads()
        if Connection.held and not Connection.call_log.held:
            waiting, Connection.held[:] = Connection.held[:], []
            for answer in waiting:
                answer()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2])))
