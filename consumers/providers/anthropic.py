"""Calls Anthropic's Messages API through the clients of Anthropic's own SDK. The bodies of requests and answers are
passed on as bytes.

The SDK's client makes each HTTP call (authentication, URL, headers) and chooses the class of the exception after a
failure. Lanekeeper does not use the SDK's retries (`consumers/failures.py` decides on them), nor its trace spans
(`lanekeeper/telemetry/tracing.py` makes them), nor its Pydantic models of requests and answers, because these take
several times as much CPU as the call. Nor does it use the SDK's own `anthropic-version`: the SDK sends the newest
version, in which fields are errors that the caller's version allows.
"""

import asyncio
import json
import select
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from ipaddress import ip_address
from ssl import SSLContext
from types import MappingProxyType
from typing import Any, Final, Self, TypedDict, Unpack
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakSet

import aiohttp
import anthropic
import httpx2
import jiter
from aiohttp.connector import Connection
from anthropic import AsyncAnthropic
from typing_extensions import override

from consumers.decoding import Parsing
from consumers.failures import TIMEOUT, AccountError, AnswerTooLargeError, ProviderError, RejectedError, TransientError
from consumers.limits.base import CallInProgress
from consumers.providers.answers import CONTENT, Answer, OnEvent
from consumers.providers.batches import Batches
from consumers.providers.errors import (
    ERROR_BYTES,
    NETWORK_ERRORS,
    from_event,
    plain,
    read_rate,
    refuse_html,
    translate_errors,
    within,
)
from consumers.providers.routes import HeaderRules
from consumers.providers.streams import (
    DONE,
    Splitter,
    StreamedMessage,
    bounded,
    events_of_anthropic,
    from_json,
    parse_event,
    read_answer,
    to_json,
)
from lanekeeper.contract.names import ANTHROPIC_VERSION
from topology.codec import bounds
from topology.codec.decoding import Request, unpublished

