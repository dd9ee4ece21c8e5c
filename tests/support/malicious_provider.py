"""A malicious provider: a real HTTP server that answers with any bytes that a test chooses.

    async with MaliciousProvider(ANSWERS["a huge array"]) as provider:      the same answer to every call
    async with MaliciousProvider() as provider:                 the prompt chooses: `[[answer: a huge array]]`
        … provider.base_url, provider.asked

In a separate process, so that making the answers takes no time of the tested process:

    with malicious_provider() as base_url:
"""

import asyncio
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen
from typing import Self

from tests.support.corpus.answers import ANSWERS, Answering, Asked, Piece, bomb, deltas, streamed, whole

_NAMED = re.compile(rb"\[\[answer: ([^\]]+)\]\]")


def well(asked: Asked) -> Iterable[Piece]:
    """A good answer, for a prompt that chooses none."""
    if asked.streamed:
        return streamed(deltas(1, b'{"type":"text_delta","text":"well"}'))
    return whole(b'[{"type":"text","text":"well"}]')


class MaliciousProvider:
    """The server, on a free loopback port. It serves one request for each connection."""

    def __init__(self, answering: Answering | None = None) -> None:
        self._answering = answering
        self._server: asyncio.Server | None = None
        self.base_url = ""
        self.asked: list[Asked] = []
        """The requests received, in order."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    def _answer(self, asked: Asked) -> Iterable[Piece]:
        if self._answering is not None:
            return self._answering(asked)
        named = _NAMED.search(asked.body)
        return ANSWERS[named[1].decode()](asked) if named else well(asked)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await _read(reader)
            self.asked.append(asked)
            for piece in self._answer(asked):
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                    continue
                writer.write(piece)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has closed the connection
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *fields = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in fields)}
    method, path, _ = line.split(" ", 2)
    return Asked(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


@contextmanager
def malicious_provider() -> Iterator[str]:
    """Runs one in a separate process and yields its base URL; prompts choose the answers."""
    with Popen([sys.executable, "-m", __name__], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
        process.communicate(timeout=10)


async def _alone() -> None:
    bomb()  # made before the first call, because it takes a second
    async with MaliciousProvider() as provider:
        print(provider.base_url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_alone())
