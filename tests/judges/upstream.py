"""A plugin for the tests of Anthropic's Python SDK: what they mock is sent by an HTTP server.

Their tests mock the transport (respx), so that nothing is sent. With this plugin their mocked answers are those of a
server, the upstream of the client at TEST_API_BASE_URL: of the SDK itself, or of a gateway. Calls that a test does not
mock are passed to the API at JUDGES_API. It runs in the environment of requirements-judges.lock.
"""

import asyncio
import http.client
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import respx
from anthropic._streaming import ServerSentEvent, SSEDecoder
from typing_extensions import override

ADDED = '{"type":"message_stop","added":"by the judges"}'
"""Most of the SDK's recorded streams lack the empty line after the last event, `message_stop`. The event then does not
count, and the gateway takes the stream for cut off. The server sends this one instead; the SDK does not see it."""
_OF_THE_CONNECTION = frozenset({"connection", "content-encoding", "content-length", "transfer-encoding"})


@dataclass
class Mocked:
    """What the present test mocks, and how many calls have come."""

    router: Any = None
    calls: int = 0
    bodies: dict[int, tuple[object, bytes]] = field(default_factory=dict)
    """A mocked stream can be read once, but may be asked for again."""


MOCKED = Mocked()


class Upstream(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @override
    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        MOCKED.calls += 1
        try:
            status, headers, answer = self._passed_on(body) if MOCKED.router is None else asyncio.run(self._mock(body))
        except Exception:  # that the test mocks: a lost connection, a timeout
            self.close_connection = True
            return
        kept = {name.lower(): value for name, value in headers if name.lower() not in _OF_THE_CONNECTION}
        is_stream = answer.lstrip().startswith((b"event:", b"data:"))
        kept.setdefault("content-type", "text/event-stream" if is_stream else "application/json")
        self.send_response_only(status)
        for name, value in {**kept, "content-length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_DELETE = do_GET

    def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        api = urlsplit(os.environ["JUDGES_API"])
        connection = http.client.HTTPConnection(api.netloc, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()

    async def _mock(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = [(name, value) for name, value in self.headers.items() if name.lower() != "host"]
        url = os.environ["TEST_API_BASE_URL"] + self.path  # the tests mock this address
        answer = await MOCKED.router.async_handler(httpx2.Request(self.command, url, headers=headers, content=body))
        if id(answer.stream) not in MOCKED.bodies:
            is_sync = isinstance(answer.stream, httpx2.SyncByteStream)
            MOCKED.bodies[id(answer.stream)] = answer.stream, answer.read() if is_sync else await answer.aread()
        content = MOCKED.bodies[id(answer.stream)][1]
        if b'"message_start"' in content and not content.endswith(b"\n\n"):
            whole = content[: content.rindex(b"\n\n")]
            content = b"%b\n\nevent: message_stop\ndata: %b\n\n" % (whole, ADDED.encode())
        return answer.status_code, answer.headers.multi_items(), content


def _see_nothing_added() -> None:
    events, async_events = SSEDecoder.iter_bytes, SSEDecoder.aiter_bytes

    def iter_bytes(self: SSEDecoder, iterator: Iterator[bytes]) -> Iterator[ServerSentEvent]:
        return (event for event in events(self, iterator) if event.data != ADDED)

    async def aiter_bytes(self: SSEDecoder, iterator: AsyncIterator[bytes]) -> AsyncIterator[ServerSentEvent]:
        async for event in async_events(self, iterator):
            if event.data != ADDED:
                yield event

    SSEDecoder.iter_bytes, SSEDecoder.aiter_bytes = iter_bytes, aiter_bytes  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "respx: options of `respx_mock`")
    _see_nothing_added()


@pytest.fixture(scope="session", autouse=True)
def upstream() -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["JUDGES_PORT"])), Upstream)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test's calls, as a property in the report."""
    MOCKED.calls = 0
    yield
    request.node.user_properties.append(("calls", MOCKED.calls))


@pytest.fixture
def respx_mock(request: pytest.FixtureRequest) -> Iterator[Any]:
    marker = request.node.get_closest_marker("respx")
    router = MOCKED.router = respx.MockRouter(**(marker.kwargs if marker else {}))
    try:
        yield router
    finally:
        MOCKED.router = None
        MOCKED.bodies.clear()
    if router._assert_all_called:
        router.assert_all_called()
