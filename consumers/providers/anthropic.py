"""Anthropic's Messages API through the vendor's own clients: bytes in, bytes out.

The client makes the HTTP call (authentication, version, pool, TLS) and chooses the exception class. The rest is
switched off or not used: its retries (`consumers/retry.py` decides), its spans (`lanekeeper/telemetry/tracing.py` makes
them), and its models of requests and answers (they cost several times the call).
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, Final, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import httpx2
from anthropic import AsyncAnthropic, DefaultAioHttpClient

from consumers.failures import TIMEOUT, AnswerTooLargeError, ProviderError, TransientError
from consumers.limits import headers as rate_headers
from consumers.providers.answers import parse_message, pieces, read_answer
from consumers.providers.base import Answer, OnEvent
from consumers.providers.error_body import bound_error_body
from consumers.providers.events import EventSplitter
from consumers.providers.repeating import PATH, Repeating
from consumers.providers.stream_field import say_stream
from consumers.providers.streamed import StreamedMessage, parse_event, to_json
from consumers.providers.translation import NETWORK_ERRORS, border, from_event, one_line, plain
from consumers.reading import Reading
from topology.codec import bounds
from topology.codec.request import Request
from topology.lanes import urgency

MAX_TOKENS_AT_ONCE: Final = 128_000 * 600 // 3600
"""More may take longer than ten minutes, at the rate that the vendor's client assumes. Such an answer is streamed."""
_EVENTS: Final = 4
"""An event may have at most a quarter of the bytes of the largest answer, because no answer is a single event."""
_OVERHEAD: Final = 4
"""A stream may be this many times as large as the largest answer: a token is an event of some 130 bytes."""
_SLICE_BYTES: Final = 16 * 1024
"""Two thousand of the smallest events, which take 10 ms."""
_DRAIN_S: Final = 0.1
CONNECT_TIMEOUT_S: Final = 5.0
_T = TypeVar("_T")


class Client(Protocol):
    """Any of the vendor's clients."""

    @property
    def post(self) -> Callable[..., Any]: ...

    async def close(self) -> None: ...


class Splitter(Protocol):
    """Splits a stream into events, as `EventSplitter` does."""

    def feed(self, chunk: bytes) -> list[bytes]: ...