MAX_TOKENS_AT_ONCE: Final = 128_000 * 600 // 3600
"""A request with more `max_tokens` than this is always streamed, because Anthropic's client assumes a rate of output at
which the answer could take longer than ten minutes."""
_LEAST_EVENTS: Final = 4
_OVERHEAD: Final = 4
"""A stream may be this many times as large as the largest accepted answer: each token may come in an event of some 130
bytes."""
_SLICE_BYTES: Final = 16 * 1024
"""A stream is parsed in pieces of this size, between which other tasks get the event loop."""
PROBE_WITHIN_S: Final = 10.0
PATH: Final = "/v1/messages"
MODELS_PATH: Final = "/v1/models"
_LENGTH: Final = "content-length"
NO_SUCH_PATH: Final = frozenset({400, 403, 404, 405, 501})
_STOP: Final = b'{"type":"message_stop"}'
_HINT: Final = f" ({bounds.ANSWER_SETTINGS})"
DRAIN_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a cloud's API for Claude differs from Anthropic's own, besides URL and signature, which its client makes."""

    needs_dict: bool = False
    lists_models: bool = True
    splitter: Callable[[int], Splitter] = events_of_anthropic
    versions: Mapping[str, str] | None = None
    """Only of an API that reads the version in the body (`anthropic_version`): its own names for some versions."""
    signing_errors: tuple[type[Exception], ...] = ()


ANTHROPIC: Final = Dialect()


class Reading(TypedDict, total=False):
    """How requests are sent and answers are read, of any provider."""

    max_answer_bytes: int
    max_values: int
    parsing: Parsing
    header_rules: HeaderRules


@dataclass(slots=True, eq=False, repr=False)  # it knows the key
class AnthropicProvider:
    """Calls Claude at Anthropic, and at every cloud for which Anthropic's SDK has a client.

    `client`: one of the SDK's asynchronous clients. `secret`: the API key, which is removed from error texts.
    """

    client: Any
    _: KW_ONLY
    name: str
    secret: str
    dialect: Dialect = ANTHROPIC
    max_answer_bytes: int = bounds.ANSWER_BYTES
    max_values: int = bounds.VALUES
    parsing: Parsing = field(default_factory=Parsing)
    header_rules: HeaderRules = field(default_factory=HeaderRules)
    batches: Batches | None = None

    @classmethod
    def at(cls, base_url: str, *, api_key: str, name: str = "anthropic", **reading: Unpack[Reading]) -> Self:
        # Key and address are arguments, so that the client does not take them from the environment or a profile.
        client = AsyncAnthropic(api_key=api_key, base_url=base_url, **client_options(base_url))
        found = cls(client, name=name, secret=api_key, **reading)
        found.batches = Batches(
            client,
            name=name,
            secret=api_key,
            max_answer_bytes=found.max_answer_bytes,
            max_values=found.max_values,
            parsing=found.parsing,
            headers_of=found.header_rules.of,
        )
        return found

    async def stream(
        self,
        request: Request,
        *,
        timeout_s: float,
        parts: OnEvent | None,
        in_progress: CallInProgress | None = None,
        traceparent: str | None = None,
    ) -> Answer:
        streamed = parts is not None or request.max_tokens > MAX_TOKENS_AT_ONCE
        urgent = request.rank
        set_field = partial(set_stream, request.body, streamed, is_stated=request.states_stream)
        asked = await self.parsing.run(set_field, rank=(urgent, len(request.body)))
        headers: Mapping[str, str] = {}
        rate = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                response = await self._send(asked, request.provider_headers, traceparent=traceparent)
                headers = plain(response.headers)
                rate = read_rate(headers, now_s=time.time())
                try:
                    refuse_html(response.status_code, headers)
                    if streamed:
                        collected = StreamedMessage(max_bytes=self.max_answer_bytes, max_values=self.max_values)
                        if in_progress is not None:
                            in_progress.used = collected.used
                        pause_s = max(timeout_s, request.call_s)
                        await self._read_stream(
                            response.aiter_bytes(), collected, urgent=urgent, limit=limit, pause_s=pause_s, parts=parts
                        )
                        message = await self.parsing.run(collected.message, rank=(urgent, collected.size))
                        body = await self.parsing.run(partial(to_json, message), rank=(urgent, collected.size))
                    else:
                        body = await self._read_whole(response, headers)
                        message = await self._parse(body, headers.get("content-type", ""), urgent=urgent)
                    return read_answer(
                        message, body, provider=self.name, request_id=headers.get("request-id"), rate=rate
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
            if headers:
                error.rate, error.request_id = rate, headers.get("request-id")
            raise

    async def probe(self, model: str, *, by_call: bool) -> None:
        if self.dialect.lists_models and not by_call:
            try:
                async with within(PROBE_WITHIN_S, why=f"no answer within {PROBE_WITHIN_S:g} s"):
                    await self._list_models()
                return
            except (AccountError, RejectedError) as error:
                if error.status not in NO_SUCH_PATH:  # whatever answers like Anthropic's API need not list its models
                    raise
        await self.stream(unpublished("1", model=model, max_tokens=1), timeout_s=PROBE_WITHIN_S, parts=None)

    async def _list_models(self) -> None:
        with translate_errors(secret=self.secret):
            options = {"params": {"limit": 1}, "headers": self.header_rules.of({})}
            response = await self.client.get(MODELS_PATH, cast_to=httpx2.Response, options=options, stream=True)
        try:
            refuse_html(response.status_code, plain(response.headers))
        finally:
            with suppress(*NETWORK_ERRORS):
                await response.aclose()

    async def aclose(self) -> None:
        await self.client.close()

    async def _send(self, body: bytes, given_headers: Mapping[str, str], *, traceparent: str | None) -> httpx2.Response:
        headers = self.header_rules.of(given_headers)
        if traceparent is not None:
            headers["traceparent"] = traceparent
        given: dict[str, Any] = {"content": body}
        if self.dialect.needs_dict:
            given = {"body": json.loads(body)}
        if self.dialect.versions is not None:
            version = headers.pop(ANTHROPIC_VERSION)
            given["body"].setdefault("anthropic_version", self.dialect.versions.get(version, version))
        try:
            with translate_errors(secret=self.secret):
                response: httpx2.Response = await self.client.post(
                    PATH, cast_to=httpx2.Response, options={"headers": headers}, stream=True, **given
                )
        except self.dialect.signing_errors as error:
            reason = f"no credentials were found for it ({type(error).__name__})"
            raise AccountError(reason, reason=reason, type="credentials") from error
        return response

    async def _parse(self, body: bytes, content_type: str, *, urgent: int) -> dict[str, Any]:
        excess = await self.parsing.excess(body, max_values=self.max_values, rank=(urgent, len(body)))
        if excess is not None:
            raise AnswerTooLargeError(excess)
        return await self.parsing.run(partial(parse_message, body, content_type), rank=(urgent, len(body)))

    async def _read_whole(self, response: httpx2.Response, headers: Mapping[str, str]) -> bytes:
        announced = headers.get(_LENGTH, "")
        if announced.isdigit() and len(announced) > len(str(self.max_answer_bytes)):
            raise AnswerTooLargeError(f"more than {self.max_answer_bytes} bytes{_HINT}")
        with translate_errors(secret=self.secret):
            body = b"".join(
                [chunk async for chunk in bounded(response.aiter_bytes(), self.max_answer_bytes, hint=_HINT)]
            )
        received = response.num_bytes_downloaded
        if announced.isdigit() and int(announced) != received:
            raise TransientError(f"the answer has {received} of its {announced} bytes", type="truncated")
        return body

    async def _read_stream(
        self,
        body_pieces: AsyncIterable[bytes],
        collected: StreamedMessage,
        *,
        urgent: int,
        limit: asyncio.Timeout,
        pause_s: float,
        parts: OnEvent | None,
    ) -> None:
        """Pass each event on to `parts`, and add it to `collected`. The time that `parts` and our own parsing take does
        not count towards `limit`, the time limit for the first token. `pause_s`: that for each pause after it."""
        splitter = self.dialect.splitter(self.max_answer_bytes // _LEAST_EVENTS)
        clock = asyncio.get_running_loop().time
        pauses = _Pauses(limit, longest_s=pause_s)
        found = _slices(body_pieces, _OVERHEAD * self.max_answer_bytes, secret=self.secret)
        async with aclosing(found) as slices, aclosing(pauses):
            is_complete, flows, until_s, since_s = False, False, limit.when(), clock()
            while not is_complete:
                piece = await anext(slices, None)
                if piece is None:
                    if not collected.has_ended:
                        raise TransientError("the stream ended without message_stop", type="cut")
                    if parts is not None:
                        await parts(_STOP)
                    return
                came_s = clock()
                if flows:
                    pauses.end()
                else:
                    until_s = limit.when()
                    limit.reschedule(None)
                events = await self.parsing.run(partial(self._events, splitter, piece), rank=(urgent, len(piece)))
                for data, event in events:
                    if not isinstance(event.get("type"), str):  # no event of Anthropic's, or `[DONE]`
                        if data.strip() != DONE or not collected.has_ended:
                            continue
                        data, event = _STOP, json.loads(_STOP)
                    if event["type"] == "error":
                        raise from_event(event, secret=self.secret, data=data)
                    is_complete = collected.add(event, data)
                    flows = flows or CONTENT in data
                    if parts is not None:
                        await parts(data)
                    if is_complete:
                        break
                if flows or until_s is None:
                    since_s = clock() if events else since_s + clock() - came_s
                    pauses.begin(since_s)
                else:
                    limit.reschedule(until_s + clock() - came_s)
            limit.reschedule(None)
            await _drain(slices)

    def _events(self, splitter: Splitter, piece: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        return [(data, parse_event(data, max_values=self.max_values)) for data in splitter.feed(piece)]


def parse_message(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of an answer that was not streamed, or an empty dict. Raises `TransientError` if the body is not
    JSON."""
    try:
        message = from_json(body)
    except ValueError as error:
        kind = content_type[:50] or "no content type"
        raise TransientError(f"the answer ({kind}, {len(body)} bytes) is not JSON", type="broken_answer") from error
    return message if isinstance(message, dict) else {}


