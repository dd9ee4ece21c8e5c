"""HTTP calls to Lanekeeper's gateway. A call is repeated while the gateway, or a proxy in front of it, cannot be
reached. Repeating is safe because every request has an id: if it is posted twice, it is still one request.
"""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from lanekeeper.backoff import pause_s
from lanekeeper.contract.problems import (
    BrokerError,
    BrokerUnreachable,
    ClientMisused,
    ConfirmUnknown,
    InvalidArgument,
    InvalidUrl,
    PublishRefused,
)

ANSWERED_WITHIN_S = 10.0
"""Besides the time for which the gateway is asked to wait."""
SLOWEST_BYTES_S = 256 * 1024
"""Of sending a body: a call with a large one has more time."""
SILENT_S = 60.0
"""An event stream without any data, not even a comment, is lost after this time."""
LARGEST_BYTES = 64 * 1024 * 1024
"""Of an answer or an event: twice the default maximum of a model's answer with a store for large bodies."""
FIRST_PAUSE_S = 0.2
PAUSE_CAP_S = 5.0
RETRY_AFTER_CAP_S = 3600.0
LANE_FULL = 529
_TEMPORARY = frozenset({408, 429, 503})
"""The call was not carried out, and may succeed a little later."""
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a \r at the end of a chunk may be half of \r\n


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer of the gateway, or of a proxy in front of it."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def document(self) -> Mapping[str, Any]:
        return document_of(self.body)


