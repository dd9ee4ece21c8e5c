"""`POST /v1/messages/count_tokens` and `GET /v1/models`: calls that the gateway passes to the provider without a lane.

They change nothing and cost no tokens, so nothing is lost if a process dies during such a call. The provider limits
them separately from Messages, and so does the gateway, by the setting `lookups_per_min`. If there are keys of several
tenants, each tenant may use at most half of that limit.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jiter
from aiohttp import web

from consumers.failures import TIMEOUT, AccountError, ProviderError
from consumers.providers.anthropic import Found, Lookups
from consumers.rate_limit import RateLimit
from lanekeeper.contract import names as n
from service.config.settings import GatewayKey, Settings
from service.gateway.access import Access, require_allowed_model
from service.gateway.calls import Bodies
from service.gateway.problems import ApiError, refused
from service.gateway.shares import SharedLimit
from topology.codec import bounds
from topology.codec.decoding import too_large
from topology.codec.headers import read

COUNT_TOKENS: Final = "/v1/messages/count_tokens"
MODELS: Final = "/v1/models"
MODEL: Final = "/v1/models/{id}"
AT_A_TIME: Final = 32
"""Without a limit, one tenant could take all connections to the provider. A low one is enough: each call is answered in
less than a second."""
PAGE: Final = 20
PAGE_AT_MOST: Final = 1000
EVERY: Final = {"limit": str(PAGE_AT_MOST)}
"""Makes the provider return all its models on one page."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_PASSED = frozenset({"request-id", "retry-after", "x-should-retry"})
_ALL = ""
"""In place of a tenant's name: the calls of all tenants together, and those of callers without a tenant."""


class LookupPaths:
    """Handles `count_tokens` and `models`. Answers 501 if the settings of this process contain no provider's key."""

    def __init__(self, settings: Settings, bodies: Bodies, access: Access) -> None:
        spec = settings.gateway
        per_s = spec.lookups_per_min / 60
        self._bodies = bodies
        self._access = access
        self._values = settings.json_values
        self._tenant_models = settings.models.tenants
        self._provider = _provider_of(settings)
        self._limit = RateLimit(per_s=per_s, at_once=max(1.0, spec.lookups_per_min))
        self._tenant_limit = RateLimit(per_s=per_s / 2, at_once=max(1.0, spec.lookups_per_min / 2))
        self._places = SharedLimit(AT_A_TIME, "calls for tokens and models")

    def handlers(self) -> Mapping[tuple[str, str], Callable[[web.Request, GatewayKey], Awaitable[web.Response]]]:
        return {("POST", COUNT_TOKENS): self._count_tokens, ("GET", MODELS): self._models, ("GET", MODEL): self._model}

    async def aclose(self) -> None:
        if self._provider is not None:
            await self._provider.aclose()

    async def _count_tokens(self, request: web.Request, caller: GatewayKey) -> web.Response:
        allowed = self._allowed(caller)

        def check(body: bytes) -> None:
            if (excess := bounds.excess(body, max_values=self._values)) is not None:
                raise too_large(excess)
            if allowed is not None:
                require_allowed_model(allowed, _model_in(body))

        async with self._bodies.in_memory(request, caller, check=check) as body:
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
        """The models that the caller's key and its tenant's setting both allow; None: all."""
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
        if self._provider is None:
            raise ApiError(
                501,
                "this gateway has no key of a provider of kind anthropic, which answers this itself: set "
                "ANTHROPIC_API_KEY for it too (Messages need none here: workers have theirs)",
                headers={"x-should-retry": "false"},
            )
        beta = read({n.ANTHROPIC_BETA: request.headers.get(n.ANTHROPIC_BETA)}).beta
        with self._places.taken(caller.tenant):
            self._count(caller)
            try:
                return await self._provider.call(request.path, body=body, query=query or request.query, beta=beta)
            except ProviderError as error:
                raise _failed(error) from error

    def _count(self, caller: GatewayKey) -> None:
        is_within = not self._access.has_several_tenants or self._tenant_limit.take(caller.tenant or _ALL)
        if not is_within or not self._limit.take(_ALL):
            raise refused("too many calls for tokens and models (LANEKEEPER_GATEWAY__LOOKUPS_PER_MIN)", status=429)


def _provider_of(settings: Settings) -> Lookups | None:
    """The first provider that has a key, is of kind `anthropic`, and uses Anthropic's names of models."""
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
    """Raises ApiError if there is no model, or if a JSON key occurs twice: the gateway and the provider could then read
    different models."""
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
    if isinstance(error, AccountError) and error.otherwise is None:  # not the caller's 401, 402 or wrong address
        return ApiError(503, f"the provider cannot be called: {error.reason}", headers={"x-should-retry": "false"})
    return ApiError(error.status if error.status >= 400 else 502, error.detail)


def _response(found: Found, *, body: bytes | None = None) -> web.Response:
    headers = {name: value for name, value in found.headers.items() if name in _PASSED}
    headers.setdefault("request-id", uuid.uuid4().hex)
    headers["content-type"] = "application/json"
    headers["cache-control"] = "no-store"  # it depends on the key
    return web.Response(status=found.status, body=found.body if body is None else body, headers=headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Which page of the list of models a caller asks for."""

    limit: int
    after: str | None
    before: str | None


def paging_of(query: Mapping[str, str]) -> Paging:
    """Reads the query as Anthropic does. Raises ApiError."""
    limit = query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= PAGE_AT_MOST):
        raise ApiError(400, f"limit: allowed is a whole number from 1 to {PAGE_AT_MOST}")
    return Paging(limit=int(limit), after=query.get("after_id"), before=query.get("before_id"))


def page_of(body: bytes, allowed: Collection[str], paging: Paging) -> bytes:
    """One page of the provider's whole list (`body`), with only the models in `allowed`. Raises ApiError if it cannot
    be read."""
    models = [model for model in _models(body) if model["id"] in allowed]
    ids = [model["id"] for model in models]
    start = ids.index(paging.after) + 1 if paging.after in ids else 0
    end = ids.index(paging.before) if paging.before in ids else len(ids)
    page = models[start:end]
    has_more = len(page) > paging.limit
    is_backwards = paging.before is not None and paging.after is None
    page = page[-paging.limit :] if is_backwards else page[: paging.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json.dumps({"data": page, "has_more": has_more, "first_id": first, "last_id": last}).encode()


def _models(body: bytes) -> list[dict[str, Any]]:
    try:
        models = json.loads(body)["data"]
        if all(isinstance(model["id"], str) for model in models):
            return list(models)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ApiError(502, "the provider's list of models cannot be read")