class _Pauses:
    """Lets the limit of a stream expire when its provider sends nothing for `longest_s`. One timer serves all pauses:
    to set one at each event takes longer than all else that is done with it."""

    def __init__(self, limit: asyncio.Timeout, *, longest_s: float) -> None:
        self._limit = limit
        self._longest_s = longest_s
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, since_s: float) -> None:
        self._since_s = since_s
        if self._timer is None:
            self._check()

    def end(self) -> None:
        self._since_s = None

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        end_s = (now_s if self._since_s is None else self._since_s) + self._longest_s
        if now_s < end_s:
            self._timer = loop.call_at(end_s, self._check)
        else:
            self._timer = None
            self._limit.reschedule(now_s)


async def _slices(body_pieces: AsyncIterable[bytes], most: int, *, secret: str) -> AsyncGenerator[bytes, None]:
    with translate_errors(secret=secret):
        async with aclosing(bounded(body_pieces, most, hint=_HINT)) as chunks:
            async for chunk in chunks:
                for at in range(0, len(chunk), _SLICE_BYTES):
                    yield chunk[at : at + _SLICE_BYTES]


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """So that the connection can be reused; the body should end right after `message_stop`."""
    with suppress(ProviderError, *NETWORK_ERRORS):
        async with asyncio.timeout(DRAIN_S):
            async for _ in chunks:
                pass


