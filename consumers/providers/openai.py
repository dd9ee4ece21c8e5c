"""Calls the APIs of OpenAI's kind: OpenAI's own, Azure OpenAI, and servers that behave like them (vLLM, Ollama,
llama.cpp, OpenRouter and many more). The bodies of requests and answers are passed on as bytes.

    openai   base_url + /chat/completions, /responses, /embeddings; the key as bearer; organization, project as headers
    azure    the same below the resource's `/openai/v1`, where a model is the name of a deployment; with `api_version`,
             `/openai/deployments/{deployment}/…?api-version=…`; the key as `api-key`, or an Entra token as bearer
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Final, Self
from urllib.parse import quote

import httpx2
import jiter

from consumers.background import Background
from consumers.decoding import Parsing
from consumers.dialects import DIALECTS
from consumers.dialects.answers import Answer, OnEvent
from consumers.dialects.base import Dialect
from consumers.dialects.openai_chat import CHAT
from consumers.dialects.openai_embeddings import EmbeddingInputs, inputs_of, join, separate
from consumers.failures import TIMEOUT, AccountError, ProviderError, RejectedError, TransientError
from consumers.gathering import Gathering
from consumers.limits.base import CallInProgress
from consumers.providers.batches import Batches, BatchReader
from consumers.providers.calling import Calling
from consumers.providers.errors import (
    NETWORK_ERRORS,
    from_response,
    plain,
    refuse_html,
    translate_errors,
    translate_sending,
    within,
)
from consumers.providers.extras import imported
from consumers.providers.openai_batches import FileBatches
from consumers.providers.streams import bounded
from consumers.providers.transport import http_client
from lanekeeper.contract.names import OPENAI_CHAT, OPENAI_EMBEDDINGS, OPENAI_RESPONSES
from topology.codec import bounds
from topology.codec.decoding import Request, unpublished

OPENAI_URL: Final = "https://api.openai.com/v1"
ENTRA_SCOPE: Final = "https://cognitiveservices.azure.com/.default"
ENTRA: Final = "azure-identity"
PROBE_WITHIN_S: Final = 10.0
PROBE_TOKENS: Final = 16
"""The fewest that OpenAI's newer models accept."""
_NO_SUCH_PATH: Final = frozenset({403, 404, 405, 501})
_MODELS: Final = "/models"
Token = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """How much one call for embeddings may have."""

    inputs: int = 2048
    tokens: int = 300_000


