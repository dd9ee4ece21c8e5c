"""Calls Anthropic's Messages API through the clients of Anthropic's own SDK. The bodies of requests and answers are
passed on as bytes.

The SDK's client makes each HTTP call (authentication, URL, headers) and chooses the class of the exception after a
failure. Lanekeeper does not use the SDK's retries (`consumers/failures.py` decides on them), nor its trace spans
(`lanekeeper/telemetry/tracing.py` makes them), nor its Pydantic models of requests and answers, because these take
several times as much CPU as the call. Nor does it use the SDK's own `anthropic-version`: the SDK sends the newest
version, in which fields are errors that the caller's version allows.
"""

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Self, TypedDict, Unpack

import anthropic
import httpx2
from anthropic import AsyncAnthropic

from consumers.decoding import Parsing
from consumers.dialects.answers import Answer, OnEvent
from consumers.dialects.anthropic import MESSAGES
from consumers.failures import AccountError, RejectedError
from consumers.limits.base import CallInProgress
from consumers.providers.anthropic_batches import MessageBatches
from consumers.providers.batches import Batches, BatchReader
from consumers.providers.calling import Calling
from consumers.providers.errors import (
    NETWORK_ERRORS,
    plain,
    refuse_html,
    translate_errors,
    within,
)
from consumers.providers.routes import HeaderRules
from consumers.providers.streams import (
    Splitter,
    bounded,
)
from consumers.providers.transport import client_options
from lanekeeper.contract.names import ANTHROPIC_VERSION
from topology.codec import bounds
from topology.codec.decoding import Request, unpublished

PROBE_WITHIN_S: Final = 10.0
MODELS_PATH: Final = "/v1/models"
NO_SUCH_PATH: Final = frozenset({400, 403, 404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudApi:
    """How a cloud's API for Claude differs from Anthropic's own, besides URL and signature, which its client makes."""

    needs_dict: bool = False
    lists_models: bool = True
    splitter: Callable[[int], Splitter] | None = None
    """Only of an API whose streams are not Server-Sent Events."""
    versions: Mapping[str, str] | None = None
    """Only of an API that reads the version in the body (`anthropic_version`): its own names for some versions."""
    signing_errors: tuple[type[Exception], ...] = ()


ANTHROPIC: Final = CloudApi()


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
    api: CloudApi = ANTHROPIC
    max_answer_bytes: int = bounds.ANSWER_BYTES
    max_values: int = bounds.VALUES
    parsing: Parsing = field(default_factory=Parsing)
    header_rules: HeaderRules = field(default_factory=HeaderRules)
    batches: Batches | None = None
    _calling: Calling = field(init=False)

    def __post_init__(self) -> None:
        self._calling = Calling(
            name=self.name,
            secret=self.secret,
            max_answer_bytes=self.max_answer_bytes,
            max_values=self.max_values,
            parsing=self.parsing,
        )

    @classmethod
    def at(cls, base_url: str, *, api_key: str, name: str = "anthropic", **reading: Unpack[Reading]) -> Self:
        # Key and address are arguments, so that the client does not take them from the environment or a profile.
        client = AsyncAnthropic(api_key=api_key, base_url=base_url, **client_options(base_url))
        found = cls(client, name=name, secret=api_key, **reading)
        reader = BatchReader(found._calling)
        found.batches = MessageBatches(client, name=name, reader=reader, headers_of=found.header_rules.of)
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
        return await self._calling.call(
            request,
            MESSAGES,
            partial(self._send, given_headers=request.provider_headers, traceparent=traceparent),
            timeout_s=timeout_s,
            parts=parts,
            in_progress=in_progress,
            splitter=self.api.splitter,
        )

    async def probe(self, model: str, *, by_call: bool) -> None:
        if self.api.lists_models and not by_call:
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

    async def _send(self, body: bytes, *, given_headers: Mapping[str, str], traceparent: str | None) -> httpx2.Response:
        headers = self.header_rules.of(given_headers)
        if traceparent is not None:
            headers["traceparent"] = traceparent
        given: dict[str, Any] = {"content": body}
        if self.api.needs_dict:
            given = {"body": json.loads(body)}
        if self.api.versions is not None:
            version = headers.pop(ANTHROPIC_VERSION)
            given["body"].setdefault("anthropic_version", self.api.versions.get(version, version))
        try:
            with translate_errors(secret=self.secret):
                response: httpx2.Response = await self.client.post(
                    MESSAGES.path, cast_to=httpx2.Response, options={"headers": headers}, stream=True, **given
                )
        except self.api.signing_errors as error:
            reason = f"no credentials were found for it ({type(error).__name__})"
            raise AccountError(reason, reason=reason, type="credentials") from error
        return response


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
