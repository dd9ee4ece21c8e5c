"""Anthropic's Messages API through the vendor's own clients: bytes in, bytes out.

The client makes the HTTP call (authentication, version, pool, TLS) and chooses the exception class; what it would do
beyond that is switched off or left out, because it costs several times the call: its retries (one place decides to
retry), its spans (`topology/tracing.py` makes them), its models of requests and answers.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, Protocol, Self
from urllib.parse import urlsplit

import httpx2
from anthropic import AsyncAnthropic, DefaultAioHttpClient

from consumers.failures import ProviderError, RejectedError, TransientError
from consumers.limits import headers as rate_headers
from consumers.providers.answers import parse_message, read_answer
from consumers.providers.assembly import Assembly, parse_event, to_json
from consumers.providers.base import Answer, Parts
from consumers.providers.events import EventSplitter
from consumers.providers.translation import NETWORK_ERRORS, border, from_event, one_line
from topology.contract.messages import Request

MAX_TOKENS_AT_ONCE: Final = 128_000 * 600 // 3600
"""More may take longer than ten minutes, at the rate the vendor's client reckons with: such an answer is streamed."""
_ERROR_BODY_BYTES: Final = 64 * 1024
_DRAIN_S: Final = 0.1
_MIB: Final = 1024 * 1024
CONNECT_TIMEOUT_S: Final = 5.0


class Client(Protocol):
    """Any of the vendor's clients."""

    @property
    def post(self) -> Callable[..., Any]: ...

    async def close(self) -> None: ...


class Splitter(Protocol):
    """As `EventSplitter`."""

    def feed(self, chunk: bytes) -> list[bytes]: ...


