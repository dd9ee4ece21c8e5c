"""HTTP calls to Lanekeeper's gateway. A call is repeated while the gateway, or a proxy in front of it, cannot be
reached. Repeating is safe because every request has an id: if it is posted twice, it is still one request.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from lanekeeper.amqp.driver.backoff import pause_s
from lanekeeper.contract.problems import BrokerError, BrokerUnreachable, ConfirmUnknown, PublishRefused
from lanekeeper.http.documents import document_of

ANSWERED_WITHIN_S = 10.0
"""How many seconds a gateway may take to answer, in addition to the time for which the call asks it to wait for the
request's end."""
SLOWEST_BYTES_S = 256 * 1024
"""The slowest accepted rate of sending a request body, in bytes a second. The time limit of a call with a large body is
computed from it."""
SILENT_S = 60.0
"""After how many seconds without any data, not even a comment, a gateway's event stream counts as lost."""
LARGEST_BYTES = 64 * 1024 * 1024
"""The largest HTTP answer, in bytes, that a client reads: twice the default maximum of a model's answer with a store
for large bodies (32 MiB)."""
FIRST_PAUSE_S = 0.2
"""The first pause, in seconds, between two tries of a call to a gateway."""
PAUSE_CAP_S = 5.0
"""The longest pause, in seconds, between two tries of a call to a gateway."""
RETRY_AFTER_CAP_S = 3600.0
"""The longest `retry-after`, in seconds, that a client obeys; a longer one is cut to this."""
LANE_FULL = 529
"""The HTTP status of a gateway's answer if the lane's queue is full."""
_TEMPORARY = frozenset({408, 429, 503})
"""The HTTP statuses that mean: the call was not carried out, and the same call may succeed a little later."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one call, from the gateway or from a proxy in front of it."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def document(self) -> Mapping[str, Any]:
        """The body parsed as a JSON object; an empty object if the body is something else."""
        return document_of(self.body)


class Calls:
    """Makes HTTP calls to a gateway (or to several behind a load balancer) in one session, and repeats failed calls."""

    def __init__(self, url: str, *, api_key: str | None, ssl_context: ssl.SSLContext | None) -> None:
        """`url`: the gateway's address. `api_key`: sent with each call. Raises ValueError if no gateway can have this
        URL."""
        parts = urlsplit(url)
        if not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError("a gateway's URL is http(s)://host[:port][/path]; its key is given as `api_key`")
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
    ) -> Answer:
        """Make a call, and repeat it until there is an answer, for at most `within_s`.

        `absent_within_s`: a shorter time limit while no gateway can be reached; None: no shorter limit.
        `full_within_s`: a shorter time limit while the lane is full. `waits_s`: for how many seconds the call itself
        asks the gateway to wait before it answers; `within_s` does not include them.

        Raises PublishRefused (the lane was full for all of `full_within_s`), BrokerUnreachable, and ConfirmUnknown (the
        call may have been carried out).
        """
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
        """Make a GET request, and yield the response. Inside the `with` block, its body can be read while it arrives.
        Raises BrokerUnreachable, also if reading the body fails."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWERED_WITHIN_S, sock_read=SILENT_S)
        async with self._response("GET", path, timeout, headers, None) as response:
            if response.status >= 500:
                raise BrokerUnreachable(f"the gateway at {self._address} answered {response.status}")
            yield response

    async def _call_once(
        self, method: str, path: str, timeout_s: float, headers: Mapping[str, str] | None, body: bytes | None
    ) -> Answer:
        if body is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
        else:
            timeout = aiohttp.ClientTimeout(total=timeout_s + len(body) / SLOWEST_BYTES_S)
        async with self._response(method, path, timeout, headers, body) as response:
            return Answer(response.status, await _read(response), seconds_of(response.headers.get("retry-after")))

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None,
        body: bytes | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one HTTP request. aiohttp's errors, also those inside the `with` block, become BrokerUnreachable (for a
        GET, or without a connection) or ConfirmUnknown."""
        assert self._session is not None, "use the client in `async with`"
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
    """The seconds in a `retry-after` header, at most `RETRY_AFTER_CAP_S`. Returns None if the header is absent or not a
    whole number."""
    try:
        return min(RETRY_AFTER_CAP_S, max(0, int(retry_after or "")))
    except ValueError:
        return None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Read a response's body. Raises BrokerUnreachable if it has more than `LARGEST_BYTES`."""
    found = bytearray()
    async for chunk in response.content.iter_any():
        found += chunk
        if len(found) > LARGEST_BYTES:
            raise BrokerUnreachable(f"an answer of more than {LARGEST_BYTES} bytes: no gateway sends that")
    return bytes(found)


def _error_of(method: str, answer: Answer, address: str) -> BrokerError | None:
    """The error that an answer means, if the same call may succeed later. Returns None if the answer is final, so that
    repeating the call would not help."""
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