def set_stream(body: bytes, streamed: bool, *, is_stated: bool = True) -> bytes:
    """The request's body with the field `stream` set to `streamed`, because the worker decides whether the answer is
    streamed. Unchanged if the field has that value, or is missing and `streamed` is false."""
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


CONNECT_TIMEOUT_S: Final = 5.0
CONNECTIONS: Final = 1000
KEPT_FOR_S: Final = 5.0


def client_options(base_url: str) -> dict[str, Any]:
    """The options of all clients of Anthropic's SDK: no retries, no spans, and the transport below."""
    # Calls to this machine do not use the proxy that the environment names.
    trust_env = not _is_here(base_url)
    return {
        "max_retries": 0,
        "open_telemetry": False,
        "timeout": httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        "http_client": httpx2.AsyncClient(
            event_hooks={"response": [bound_error_body]},
            transport=AioHttpTransport(
                _certificates(trust_env=trust_env), proxy=_proxy_to(base_url) if trust_env else None
            ),
            trust_env=trust_env,
            # A redirect would send the prompt to an address that is in no setting.
            follow_redirects=False,
        ),
    }


@cache
def _certificates(*, trust_env: bool) -> SSLContext:
    """All clients share it, because reading the certificates takes 25 ms."""
    return httpx2.create_ssl_context(trust_env=trust_env)


def _proxy_to(url: str) -> str | None:
    """The proxy that the environment (HTTPS_PROXY, NO_PROXY, …) names for this URL."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def bound_error_body(response: httpx2.Response) -> None:
    """Cut the body of an error response, because the client would read and decompress all of it."""
    if response.status_code >= 300 and isinstance(response.stream, httpx2.AsyncByteStream):
        is_compressed = response.headers.pop("content-encoding", "identity") in ("gzip", "deflate")
        response.stream = _FirstBytes(response.stream, is_compressed=is_compressed)


class AioHttpTransport(httpx2.AsyncBaseTransport):
    """Sends the requests of an httpx2 client through aiohttp, with less than half the CPU time of httpx2's own
    transport (docs/decisions/0028)."""

    def __init__(self, certificates: SSLContext, *, proxy: str | None) -> None:
        self._certificates = certificates
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._session is None:  # it needs a running event loop
            pool = _Pool(ssl=self._certificates, limit=CONNECTIONS, keepalive_timeout=KEPT_FOR_S)
            self._session = aiohttp.ClientSession(connector=pool)
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        headers = request.headers.multi_items()
        data: bytes | httpx2.AsyncByteStream | None = request.stream
        if isinstance(request.stream, httpx2.SyncByteStream):  # it is in memory
            data = b"".join([piece async for piece in request.stream]) or None
        else:
            headers = [each for each in headers if each[0].lower() != "transfer-encoding"]  # which aiohttp adds itself
        try:
            response = await self._session.request(
                request.method,
                str(request.url),
                data=data,
                headers=headers,
                allow_redirects=False,
                auto_decompress=False,
                proxy=self._proxy,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            )
        except TimeoutError as error:
            raise httpx2.ConnectTimeout("no connection in time") from error
        return httpx2.Response(response.status, headers=response.raw_headers, stream=_Body(response))

    @override
    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Body(httpx2.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @override
    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._response.content.iter_chunked(_SLICE_BYTES))

    @override
    async def aclose(self) -> None:
        await self._response.__aexit__(None, None, None)


class _Pool(aiohttp.TCPConnector):
    """Uses a connection again only if nothing has arrived since its last answer: the next call, perhaps of another
    tenant, would take that for its answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used: WeakSet[object] = WeakSet()

    @override
    async def connect(self, *args: Any, **options: Any) -> Connection:
        while True:
            found = await super().connect(*args, **options)
            protocol, transport = found.protocol, found.transport
            assert protocol is not None
            assert transport is not None
            if protocol not in self._used:
                self._used.add(protocol)
                return found
            if not protocol.should_close and not _is_readable(transport.get_extra_info("socket").fileno()):
                return found
            found.close()


def _is_readable(file: int) -> bool:
    polled = select.poll()
    polled.register(file, select.POLLIN)
    return bool(polled.poll(0))


class _FirstBytes(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, *, is_compressed: bool) -> None:
        self._stream = stream
        self._decompressor = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS) if is_compressed else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = ERROR_BYTES
        async for chunk in self._stream:
            try:
                found = chunk[:left] if self._decompressor is None else self._decompressor.decompress(chunk, left)
            except zlib.error:
                return
            yield found
            left -= len(found)
            if left <= 0:
                return

    async def aclose(self) -> None:
        await self._stream.aclose()


