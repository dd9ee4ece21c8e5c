"""`POST /v1/messages/count_tokens` and `GET /v1/models`: calls that the gateway passes to the provider without a lane.

They change nothing and cost no tokens, so nothing is lost if a process dies during such a call. The provider limits
them separately from Messages, and so does the gateway, by the setting `lookups_per_min`. If there are keys of several
tenants, each tenant may use at most half of that limit.
"""

import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import jiter
from aiohttp import web

from consumers.failures import TIMEOUT, ProviderError
from consumers.providers.lookups import Found, Lookups
from consumers.rate_limit import RateLimit
from lanekeeper.contract import names as n
from service.config.gateway_section import GatewayKey
from service.config.settings import Settings
from service.gateway.access import require_allowed_model
from service.gateway.bodies import Bodies
from service.gateway.models_page import EVERY, page_of, paging_of
from service.gateway.problems import ApiError, refused
from topology.codec import bounds
from topology.codec.decoding import too_large
from topology.codec.headers import read

COUNT_TOKENS: Final = "/v1/messages/count_tokens"
MODELS: Final = "/v1/models"
MODEL: Final = "/v1/models/{id}"
AT_A_TIME: Final = 32
"""The most calls of `count_tokens` and `models` in progress at a time. Without a limit, one tenant could take all
connections to the provider. A low limit is enough, because the provider answers each call in less than a second."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_PASSED = frozenset({"content-type", "request-id", "retry-after", "x-should-retry"})
_ALL = ""
"""What the rate limits use in place of a tenant's name: to count the calls of all tenants together, and to count those
of callers that have no tenant."""


class LookupPaths:
    """Handles `count_tokens` and `models`, which the gateway passes to the provider itself, without a lane. Answers 501
    if the settings of this process contain no provider's key."""

    def __init__(self, settings: Settings, bodies: Bodies) -> None:
        spec = settings.gateway
        per_s = spec.lookups_per_min / 60
        tenants = {key.tenant for key in spec.keys.values()}
        part = 0.5 if len(tenants) > 1 else 1.0
        self._bodies = bodies
        self._values = settings.json_values
        self._tenant_models = settings.models.tenants
        self._provider = _provider_of(settings)
        self._limit = RateLimit(per_s=per_s, at_once=max(1.0, spec.lookups_per_min))
        self._tenant_limit = RateLimit(per_s=part * per_s, at_once=max(1.0, part * spec.lookups_per_min))
        self._running = 0

    def handlers(self) -> Mapping[tuple[str, str], Callable[[web.Request, GatewayKey], Awaitable[web.Response]]]:
        return {("POST", COUNT_TOKENS): self._count_tokens, ("GET", MODELS): self._models, ("GET", MODEL): self._model}

    async def aclose(self) -> None:
        if self._provider is not None:
            await self._provider.aclose()

    async def _count_tokens(self, request: web.Request, caller: GatewayKey) -> web.Response:
        async with self._bodies.in_memory(request) as body:
            if (excess := bounds.excess(body, max_values=self._values)) is not None:
                raise too_large(excess)
            if (allowed := self._allowed(caller)) is not None:
                require_allowed_model(allowed, _model_in(body))
            return _response(await self._call_provider(request, caller, body=body))

    async def _models(self, request: web.Request, caller: GatewayKey) -> web.Response:
        allowed = self._allowed(caller)
        if allowed is None:
            return _response(await self._call_provider(request, caller))
        paging = paging_of(request.query)
        found = await self._call_provider(request, caller, query=EVERY)
        return _response(found, body=page_of(found.body, allowed, paging) if found.status == 200 else None)

    async def _model(self, request: web.Request, caller: GatewayKey) -> web.Response:
        id, allowed = request.match_info["id"], self._allowed(caller)
        if _ID.fullmatch(id) is None or (allowed is not None and id not in allowed):
            raise ApiError(404, f"model: {id[:100]}")
        return _response(await self._call_provider(request, caller))

    def _allowed(self, caller: GatewayKey) -> list[str] | None:
        """The models that the caller may use: those that its API key and its tenant's setting both allow; None: all."""
        of_tenant = self._tenant_models.get(caller.tenant or "")
        both = [frozenset(models) for models in (caller.models, of_tenant) if models is not None]
        return sorted(frozenset.intersection(*both)) if both else None

    async def _call_provider(
        self,
        request: web.Request,
        caller: GatewayKey,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Found:
        """Pass a call to the provider, if the gateway's limits for such calls allow it, and return the provider's
        answer. Raises ApiError, RequestProblem."""
        provider = self._admit(caller)
        beta = read({n.ANTHROPIC_BETA: request.headers.get(n.ANTHROPIC_BETA)}).beta
        self._running += 1
        try:
            return await provider.call(request.path, body=body, query=query or request.query, beta=beta)
        except ProviderError as error:
            raise _failed(error) from error
        finally:
            self._running -= 1

    def _admit(self, caller: GatewayKey) -> Lookups:
        """Count a call against the limits for token counts and lists of models, and return the provider to pass it to.
        Raises ApiError if a limit is exceeded, or no provider has a key."""
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
        if not self._tenant_limit.take(caller.tenant or _ALL) or not self._limit.take(_ALL):
            raise refused("too many calls for tokens and models (LANEKEEPER_GATEWAY__LOOKUPS_PER_MIN)", status=429)
        return self._provider


def _provider_of(settings: Settings) -> Lookups | None:
    """The provider to which token counts and lists of models are passed: the first one that has a key, is of kind
    `anthropic`, and uses Anthropic's names of models. None: there is no such provider."""
    if settings.api_key is not None:
        return Lookups(settings.provider_url, api_key=settings.api_key)
    for _, provider in sorted(settings.providers.items()):
        if (
            provider.kind == "anthropic"
            and provider.models is None
            and provider.api_key is not None
            and provider.base_url is not None
        ):
            return Lookups(provider.base_url.get_secret_value(), api_key=provider.api_key.get_secret_value())
    return None


def _model_in(body: bytes) -> str:
    """The model that a JSON body names. Raises ApiError if there is none, or if a JSON key occurs twice: the gateway
    and the provider could then read different models."""
    try:
        found = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="none")
    except ValueError:
        raise ApiError(400, "body: not a JSON object in UTF-8, or a key is there twice") from None
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, str):
        raise ApiError(400, "model: a string is required")
    return model


def _failed(error: ProviderError) -> ApiError:
    if error.type == TIMEOUT:
        return ApiError(504, error.detail)
    return ApiError(error.status if error.status >= 400 else 502, error.detail)


def _response(found: Found, *, body: bytes | None = None) -> web.Response:
    headers = {name: value for name, value in found.headers.items() if name in _PASSED}
    headers.setdefault("request-id", uuid.uuid4().hex)
    headers.setdefault("content-type", "application/json")
    headers["cache-control"] = "no-store"  # it depends on the key
    return web.Response(status=found.status, body=found.body if body is None else body, headers=headers)