@dataclass(slots=True, eq=False, repr=False)  # it knows the key
class OpenAIProvider:
    """Calls one server. `address`: the URL of a path for a model. `headers`: of each call, with the key. `token`: makes
    the bearer token of each call, where there is no key. `sends_priority`: whether a call has the rank of its lane as
    `priority`, by which vLLM orders its queue."""

    http: httpx2.AsyncClient
    _: KW_ONLY
    name: str
    secret: str
    address: Callable[[str, str], str]
    headers: Mapping[str, str]
    token: Token | None = None
    sends_priority: bool = False
    embeddings: CallLimits = field(default_factory=CallLimits)
    max_answer_bytes: int = bounds.ANSWER_BYTES
    max_values: int = bounds.VALUES
    parsing: Parsing = field(default_factory=Parsing)
    batches: Batches | None = field(default=None, init=False)
    _calling: Calling = field(init=False)
    _background: Background = field(default_factory=Background, init=False)
    _gatherings: "dict[tuple[str, str], Gathering[_Gathered, Answer | BaseException]]" = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        self._calling = Calling(
            name=self.name,
            secret=self.secret,
            max_answer_bytes=self.max_answer_bytes,
            max_values=self.max_values,
            parsing=self.parsing,
        )

    @classmethod
    def at(
        cls,
        *,
        name: str,
        base_url: str = OPENAI_URL,
        api_key: str | None = None,
        organization: str | None = None,
        project: str | None = None,
        **more: Any,
    ) -> Self:
        """OpenAI's own API, or a server that behaves like it."""
        base = base_url.rstrip("/")
        given = {
            "authorization": None if api_key is None else f"Bearer {api_key}",
            "openai-organization": organization,
            "openai-project": project,
        }
        headers = {header: value for header, value in given.items() if value is not None}
        found = cls(
            http_client(base_url),
            name=name,
            secret=api_key or "",
            address=lambda path, model: base + path,
            headers=headers,
            **more,
        )
        found.batches = FileBatches(found.call, name=name, reader=BatchReader(found._calling))
        return found

    @classmethod
    def azure(
        cls, *, name: str, base_url: str, api_key: str | None = None, api_version: str | None = None, **more: Any
    ) -> Self:
        """Azure OpenAI. Without `api_key`, the machine's credentials are used and renewed; that needs the package
        `azure-identity`."""
        base = base_url.rstrip("/").removesuffix("/v1").removesuffix("/openai")
        return cls(
            http_client(base_url),
            name=name,
            secret=api_key or "",
            address=partial(_azure_address, f"{base}/openai", api_version),
            headers={} if api_key is None else {"api-key": api_key},
            token=_entra_token() if api_key is None else None,
            **more,
        )

    async def stream(
        self,
        request: Request,
        *,
        timeout_s: float,
        parts: OnEvent | None,
        in_progress: CallInProgress | None = None,
        traceparent: str | None = None,
    ) -> Answer:
        if request.dialect == OPENAI_EMBEDDINGS and request.gather_count > 1:
            asked = inputs_of(request.body)
            most, count = self.embeddings, request.gather_count
            if len(asked.inputs) <= most.inputs // count and asked.tokens <= most.tokens // count:
                return await self._among_others(request, asked, timeout_s)
        dialect = DIALECTS[request.dialect]
        return await self._calling.call(
            request,
            dialect,
            partial(self._post, request=request, dialect=dialect, traceparent=traceparent),
            timeout_s=timeout_s,
            parts=parts,
            in_progress=in_progress,
        )

    async def _among_others(self, request: Request, asked: EmbeddingInputs, timeout_s: float) -> Answer:
        key = (request.lane, asked.others)
        if (gathering := self._gatherings.get(key)) is None:
            gathering = self._gatherings[key] = Gathering(
                partial(self._together, key),
                count=request.gather_count,
                window_s=request.gather_window_s,
                background=self._background,
            )
        try:
            found = await gathering.call((request, asked), timeout_s)
        except TimeoutError as error:
            raise TransientError(f"no whole answer from the provider within {timeout_s:g} s", type=TIMEOUT) from error
        finally:
            if gathering.is_empty and self._gatherings.get(key) is gathering:  # all have left before their call began
                del self._gatherings[key]
        if isinstance(found, BaseException):
            raise found
        return found

    async def _together(
        self, key: tuple[str, str], gathered: "Sequence[_Gathered]", timeout_s: float, _: str
    ) -> "Sequence[Answer | BaseException]":
        """If the provider refuses the call, each request is called alone, because only one may be wrong."""
        self._gatherings.pop(key, None)
        several = [asked for _, asked in gathered]
        first = replace(gathered[0][0], gather_count=1)
        if len(gathered) == 1:
            return [await self.stream(first, timeout_s=timeout_s, parts=None)]
        try:
            answer = await self.stream(replace(first, body=join(several)), timeout_s=timeout_s, parts=None)
            return separate(answer, several)
        except RejectedError:
            alone = (replace(request, gather_count=1) for request, _ in gathered)
            calls = (self.stream(each, timeout_s=timeout_s, parts=None) for each in alone)
            return await asyncio.gather(*calls, return_exceptions=True)

    async def probe(self, model: str, *, by_call: bool) -> None:
        if not by_call:
            try:
                async with within(PROBE_WITHIN_S, why=f"no answer within {PROBE_WITHIN_S:g} s"):
                    response = await self._send("GET", self.address(_MODELS, model), CHAT)
                try:
                    refuse_html(response.status_code, plain(response.headers))
                finally:
                    with suppress(*NETWORK_ERRORS):
                        await response.aclose()
                return
            except (AccountError, RejectedError) as error:
                if error.status not in _NO_SUCH_PATH:  # a server need not list its models
                    raise
        dialect = OPENAI_EMBEDDINGS if "embed" in model else OPENAI_CHAT
        request = unpublished("1", model=model, max_tokens=PROBE_TOKENS, dialect=dialect)
        await self.stream(request, timeout_s=PROBE_WITHIN_S, parts=None)

    async def models(self) -> Sequence[Mapping[str, Any]]:
        """The server's models, as it describes them. Raises ProviderError."""
        async with within(PROBE_WITHIN_S, why=f"no answer within {PROBE_WITHIN_S:g} s"):
            response = await self.call("GET", _MODELS)
            try:
                refuse_html(response.status_code, plain(response.headers))
                with translate_errors(secret=self.secret):
                    body = b"".join([piece async for piece in bounded(response.aiter_bytes(), self.max_answer_bytes)])
            finally:
                with suppress(*NETWORK_ERRORS):
                    await response.aclose()
        try:
            return [each for each in json.loads(body)["data"] if isinstance(each["id"], str)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TransientError("its list of models cannot be read", type="broken_answer") from error

    async def aclose(self) -> None:
        await self._background.finish(within_s=0)
        await self.http.aclose()

    async def _post(
        self, body: bytes, *, request: Request, dialect: Dialect, traceparent: str | None
    ) -> httpx2.Response:
        if self.sends_priority and not _states_priority(body):
            body = body.replace(b"{", b'{"priority":%d,' % request.rank, 1)
        headers = {"content-type": "application/json"}
        if traceparent is not None:
            headers["traceparent"] = traceparent
        url = self.address(dialect.path, request.model)
        return await self._send("POST", url, dialect, content=body, headers=headers)

    async def call(self, method: str, path: str, **given: Any) -> httpx2.Response:
        """Make a call that is about no model. `given`: as for httpx2. Raises ProviderError if the response is an
        error."""
        return await self._send(method, self.address(path, ""), CHAT, **given)

    async def _send(
        self, method: str, url: str, dialect: Dialect, *, headers: Mapping[str, str] | None = None, **given: Any
    ) -> httpx2.Response:
        named, secret = {**self.headers, **(headers or {})}, self.secret
        if self.token is not None:
            secret = await self.token()
            named["authorization"] = f"Bearer {secret}"
        with translate_sending():
            asked = self.http.build_request(method, url, headers=named, **given)
            response = await self.http.send(asked, stream=True)
        if response.status_code < 300:
            return response
        try:
            with translate_errors(secret=secret):
                await response.aread()
        except ProviderError:
            pass  # the status says enough
        finally:
            with suppress(*NETWORK_ERRORS):
                await response.aclose()
        raise from_response(response, dialect, secret=secret)


_Gathered = tuple[Request, EmbeddingInputs]


def _states_priority(body: bytes) -> bool:
    """Whether the caller has set it. A tool may have a parameter of this name."""
    return b'"priority"' in body and "priority" in jiter.from_json(body, cache_mode="none")


def _azure_address(base: str, api_version: str | None, path: str, model: str) -> str:
    if api_version is None:
        return f"{base}/v1{path}"
    of_all = path in (_MODELS, DIALECTS[OPENAI_RESPONSES].path)
    deployment = "" if of_all else f"/deployments/{quote(model, safe='')}"
    return f"{base}{deployment}{path}?api-version={api_version}"


def _entra_token() -> Token:
    identity = imported("azure.identity.aio", ENTRA)
    provider = identity.get_bearer_token_provider(identity.DefaultAzureCredential(), ENTRA_SCOPE)

    async def token() -> str:
        try:
            return str(await provider())
        except Exception as error:  # each source of credentials has exceptions of its own
            reason = f"no credentials were found for it ({type(error).__name__})"
            raise AccountError(reason, reason=reason, type="credentials") from error

    return token