WITHIN_S: Final = 30.0
ANSWER_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """A response to a call other than Messages: an answer, or an error in Anthropic's format."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Passed:
    """A response that is passed on in pieces: an answer, or an error in Anthropic's format."""

    def __init__(self, response: httpx2.Response, *, secret: str) -> None:
        self._response = response
        self._secret = secret
        self.status = response.status_code
        self.headers: Mapping[str, str] = plain(response.headers)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises ProviderError."""
        pieces = self._response.aiter_bytes()
        while True:
            async with within(WITHIN_S, why="the provider's answer stopped coming"):
                with translate_errors(secret=self._secret):
                    piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece

    async def body(self) -> bytes:
        """Raises ProviderError."""
        return b"".join([piece async for piece in bounded(self.pieces(), ANSWER_BYTES)])


class Lookups:
    """Calls of Anthropic's API other than Messages (tokens, models, files), which cost no tokens. The API key is kept
    out of answers and errors."""

    def __init__(self, base_url: str, *, api_key: str, header_rules: HeaderRules | None = None) -> None:
        options = client_options(base_url)
        self._http: httpx2.AsyncClient = options["http_client"]
        self._client = anthropic.AsyncAnthropic(api_key=api_key, base_url=base_url, **options)
        self._base_url = base_url.rstrip("/")
        self._key = api_key
        self._header_rules = header_rules or HeaderRules()

    async def call(
        self,
        path: str,
        *,
        body: bytes | None = None,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> LookedUp:
        """POST with `body`, or GET if it is None. `headers`: the caller's `anthropic-*`. Raises ProviderError if the
        response is neither an answer nor an error in Anthropic's format."""
        options = {"params": dict(query), "headers": self._header_rules.of(headers or {})}
        async with within(WITHIN_S, why=f"no answer from the provider within {WITHIN_S:g} s"):
            return await self._call(path, body, options)

    @asynccontextmanager
    async def passed(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | Sequence[str]],
        headers: Mapping[str, str],
        content: AsyncIterable[bytes] | None = None,
        content_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncIterator[Passed]:
        """Make a call, and yield the response before its body is read. `content`: what is sent, in pieces. The SDK
        would send a form of which it has all parts, so the request is made here. Raises ProviderError, like `call`."""
        named = {
            **self._header_rules.of(headers),
            **content_headers,
            "accept-encoding": "identity",
            **self._client.auth_headers,
        }
        request = self._http.build_request(
            method, self._base_url + path, params=dict(query), headers=named, content=content
        )
        with translate_errors(secret=self._key):
            response = await self._http.send(request, stream=True)
        try:
            if response.status_code >= 300:
                with translate_errors(secret=self._key):
                    await response.aread()
                    error = anthropic.APIStatusError("", response=response, body=_json_in(response.content))
                    self._refusal(error)  # raises it, if it may not be passed on
            yield Passed(response, secret=self._key)
        finally:
            with suppress(*NETWORK_ERRORS):
                await response.aclose()

    async def _call(self, path: str, body: bytes | None, options: dict[str, Any]) -> LookedUp:
        given: dict[str, Any] = {"cast_to": httpx2.Response, "options": options, "stream": True}
        with translate_errors(secret=self._key):
            try:
                if body is None:
                    response = await self._client.get(path, **given)
                else:
                    response = await self._client.post(path, content=body, **given)
            except anthropic.APIStatusError as error:
                return self._refusal(error)
            try:
                headers = plain(response.headers)
                found = b"".join([chunk async for chunk in bounded(response.aiter_bytes(), ANSWER_BYTES)])
                return LookedUp(status=response.status_code, headers=headers, body=found)
            finally:
                await response.aclose()

    def _refusal(self, error: anthropic.APIStatusError) -> LookedUp:
        """An error in Anthropic's format is passed on, unless it is about the API key or quotes it."""
        body = error.response.content
        if (
            error.status_code < 400
            or error.status_code in (401, 402)
            or not _is_anthropic_error(body)
            or self._key.encode() in body
        ):
            raise error
        return LookedUp(status=error.status_code, headers=plain(error.response.headers), body=body)

    async def aclose(self) -> None:
        await self._client.close()


def _json_in(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _is_anthropic_error(body: bytes) -> bool:
    found = _json_in(body)
    return isinstance(found, dict) and found.get("type") == "error" and isinstance(found.get("error"), dict)
