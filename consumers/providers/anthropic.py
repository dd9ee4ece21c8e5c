"""Calls Anthropic's Messages API through the clients of Anthropic's own SDK. The bodies of requests and answers are
passed on as bytes.

The SDK's client makes the HTTP call (authentication, API version, connection pool, TLS) and chooses the class of the
exception after a failure. Lanekeeper does not use the SDK's retries (`consumers/retry.py` decides on them), nor its
trace spans (`lanekeeper/telemetry/tracing.py` makes them), nor its Pydantic models of requests and answers, because
these take several times as much CPU as the call.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self

import httpx2
import jiter
from anthropic import AsyncAnthropic

from consumers.failures import TIMEOUT, AnswerTooLargeError, ProviderError, RejectedError, TransientError
from consumers.limits import headers as rate_headers
from consumers.parsing import Parsing
from consumers.providers.answers import parse_message, pieces, read_answer
from consumers.providers.base import Answer, OnEvent
from consumers.providers.client_options import client_options
from consumers.providers.event_stream import FrameSplitter
from consumers.providers.events import EventSplitter
from consumers.providers.repeating import PATH, Repeating
from consumers.providers.streamed import StreamedMessage, parse_event, to_json
from consumers.providers.translation import NETWORK_ERRORS, border, from_event, one_line, plain
from topology.codec import bounds
from topology.codec.request import Request
from topology.lanes import urgency

MAX_TOKENS_AT_ONCE: Final = 128_000 * 600 // 3600
"""A request with more `max_tokens` than this is always streamed, because Anthropic's client assumes a rate of output at
which the answer could take longer than ten minutes."""
_LEAST_EVENTS: Final = 4
"""The maximum size of one event of a stream is the size of the largest accepted answer, divided by this number."""
_OVERHEAD: Final = 4
"""A stream may be this many times as large as the largest accepted answer, because each token may come in an event of
its own, of some 130 bytes."""
_SLICE_BYTES: Final = 16 * 1024
"""How many bytes of a stream are parsed before other tasks get the event loop. Parsing that many bytes takes up to 10
ms, which is the case if they hold two thousand events of the smallest size."""
DRAIN_S: Final = 0.1
"""After the last event of a stream, the end of the HTTP body is awaited for at most this many seconds."""


class Client(Protocol):
    """Any of the asynchronous clients of Anthropic's SDK."""

    @property
    def post(self) -> Callable[..., Any]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a cloud's API for Claude differs from Anthropic's own. URL and signature are not described here, because
    Anthropic's client for that cloud makes them (`cloud.py`)."""

    needs_dict: bool = False
    """True if Anthropic's client for this cloud changes fields of the body, so that the client needs the body as a dict
    instead of bytes."""
    splitter: Callable[[int], EventSplitter | FrameSplitter] = EventSplitter
    """A function that creates an object which splits the bytes of a stream into events. Its argument is the largest
    accepted size of one event, in bytes."""
    signing_errors: tuple[type[Exception], ...] = ()
    """The exceptions that the cloud's client raises if it finds no credentials."""


ANTHROPIC: Final = Dialect()


