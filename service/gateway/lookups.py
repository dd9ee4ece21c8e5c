"""`POST /v1/messages/count_tokens` and `GET /v1/models`: calls that go from here to the provider, past the lanes.

They change nothing and cost no tokens, so there is nothing to keep if a process dies, and no place in a lane to wait
for. The provider counts them apart from Messages; so does this: `lookups_per_min`, of which one of several tenants
has at most half.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import jiter
from aiohttp import web

from consumers.failures import TIMEOUT, ProviderError
from consumers.providers.lookups import Found, Lookups
from consumers.share import Share
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import RequestProblem
from service.config.budget_sections import FIRST
from service.config.gateway_section import GatewayKey
from service.config.settings import Settings
from service.gateway.access import see_that_model_is_allowed
from service.gateway.bodies import BODY_WITHIN_S
from service.gateway.models_page import EVERY, page_of, paging_of
from service.gateway.problems import ApiError, of_problem, refused
from service.gateway.room import Room
from topology.codec import bounds
from topology.codec.decoding import too_large
from topology.codec.headers import read

COUNT_TOKENS: Final = "/v1/messages/count_tokens"
MODELS: Final = "/v1/models"
MODEL: Final = "/v1/models/{id}"
AT_A_TIME: Final = 32
"""Such a call takes the provider less than a second. More at once would take the connections of one tenant's burst."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_PASSED = frozenset({"content-type", "request-id", "retry-after", "x-should-retry"})
_ALL = ""
Answering = Callable[[web.Request, GatewayKey], Awaitable[web.Response]]


class LookupPaths:
    """Answers these calls. Without a provider's key in the settings of this process: 501. `body_bytes`: the largest
    body."""

    def __init__(self, settings: Settings, *, room: Room, body_bytes: int) -> None:
        spec = settings.gateway
        per_s = spec.lookups_per_min / 60
        tenants = {key.tenant for key in spec.keys.values()}
        part = 0.5 if len(tenants) > 1 else 1.0
        self._room = room
        self._body_bytes = body_bytes
        self._values = settings.json_values
        self._of_tenants = settings.models.tenants
        self._provider = _provider_of(settings)
        self._share = Share(per_s=per_s, at_once=max(1.0, spec.lookups_per_min))
        self._tenants = Share(per_s=part * per_s, at_once=max(1.0, part * spec.lookups_per_min))
        self._running = 0

    def answers(self) -> Mapping[tuple[str, str], Answering]:
        return {
            ("POST", COUNT_TOKENS): self._count_tokens,
            ("GET", MODELS): self._models,
            ("GET", MODEL): self._model,
        }

    async def aclose(self) -> None:
        if self._provider is not None:
            await self._provider.aclose()

    async def _count_tokens(self, request: web.Request, caller: GatewayKey) -> web.Response:
        size = request.content_length
        if size is not None and size > self._body_bytes:
            raise self._too_large()
        with self._room.taken(self._body_bytes if size is None else size):
            body = await self._body_of(request)
            if (excess := bounds.excess(body, values=self._values)) is not None:
                raise of_problem(too_large(excess), chose_id=False)
            if (allowed := self._allowed(caller)) is not None:
                _see_that_model_is_allowed(allowed, body)
            return _response(await self._asked(request, caller, body=body))

    async def _body_of(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_WITHIN_S):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_WITHIN_S:g} s", "timeout_error") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: larger than {self._body_bytes} bytes")

    async def _models(self, request: web.Request, caller: GatewayKey) -> web.Response:
        allowed = self._allowed(caller)
        if allowed is None:
            return _response(await self._asked(request, caller))
        paging = paging_of(request.query)
        found = await self._asked(request, caller, query=EVERY)
        return _response(found, body=page_of(found.body, allowed, paging) if found.status == 200 else None)

    async def _model(self, request: web.Request, caller: GatewayKey) -> web.Response:
        id, allowed = request.match_info["id"], self._allowed(caller)
        if _ID.fullmatch(id) is None or (allowed is not None and id not in allowed):
            raise ApiError(404, f"model: {id[:100]}")
        return _response(await self._asked(request, caller, path=f"{MODELS}/{id}"))

    def _allowed(self, caller: GatewayKey) -> frozenset[str] | None:
        """The models of the key and of its tenant; None: all."""
        of_tenant = self._of_tenants.get(caller.tenant or "")
        both = [frozenset(each) for each in (caller.models, of_tenant) if each is not None]
        return frozenset.intersection(*both) if both else None

    async def _asked(
        self,
        request: web.Request,
        caller: GatewayKey,
        *,
        path: str | None = None,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Found:
        """The provider's answer. Raises ApiError."""
        provider = self._take(caller)
        self._running += 1
        try:
            return await provider.call(
                path or request.path,
                body=body,
                query=request.query if query is None else query,
                beta=_beta(request),
            )
        except ProviderError as error:
            raise _failed(error) from error
        finally:
            self._running -= 1

    def _take(self, caller: GatewayKey) -> Lookups:
        if self._provider is None:
            raise ApiError(
                501,
                "this gateway has no key of a provider of kind anthropic, which answers this itself: set "
                "ANTHROPIC_API_KEY for it too (Messages need none here: workers have theirs)",
                "api_error",
                {"x-should-retry": "false"},
            )
        if self._running >= AT_A_TIME:
            raise refused(f"{self._running} calls for tokens and models are under way here", status=529)
        if not self._tenants.take(caller.tenant or _ALL) or not self._share.take(_ALL):
            raise refused("too many calls for tokens and models (LANEKEEPER_GATEWAY__LOOKUPS_PER_MIN)", status=429)
        return self._provider


def _provider_of(settings: Settings) -> Lookups | None:
    """The first provider that has these paths, under Anthropic's names of models."""
    if settings.api_key is not None:
        return Lookups.at(settings.provider_url, api_key=settings.api_key)
    for name in sorted(settings.providers.keys() - {FIRST}):
        each = settings.providers[name]
        if each.kind == "anthropic" and each.models is None and each.api_key is not None and each.base_url is not None:
            return Lookups.at(each.base_url.get_secret_value(), api_key=each.api_key.get_secret_value())
    return None


def _beta(request: web.Request) -> str | None:
    try:
        return read({n.ANTHROPIC_BETA: request.headers.get(n.ANTHROPIC_BETA)}).beta
    except RequestProblem as problem:
        raise of_problem(problem, chose_id=False) from None


def _see_that_model_is_allowed(allowed: frozenset[str], body: bytes) -> None:
    """Raises ApiError. A body in which two parsers could find different models is refused."""
    try:
        found = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="none")
    except ValueError:
        raise ApiError(400, "body: not a JSON object in UTF-8, or a key is there twice") from None
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, str):
        raise ApiError(400, "model: a string is required")
    try:
        see_that_model_is_allowed(GatewayKey(tenant=None, models=tuple(sorted(allowed))), model)
    except RequestProblem as problem:
        raise of_problem(problem, chose_id=False) from None


def _failed(error: ProviderError) -> ApiError:
    if error.type == TIMEOUT:
        return ApiError(504, error.detail)
    return ApiError(error.status if error.status >= 400 else 502, error.detail)


def _response(found: Found, *, body: bytes | None = None) -> web.Response:
    headers = {name: value for name, value in found.headers.items() if name in _PASSED}
    headers.setdefault("request-id", uuid.uuid4().hex)
    headers.setdefault("content-type", "application/json")
    return web.Response(status=found.status, body=found.body if body is None else body, headers=headers)