class Calls:
    """Calls to a gateway in one session."""

    def __init__(self, url: str, *, api_key: str | None, ssl_context: ssl.SSLContext | None) -> None:
        try:
            parts = urlsplit(url)
            is_url = bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
        except ValueError:
            is_url = False
        if not is_url or "@" in parts.netloc:
            raise InvalidUrl("a gateway's URL is http(s)://host[:port][/path]; its key is given as `api_key`")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidArgument("api_key: has a character that no key has")
        self.trouble: str | None = None
        """Why the latest call failed; None if it succeeded."""
        self._address = url.rstrip("/")
        self._headers = {"accept-encoding": "identity"} | ({} if api_key is None else {"x-api-key": api_key})
        self._ssl = ssl_context or True
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # no limit for connections: a cancellation must not wait until other calls have got their answers
            connector=aiohttp.TCPConnector(ssl=self._ssl, limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        within_s: float,
        absent_within_s: float | None = None,
        full_within_s: float = 0,
        waits_s: float = 0,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> HttpAnswer:
        """Repeated until there is an answer, for at most `within_s`; `absent_within_s` while no gateway can be reached;
        `full_within_s` while the lane is full. `waits_s`: how long the gateway is asked to wait, not included in these.
        Raises PublishRefused, BrokerUnreachable, ConfirmUnknown (it may have been carried out)."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        failures = 0
        maybe_published = False
        while True:
            timeout_s = min(ANSWERED_WITHIN_S, max(1.0, began + within_s - loop.time())) + waits_s
            wait_s = pause_s(failures, first_s=FIRST_PAUSE_S, cap_s=PAUSE_CAP_S)
            error: BrokerError | None
            try:
                answer = await self._call_once(method, path, timeout_s, headers, body)
                wait_s = max(wait_s, answer.retry_after_s or 0.0)
                if (error := _error_of(method, answer, self._address)) is None:
                    self.trouble = None
                    return answer
            except ClientMisused:
                raise
            except BrokerError as caught:
                error = caught
            maybe_published = error.maybe_published = maybe_published or error.maybe_published
            end = began + within_s
            if isinstance(error, PublishRefused):
                wait_s = max(wait_s, error.retry_after_s)
                end = min(end, began + full_within_s)
            else:
                self.trouble = str(error)
                if absent_within_s is not None and not maybe_published:
                    end = min(end, began + absent_within_s)
            if loop.time() + wait_s > end or isinstance(error.__cause__, aiohttp.ClientSSLError):
                raise error
            failures += 1
            await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def streamed(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose body is read while it arrives. Raises BrokerUnreachable, also from the block."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWERED_WITHIN_S, sock_read=SILENT_S)
        async with self._response("GET", path, timeout, headers, None) as response:
            if response.status >= 500:
                raise BrokerUnreachable(f"the gateway at {self._address} answered {response.status}")
            yield response

    async def _call_once(
        self, method: str, path: str, timeout_s: float, headers: Mapping[str, str] | None, body: bytes | None
    ) -> HttpAnswer:
        if body is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
        else:
            timeout = aiohttp.ClientTimeout(total=timeout_s + len(body) / SLOWEST_BYTES_S)
        async with self._response(method, path, timeout, headers, body) as response:
            return HttpAnswer(response.status, await _read(response), seconds_of(response.headers.get("retry-after")))

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None,
        body: bytes | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """aiohttp's errors, also from the block, become BrokerUnreachable (for a GET, or without a connection) or
        ConfirmUnknown."""
        if self._session is None or self._session.closed:
            raise ClientMisused(f"the client of the gateway at {self._address} is not open: use it inside `async with`")
        try:
            async with self._session.request(
                method, self._address + path, headers=headers, data=body, timeout=timeout, allow_redirects=False
            ) as response:
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            why = f"no connection to the gateway at {self._address}: {str(error) or type(error).__name__}"
            raise BrokerUnreachable(why) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"the gateway at {self._address} did not answer: {str(error) or type(error).__name__}"
            raise (BrokerUnreachable if method == "GET" else ConfirmUnknown)(why) from error


def seconds_of(retry_after: str | None) -> float | None:
    """The seconds of a `retry-after`; None if it is absent or no whole number."""
    try:
        return min(RETRY_AFTER_CAP_S, max(0, int(retry_after or "")))
    except ValueError:
        return None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    async for chunk in response.content.iter_any():
        found += chunk
        if len(found) > LARGEST_BYTES:
            raise BrokerUnreachable(f"an answer of more than {LARGEST_BYTES} bytes: no gateway sends that")
    return bytes(found)


def _error_of(method: str, answer: HttpAnswer, address: str) -> BrokerError | None:
    """What an answer means if the same call may succeed later; None if it is final."""
    status = answer.status
    if status < 500 and status not in _TEMPORARY:
        return None
    found = answer.document
    if status == 429 and "code" in found:
        return None  # a worker or the gateway refused this one call; a repetition would not help
    why = f"the gateway at {address} answered {status}: {found.get('detail', 'no detail')}"
    if status == LANE_FULL and method == "POST":
        refused = PublishRefused(why)
        if answer.retry_after_s is not None:
            refused.retry_after_s = answer.retry_after_s
        return refused
    if status in _TEMPORARY or method == "GET":
        return BrokerUnreachable(why)
    return ConfirmUnknown(why)  # the gateway may have failed after it carried out the call


def document_of(body: bytes) -> Mapping[str, Any]:
    """A JSON object; empty if the body is something else."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Event:
    """A Server-Sent Event. `id`: the latest in the stream."""

    kind: str
    data: bytes
    id: str


class EventTooLarge(ValueError):
    """More than `LARGEST_BYTES`."""


class Events:
    """Reads Server-Sent Events, as the HTML standard defines them, from chunks of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0
        self._id = ""

    def read(self, chunk: bytes) -> Iterator[Event]:
        """The events that this chunk completes. Raises EventTooLarge."""
        self._rest += chunk
        if self._size + len(self._rest) > LARGEST_BYTES:
            raise EventTooLarge(f"an event of more than {LARGEST_BYTES} bytes")
        begin, at = 0, self._searched
        while (found := _LINE_END.search(self._rest, at)) is not None:
            line = bytes(self._rest[begin : found.start()])
            begin = at = found.end()
            if line:
                self._field(line)
            elif (event := self._event()) is not None:
                yield event
        del self._rest[:begin]
        self._searched = max(0, len(self._rest) - 1)

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
                self._size += len(value) + 1
            case b"event":
                self._kind = value.decode(errors="replace")
            case b"id" if b"\0" not in value:
                self._id = value.decode(errors="replace")
            case _:
                pass  # a comment (empty name), or a field that the standard says to ignore

    def _event(self) -> Event | None:
        found = Event(self._kind or "message", b"\n".join(self._data), self._id) if self._data else None
        self._kind, self._data, self._size = "", [], 0
        return found