class AnthropicProvider:
    """Calls Claude at Anthropic, and at every cloud for which Anthropic's SDK has a client.

    `secret`: the API key, which is removed from error texts. `traceparent`: a function that returns the value of the
    HTTP header `traceparent` for the current span. `max_values`: how many JSON keys and values an answer may have at
    most.
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
        max_values: int = bounds.VALUES,
        parsing: Parsing | None = None,
        http: httpx2.AsyncClient | None = None,
    ) -> None:
        """`http`: the HTTP client that `client` uses. It is given only if the API key does not change, because later
        calls then repeat the headers of the first call (`repeating.py`)."""
        self.name = name
        self._client = client
        self._repeating = None if http is None else Repeating(client.post, http)
        self._key = secret
        self._dialect = dialect
        self._traceparent = traceparent
        self._max_answer_bytes = max_answer_bytes
        self._max_values = max_values
        self._parsing = parsing or Parsing()

    @classmethod
    def at(cls, base_url: str, *, api_key: str, name: str = "anthropic", **more: Any) -> Self:
        """Create the adapter for Anthropic, or for a compatible API, at `base_url`."""
        # Key and address are arguments, so that the client does not take them from the environment or a profile.
        options = client_options(base_url)
        client = AsyncAnthropic(api_key=api_key, base_url=base_url, **options)
        return cls(client, name=name, secret=api_key, http=options["http_client"], **more)

    async def stream(self, request: Request, *, timeout_s: float, parts: OnEvent | None) -> Answer:
        streamed = parts is not None or request.max_tokens > MAX_TOKENS_AT_ONCE
        urgent = urgency(request.lane)
        set_field = partial(set_stream, request.body, streamed, is_stated=request.states_stream)
        asked = await self._parsing.run(set_field, rank=(urgent, len(request.body)))
        response = rate = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                response = await self._send(asked, beta=request.beta)
                rate = rate_headers.read(plain(response.headers), now_s=time.time())
                try:
                    if streamed:
                        collected = await self._read_stream(
                            response, urgent=urgent, limit=limit, pause_s=timeout_s, parts=parts
                        )
                        message = await self._parsing.run(collected.message, rank=(urgent, collected.size))
                        body = await self._parsing.run(partial(to_json, message), rank=(urgent, collected.size))
                    else:
                        body = await self._read_whole(response)
                        message = await self._parse(body, response, urgent=urgent)
                    return read_answer(
                        message, body, provider=self.name, request_id=response.headers.get("request-id"), rate=rate
                    )
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
                error.rate, error.request_id = rate, response.headers.get("request-id")
            raise

    async def aclose(self) -> None:
        await self._client.close()

    async def _send(self, body: bytes, *, beta: str | None) -> httpx2.Response:
        """Send a request, and return the response with its body unread. The argument `stream=True` of Anthropic's
        client means only that we read the body ourselves; it does not ask the provider for a streamed answer."""
        headers: dict[str, str] = {}
        if (traceparent := self._traceparent()) is not None:
            headers["traceparent"] = traceparent
        if beta is not None:
            headers["anthropic-beta"] = beta
        try:
            with border(secret=self._key):
                if self._repeating is not None:
                    return await self._repeating.send(body, headers)
                given: dict[str, Any] = {"body": json.loads(body)} if self._dialect.needs_dict else {"content": body}
                response = await self._client.post(
                    PATH, cast_to=httpx2.Response, options={"headers": headers}, stream=True, **given
                )
        except self._dialect.signing_errors as error:
            raise TransientError(f"no credentials for {self.name}: {one_line(error)}", type="credentials") from error
        assert isinstance(response, httpx2.Response)
        return response

    async def _parse(self, body: bytes, response: httpx2.Response, *, urgent: int) -> dict[str, Any]:
        excess = await self._parsing.excess(body, max_values=self._max_values, rank=(urgent, len(body)))
        if excess is not None:
            raise AnswerTooLargeError(excess)
        content_type = response.headers.get("content-type", "")
        return await self._parsing.run(partial(parse_message, body, content_type), rank=(urgent, len(body)))

    async def _read_whole(self, response: httpx2.Response) -> bytes:
        announced = response.headers.get("content-length", "")
        if announced.isdigit() and len(announced) > len(str(self._max_answer_bytes)):
            raise _too_large(self._max_answer_bytes)
        with border(secret=self._key):
            body = b"".join([chunk async for chunk in self._chunks(response, self._max_answer_bytes)])
        received = response.num_bytes_downloaded or len(body)  # 0 for a body that is not compressed (`pieces`)
        if announced.isdigit() and int(announced) != received:
            raise TransientError(
                f"the answer has {received} of its {announced} bytes",
                type="truncated",
            )
        return body

    async def _read_stream(
        self, response: httpx2.Response, *, urgent: int, limit: asyncio.Timeout, pause_s: float, parts: OnEvent | None
    ) -> StreamedMessage:
        """Pass each event of a stream on to `parts`, and put a Message together from all events. The time that `parts`
        and our own parsing take does not count towards `limit`, the call's time limit. `pause_s`: the time limit for
        the next event."""
        splitter = self._dialect.splitter(self._max_answer_bytes // _LEAST_EVENTS)
        collected = StreamedMessage(max_bytes=self._max_answer_bytes, max_values=self._max_values)
        clock = asyncio.get_running_loop().time
        async with aclosing(self._slices(response)) as slices:
            is_complete = False
            while not is_complete:
                with border(secret=self._key):
                    piece = await anext(slices, None)
                if piece is None:
                    raise TransientError("the stream ended without message_stop", type="cut")
                until_s, came_s = limit.when(), clock()
                limit.reschedule(None)
                events = await self._parsing.run(partial(self._events, splitter, piece), rank=(urgent, len(piece)))
                for data, event in events:
                    if event.get("type") == "error":
                        raise from_event(event, secret=self._key)
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

    def _events(self, splitter: EventSplitter | FrameSplitter, piece: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        return [(data, parse_event(data, max_values=self._max_values)) for data in splitter.feed(piece)]

    async def _slices(self, response: httpx2.Response) -> AsyncGenerator[bytes, None]:
        """The body of a streamed answer in pieces of at most `_SLICE_BYTES`, however much arrives at once."""
        async with aclosing(self._chunks(response, _OVERHEAD * self._max_answer_bytes)) as chunks:
            async for chunk in chunks:
                for at in range(0, len(chunk), _SLICE_BYTES):
                    yield chunk[at : at + _SLICE_BYTES]

    async def _chunks(self, response: httpx2.Response, most: int) -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in pieces(response):
            size += len(chunk)
            if size > most:
                raise _too_large(most)
            yield chunk


def _too_large(most: int) -> AnswerTooLargeError:
    return AnswerTooLargeError(f"more than {most} bytes ({bounds.ANSWER_SETTINGS})")


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read the rest of a streamed answer's body, so that the connection can be reused. The body should end right after
    the event `message_stop`."""
    with suppress(ProviderError, *NETWORK_ERRORS):
        async with asyncio.timeout(DRAIN_S):
            async for _ in chunks:
                pass


def set_stream(body: bytes, streamed: bool, *, is_stated: bool = True) -> bytes:
    """Return the request's body with the field `stream` set to `streamed`, because the worker decides whether the
    answer is streamed. The bytes are unchanged if the field has that value already, or is missing and `streamed` is
    false. `is_stated`: False if the body certainly does not have the field."""
    if is_stated and (b'"stream"' in body or b"\\u" in body):  # a key may be written with \u escapes
        found = jiter.from_json(body, cache_mode="none")  # for large bodies four times as fast as json
        if "stream" in found:
            return body if found["stream"] is streamed else _rewritten({**json.loads(body), "stream": streamed})
    return body.replace(b"{", b'{"stream":true,', 1) if streamed else body


def _rewritten(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except ValueError as error:
        raise RejectedError("the body has a number that is too large (1e999)", type="unsendable") from error
