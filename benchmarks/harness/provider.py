"""A provider that needs little CPU: a minimal HTTP/1.1 server in its own process, so that it does not limit the
measurement.

It answers each call, with Anthropic's headers, after the time that is written in the request's prompt (`load.py`), and
records when the call began and ended in a file that the benchmark maps into memory too. It also accepts traces, and
drops them. `lanekeeper simulate` simulates more, but one of its answers costs as much CPU as the rest of a request.

    python -m benchmarks.harness.provider CALL_LOG MOST PORT
"""

import asyncio
import json
import mmap
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, cast

import uvloop

from benchmarks.harness.load import MODEL, read_mark
from benchmarks.harness.processes import clean_environ, process
from tests.support.private_broker import LOOPBACK, free_ports

TEXT = "A lane is a queue with a pool of consumers of its own. " * 8
LOOK_EVERY_S = 0.01
_TAKEN = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"
ANSWER = json.dumps(
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "stop_sequence": None,
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 250, "output_tokens": 100},
    }
).encode()
_HEAD: Final = 3
"""How many numbers the file begins with: the calls, the repeated calls, and whether answers are held back."""


class CallLog:
    """The times at which the call of each request began and ended; 0.0: not yet."""

    def __init__(self, path: Path, *, most: int) -> None:
        """Creates the file if it is missing. `most`: an upper bound, which no request's number reaches."""
        self.most = most
        size = 8 * (_HEAD + 2 * most)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        view = memoryview(self._map)
        self._counts = view[: 8 * _HEAD].cast("q")
        self.began = view[8 * _HEAD : 8 * (_HEAD + most)].cast("d")
        self.ended = view[8 * (_HEAD + most) :].cast("d")

    @property
    def calls(self) -> int:
        return self._counts[0]

    @property
    def repeated(self) -> int:
        """Calls for a request that had been called before."""
        return self._counts[1]

    @property
    def held(self) -> bool:
        """While true, the provider holds back its answers, so that a drain begins when all its workers are ready."""
        return bool(self._counts[2])

    @held.setter
    def held(self, on: bool) -> None:
        self._counts[2] = on

    def begin(self, number: int, now_s: float) -> None:
        self._counts[0] += 1
        if self.began[number]:
            self._counts[1] += 1
        else:
            self.began[number] = now_s

    def clear(self) -> None:
        """Set everything to 0 for the next run. There must be no calls meanwhile."""
        self._map[:] = bytes(len(self._map))


def _head() -> bytes:
    reset = (datetime.now(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = ["HTTP/1.1 200 OK", "request-id: req_1", "anthropic-organization-id: benchmark"]
    for name in ("requests", "input-tokens", "output-tokens"):
        prefix = f"anthropic-ratelimit-{name}"
        lines += [f"{prefix}-limit: 900000000", f"{prefix}-remaining: 899999000", f"{prefix}-reset: {reset}"]
    lines += ["content-type: application/json", f"content-length: {len(ANSWER)}", "", ""]
    return "\r\n".join(lines).encode()


class Connection(asyncio.Protocol):
    """A client's connection, on which calls follow one another."""

    call_log: CallLog
    held: ClassVar[list[Callable[[], None]]] = []
    """Answers that are held back."""
    head = _head()

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

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
        if self.call_log.held:
            self.held.append(partial(self._answer, number))
        elif call_ms:
            asyncio.get_running_loop().call_later(call_ms / 1000, self._answer, number)
        else:
            self._answer(number)

    def _answer(self, number: int) -> None:
        self.call_log.ended[number] = time.monotonic()
        if not self._transport.is_closing():
            self._transport.write(self.head + ANSWER)


@asynccontextmanager
async def provider(folder: Path, *, most: int) -> AsyncIterator[tuple[str, CallLog]]:
    (port,), path = free_ports(1), folder / "call_log"
    call_log = CallLog(path, most=most)
    command = (sys.executable, "-m", "benchmarks.harness.provider", str(path), str(most), str(port))
    async with process(command, environ=clean_environ(), log=folder / "provider", port=port):
        yield f"http://{LOOPBACK}:{port}", call_log


async def main(path: Path, most: int, port: int) -> None:
    Connection.call_log = CallLog(path, most=most)
    await asyncio.get_running_loop().create_server(Connection, LOOPBACK, port, backlog=1024)
    looks = 0
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        looks += 1
        if looks % 100 == 0:
            Connection.head = _head()
        if Connection.held and not Connection.call_log.held:
            waiting, Connection.held[:] = Connection.held[:], []
            for answer in waiting:
                answer()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