def sse(max_event_bytes: int) -> Splitter:
    """Server-Sent Events, as Anthropic streams."""
    return EventSplitter(max_event_bytes=max_event_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What another house does otherwise than Anthropic. The client knows URL and signature (`cloud.py`)."""

    as_fields: bool = False
    """The client takes the body apart to say it in its own way, so that it wants it as fields, not as bytes."""
    splitter: Callable[[int], Splitter] = sse
    signing_errors: tuple[type[Exception], ...] = ()
    """What comes out of the client where there are no credentials at present."""


ANTHROPIC: Final = Dialect()


class AnthropicProvider:
    """Adapter for Anthropic, and for everything that its vendor has a client for.

    `secret` appears in no error. `traceparent` gives the current span's; nothing else of the trace leaves the house.
    """

    def __init__(
        self,
        client: Client,
        *,
        name: str,
        secret: str,
        dialect: Dialect = ANTHROPIC,
        traceparent: Callable[[], str | None] = lambda: None,
        max_answer_bytes: int = 64 * _MIB,
    ) -> None:
        self.name = name
        self._client = client
        self._key = secret
        self._dialect = dialect
        self._traceparent = traceparent
        self._max_answer_bytes = max_answer_bytes

    @classmethod
    def at(cls, base_url: str, *, api_key: str, name: str = "anthropic", **more: Any) -> Self:
        """Anthropic, or anything that answers like it there."""
        # key and address are given, so that neither the environment nor a profile of the client's changes them
        client = AsyncAnthropic(api_key=api_key, base_url=base_url, **client_options(base_url))
        return cls(client, name=name, secret=api_key, **more)

    async def stream(self, request: Request, *, timeout_s: float, parts: Parts | None) -> Answer:
        streamed = parts is not None or request.max_tokens > MAX_TOKENS_AT_ONCE
        asked = say_stream(request.body, streamed)
        response: httpx2.Response | None = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                response = await self._send(asked, beta=request.beta)
                rate = rate_headers.read(response.headers, now_s=time.time())
                try:
                    if streamed:
                        message = await self._read_stream(response, limit=limit, pause_s=timeout_s, parts=parts)
                        body = to_json(message)
                    else:
                        body = await self._read_whole(response)
                        message = parse_message(body, response.headers.get("content-type", ""))
                    return read_answer(message, body, provider=self.name, request_id=_request_id(response), rate=rate)
                finally:
                    with suppress(*NETWORK_ERRORS):
                        await response.aclose()
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = "no event" if streamed else "no whole answer"
            raise TransientError(f"{what} from the provider within {timeout_s:g} s", type="timeout") from error
        except ProviderError as error:
            if response is not None:
                error.rate = rate_headers.read(response.headers, now_s=time.time())
            raise

    async def aclose(self) -> None:
        await self._client.close()

    async def _send(self, body: bytes, *, beta: str | None) -> httpx2.Response:
        """Send, and return the answer with its body unread. `stream=True` is about our reading, not the provider's."""
        headers: dict[str, str] = {}
        if (traceparent := self._traceparent()) is not None:
            headers["traceparent"] = traceparent
        if beta is not None:
            headers["anthropic-beta"] = beta
        said: dict[str, Any] = {"body": json.loads(body)} if self._dialect.as_fields else {"content": body}
        try:
            with border(secret=self._key):
                response = await self._client.post(
                    "/v1/messages", cast_to=httpx2.Response, options={"headers": headers}, stream=True, **said
                )
        except self._dialect.signing_errors as error:
            raise TransientError(f"no credentials for {self.name}: {one_line(error)}", type="credentials") from error
        assert isinstance(response, httpx2.Response)
        return response

    async def _read_whole(self, response: httpx2.Response) -> bytes:
        with border(secret=self._key):
            body = b"".join([chunk async for chunk in self._chunks(response)])
        announced = response.headers.get("content-length", "")
        if announced.isdigit() and int(announced) != response.num_bytes_downloaded:
            raise TransientError(
                f"the answer has {response.num_bytes_downloaded} of its {announced} bytes",
                type="truncated",
                request_id=_request_id(response),
            )
        return body

    async def _read_stream(
        self, response: httpx2.Response, *, limit: asyncio.Timeout, pause_s: float, parts: Parts | None
    ) -> dict[str, Any]:
        """Forward the events and put them together. The time that `parts` takes is not the provider's."""
        splitter = self._dialect.splitter(self._max_answer_bytes)
        assembly = Assembly()
        clock = asyncio.get_running_loop().time
        async with aclosing(self._chunks(response)) as chunks:
            is_complete = False
            while not is_complete:
                with border(secret=self._key):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    raise TransientError(
                        "the stream ended without message_stop", type="cut", request_id=_request_id(response)
                    )
                if not (events := splitter.feed(chunk)):
                    continue
                limit.reschedule(None)
                for data in events:
                    event = parse_event(data)
                    if event.get("type") == "error":
                        raise from_event(event, request_id=_request_id(response), secret=self._key)
                    is_complete = assembly.add(event)
                    if parts is not None:
                        await parts(data)
                    if is_complete:
                        break
                limit.reschedule(clock() + pause_s)
            limit.reschedule(None)
            await _drain(chunks)
        return assembly.message()

    async def _chunks(self, response: httpx2.Response) -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in response.aiter_bytes():
            size += len(chunk)
            if size > self._max_answer_bytes:
                raise TransientError(
                    f"the answer is larger than {self._max_answer_bytes} bytes",
                    type="too_large",
                    request_id=_request_id(response),
                )
            yield chunk


def say_stream(body: bytes, streamed: bool) -> bytes:
    """The body with `stream` as it must be; byte for byte the same where that is so already."""
    if b'"stream"' in body or b"\\u" in body:  # a key may be written with escapes
        fields = json.loads(body)
        if "stream" in fields:
            return body if fields["stream"] is streamed else _rewritten({**fields, "stream": streamed})
    return body.replace(b"{", b'{"stream":true,', 1) if streamed else body


def _rewritten(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except ValueError as error:
        raise RejectedError("the body has a number that is too large (1e999)", type="unsendable") from error


def client_options(base_url: str) -> dict[str, Any]:
    """How every client of the vendor's is made: no retries and spans of its own, the fastest transport."""
    return {
        "max_retries": 0,
        "open_telemetry": False,
        "timeout": httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        # the environment's proxy is not for this machine itself
        # a redirect would take the prompt to an address that nobody set
        "http_client": DefaultAioHttpClient(
            event_hooks={"response": [_bound_error_body]}, trust_env=not _is_here(base_url), follow_redirects=False
        ),
    }


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _bound_error_body(response: httpx2.Response) -> None:
    # the client reads the whole body of an error answer, however large; what is cut off here is no valid JSON,
    # and is then classified by its status
    if response.status_code >= 300 and isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _FirstBytes(response.stream)


class _FirstBytes(httpx2.AsyncByteStream):
    """The first 64 KiB of a body."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            yield chunk
            size += len(chunk)
            if size > _ERROR_BODY_BYTES:
                return

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read to the end, which follows message_stop at once: only then can the connection be used again."""
    with suppress(ProviderError, *NETWORK_ERRORS):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in chunks:
                pass


def _request_id(response: httpx2.Response) -> str | None:
    found: str | None = response.headers.get("request-id")
    return found