def sse(max_event_bytes: int) -> Splitter:
    """Server-Sent Events, as Anthropic streams."""
    return EventSplitter(max_event_bytes=max_event_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How another cloud's API differs from Anthropic's. The vendor's client makes URL and signature (`cloud.py`)."""

    as_fields: bool = False
    """The client changes fields of the body, so it needs the fields, not bytes."""
    splitter: Callable[[int], Splitter] = sse
    signing_errors: tuple[type[Exception], ...] = ()
    """What the client raises when there are no credentials at present."""


ANTHROPIC: Final = Dialect()


class AnthropicProvider:
    """Adapter for Anthropic, and for every cloud that the vendor has a client for.

    `secret`, the key, is kept out of errors. `traceparent` returns the header for the current span; the provider gets
    nothing else of the trace.
    """

    def __init__(
        self,
        client: Client,
        *,
        name: str,
        secret: str,
        dialect: Dialect = ANTHROPIC,
        traceparent: Callable[[], str | None] = lambda: None,
        max_answer_bytes: int = bounds.ANSWER_BYTES,
        values: int = bounds.VALUES,
        reading: Reading | None = None,
        http: httpx2.AsyncClient | None = None,
    ) -> None:
        """`http`: the HTTP client of `client`, if every call may be sent as the first one was, because the key does not
        change."""
        self.name = name
        self._client = client
        self._repeating = None if http is None else Repeating(client.post, http)
        self._key = secret
        self._dialect = dialect
        self._traceparent = traceparent
        self._max_answer_bytes = max_answer_bytes
        self._values = values
        self._reading = reading or Reading()

    @classmethod
    def at(cls, base_url: str, *, api_key: str, name: str = "anthropic", **more: Any) -> Self:
        """The adapter for Anthropic, or for a compatible API, at `base_url`."""
        # key and address are given, so that neither the environment nor a profile of the client changes them
        options = client_options(base_url)
        client = AsyncAnthropic(api_key=api_key, base_url=base_url, **options)
        return cls(client, name=name, secret=api_key, http=options["http_client"], **more)

    async def stream(self, request: Request, *, timeout_s: float, parts: OnEvent | None) -> Answer:
        streamed = parts is not None or request.max_tokens > MAX_TOKENS_AT_ONCE
        urgent = urgency(request.lane)
        say = partial(say_stream, request.body, streamed, is_stated=request.states_stream)
        asked = await self._turn(say, urgent, len(request.body))
        response: httpx2.Response | None = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                response = await self._send(asked, beta=request.beta)
                rate = rate_headers.read(plain(response.headers), now_s=time.time())
                try:
                    if streamed:
                        collected = await self._read_stream(
                            response, urgent=urgent, limit=limit, pause_s=timeout_s, parts=parts
                        )
                        message = await self._turn(collected.message, urgent, collected.size)
                        body = await self._turn(partial(to_json, message), urgent, collected.size)
                    else:
                        body = await self._read_whole(response)
                        message = await self._parse(body, response, urgent=urgent)
                    return read_answer(message, body, provider=self.name, request_id=_request_id(response), rate=rate)
                finally:
                    with suppress(*NETWORK_ERRORS):
                        await response.aclose()
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = "no event" if streamed else "no whole answer"
            raise TransientError(f"{what} from the provider within {timeout_s:g} s", type=TIMEOUT) from error
        except ProviderError as error:
            if response is not None:
                error.rate = rate_headers.read(plain(response.headers), now_s=time.time())
            raise

    async def aclose(self) -> None:
        await self._client.close()

    async def _send(self, body: bytes, *, beta: str | None) -> httpx2.Response:
        """Send, and return the answer with its body unread. `stream=True` only means that we read the body ourselves;
        the provider may answer with or without streaming."""
        headers: dict[str, str] = {}
        if (traceparent := self._traceparent()) is not None:
            headers["traceparent"] = traceparent
        if beta is not None:
            headers["anthropic-beta"] = beta
        try:
            with border(secret=self._key):
                if self._repeating is not None:
                    return await self._repeating.send(body, headers)
                said: dict[str, Any] = {"body": json.loads(body)} if self._dialect.as_fields else {"content": body}
                response = await self._client.post(
                    PATH, cast_to=httpx2.Response, options={"headers": headers}, stream=True, **said
                )
        except self._dialect.signing_errors as error:
            raise TransientError(f"no credentials for {self.name}: {one_line(error)}", type="credentials") from error
        assert isinstance(response, httpx2.Response)
        return response

    async def _turn(self, work: Callable[[], _T], urgent: int, size: int) -> _T:
        return await self._reading.turn(work, rank=(urgent, size))

    async def _parse(self, body: bytes, response: httpx2.Response, *, urgent: int) -> dict[str, Any]:
        excess = await self._reading.excess(body, values=self._values, rank=(urgent, len(body)))
        if excess is not None:
            raise AnswerTooLargeError(excess, request_id=_request_id(response))
        content_type = response.headers.get("content-type", "")
        return await self._turn(partial(parse_message, body, content_type), urgent, len(body))

    async def _read_whole(self, response: httpx2.Response) -> bytes:
        announced = response.headers.get("content-length", "")
        if announced.isdigit() and len(announced) > len(str(self._max_answer_bytes)):
            raise self._too_large(response, self._max_answer_bytes)
        with border(secret=self._key):
            body = b"".join([chunk async for chunk in self._chunks(response, self._max_answer_bytes)])
        came = response.num_bytes_downloaded or len(body)  # packed, or as it came
        if announced.isdigit() and int(announced) != came:
            raise TransientError(
                f"the answer has {came} of its {announced} bytes",
                type="truncated",
                request_id=_request_id(response),
            )
        return body

    async def _read_stream(
        self, response: httpx2.Response, *, urgent: int, limit: asyncio.Timeout, pause_s: float, parts: OnEvent | None
    ) -> StreamedMessage:
        """Forward the events and put them together. The time limit does not count the time that `parts` and our own
        parsing take."""
        splitter = self._dialect.splitter(self._max_answer_bytes // _EVENTS)
        collected, clock = (
            StreamedMessage(max_bytes=self._max_answer_bytes, values=self._values),
            asyncio.get_running_loop().time,
        )
        async with aclosing(self._slices(response)) as slices:
            is_complete = False
            while not is_complete:
                with border(secret=self._key):
                    piece = await anext(slices, None)
                if piece is None:
                    raise TransientError(
                        "the stream ended without message_stop", type="cut", request_id=_request_id(response)
                    )
                until_s, came_s = limit.when(), clock()
                limit.reschedule(None)
                events = await self._turn(partial(self._events, splitter, piece), urgent, len(piece))
                for data, event in events:
                    if event.get("type") == "error":
                        raise from_event(event, request_id=_request_id(response), secret=self._key)
                    is_complete = collected.add(event, data)
                    if parts is not None:
                        await parts(data)
                    if is_complete:
                        break
                if events or until_s is None:
                    limit.reschedule(clock() + pause_s)
                else:
                    limit.reschedule(until_s + clock() - came_s)
            limit.reschedule(None)
            await _drain(slices)
        return collected

    def _events(self, splitter: Splitter, piece: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        return [(data, parse_event(data, values=self._values)) for data in splitter.feed(piece)]

    async def _slices(self, response: httpx2.Response) -> AsyncGenerator[bytes, None]:
        """A stream in pieces that are quickly parsed, however much arrives at once."""
        async with aclosing(self._chunks(response, _OVERHEAD * self._max_answer_bytes)) as chunks:
            async for chunk in chunks:
                for at in range(0, len(chunk), _SLICE_BYTES):
                    yield chunk[at : at + _SLICE_BYTES]

    async def _chunks(self, response: httpx2.Response, most: int) -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in pieces(response):
            size += len(chunk)
            if size > most:
                raise self._too_large(response, most)
            yield chunk

    def _too_large(self, response: httpx2.Response, most: int) -> AnswerTooLargeError:
        return AnswerTooLargeError(f"more than {most} bytes", request_id=_request_id(response))


def client_options(base_url: str) -> dict[str, Any]:
    """The options of every client of the vendor: no retries and spans of its own, the fastest transport."""
    return {
        "max_retries": 0,
        "open_telemetry": False,
        "timeout": httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        # calls to this machine itself do not use the environment's proxy
        # a redirect would send the prompt to an address that nobody set
        "http_client": DefaultAioHttpClient(
            event_hooks={"response": [bound_error_body]}, trust_env=not _is_here(base_url), follow_redirects=False
        ),
    }


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read the rest of the body, so that the connection can be reused. It ends immediately after message_stop."""
    with suppress(ProviderError, *NETWORK_ERRORS):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in chunks:
                pass


def _request_id(response: httpx2.Response) -> str | None:
    found: str | None = response.headers.get("request-id")
    return found
