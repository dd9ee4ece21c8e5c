"""The accounts at providers that a gateway calls itself, without a lane: for tokens, models and files. The provider
limits these calls separately from Messages, and so does the gateway, by the setting `lookups_per_min`. If there are
keys of several tenants, each tenant may use at most half of that limit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from consumers.failures import TIMEOUT, AccountError, ProviderError
from consumers.providers.anthropic import Lookups
from consumers.providers.openai import OpenAIProvider
from consumers.rate_limit import RateLimit
from service.config.settings import FIRST, OPENAI_KINDS, GatewayKey, Settings
from service.gateway.access import Access
from service.gateway.problems import ApiError, refused

_PASSED = frozenset({"request-id", "retry-after", "x-should-retry"})
_LIMITS = "anthropic-ratelimit-"
_ALL = ""
NEVER_AGAIN: Mapping[str, str] = {"x-should-retry": "false"}


class Accounts:
    """Those of which this process has the key, by the names of their providers."""

    def __init__(self, settings: Settings, access: Access) -> None:
        per_min = settings.gateway.lookups_per_min
        self._access = access
        self._limit = RateLimit(per_s=per_min / 60, at_once=max(1.0, per_min))
        self._tenant_limit = RateLimit(per_s=per_min / 120, at_once=max(1.0, per_min / 2))
        self._routes = settings.routes_spec()
        self._accounts = dict(_accounts(settings))
        self._openais = list(_openais(settings))
        of_all_models = (name for name in sorted(self._accounts) if _has_all_models(settings, name))
        self._default = FIRST if FIRST in self._accounts else next(of_all_models, "")

    def of(self, provider: str | None = None) -> Lookups:
        """`provider`: None: one that has all models. Raises ApiError 501 if its key is not here."""
        name = self._default if provider is None else provider
        if (found := self._accounts.get(name)) is not None:
            return found
        which = f" named {name}" if name else ""
        raise ApiError(
            501,
            f"this gateway has no key of a provider{which} of kind anthropic, which answers this itself: set "
            "ANTHROPIC_API_KEY for it too (Messages need none here: workers have theirs)",
            headers=NEVER_AGAIN,
        )

    async def openai_models(self) -> Sequence[Mapping[str, Any]]:
        """The models of all providers of OpenAI's kinds, as OpenAI describes them. Raises ApiError, ProviderError."""
        if not self._openais:
            raise ApiError(
                501,
                "this gateway has no provider of kind openai or azure whose models it knows: set its key, or its "
                "models, for the gateway too",
                headers=NEVER_AGAIN,
            )
        found: dict[str, Mapping[str, Any]] = {}
        for each in self._openais:
            for model in each if isinstance(each, list) else await each.models():
                found.setdefault(model["id"], model)
        return list(found.values())

    def first_of(self, lane: str) -> str:
        """The name of the provider that is called first for the lane's requests."""
        return next(iter(self._routes.lanes.get(lane) or [each.name for each in self._routes.providers]), "")

    def count(self, caller: GatewayKey) -> None:
        """Count a call that is passed on. Raises ApiError 429."""
        is_within = not self._access.has_several_tenants or self._tenant_limit.take(caller.tenant or _ALL)
        if not is_within or not self._limit.take(_ALL):
            text = "too many calls for tokens, models and files (LANEKEEPER_GATEWAY__LOOKUPS_PER_MIN)"
            raise refused(text, status=429)

    async def aclose(self) -> None:
        for account in self._accounts.values():
            await account.aclose()
        for each in self._openais:
            if isinstance(each, OpenAIProvider):
                await each.aclose()


def _accounts(settings: Settings) -> Iterator[tuple[str, Lookups]]:
    if settings.api_key is not None:
        rules = settings.header_rules(FIRST)
        yield FIRST, Lookups(settings.provider_url, api_key=settings.api_key, header_rules=rules)
    for name, provider in settings.providers.items():
        if provider.kind == "anthropic" and provider.api_key is not None and provider.base_url is not None:
            url, key = provider.base_url.get_secret_value(), provider.api_key.get_secret_value()
            yield name, Lookups(url, api_key=key, header_rules=settings.header_rules(name))


def _openais(settings: Settings) -> Iterator[OpenAIProvider | list[dict[str, Any]]]:
    """Each provider, or, if the settings list them, its models."""
    for name, section in settings.providers.items():
        if section.kind not in OPENAI_KINDS:
            continue
        if section.models is not None:
            yield [{"id": model, "object": "model", "created": 0, "owned_by": name} for model in section.models]
        elif section.kind == "openai" and not list(section.missing_for_calls()):
            given = {"api_key": section.api_key, "base_url": section.base_url}
            secrets = {key: value.get_secret_value() for key, value in given.items() if value is not None}
            yield OpenAIProvider.at(name=name, **secrets, organization=section.organization, project=section.project)


def _has_all_models(settings: Settings, name: str) -> bool:
    return name == FIRST or settings.providers[name].models is None


def not_called(error: ProviderError) -> ApiError:
    """The error for a call that could not be passed on, or that the provider has answered in no format of its own."""
    if error.type == TIMEOUT:
        return ApiError(504, error.detail)
    if isinstance(error, AccountError) and error.otherwise is None:  # not the caller's 401, 402 or wrong address
        return ApiError(503, f"the provider cannot be called: {error.reason}", headers=NEVER_AGAIN)
    return ApiError(error.status if error.status >= 400 else 502, error.detail)


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of the provider's response that the caller gets."""
    found = {name: value for name, value in headers.items() if name in _PASSED or name.startswith(_LIMITS)}
    found.setdefault("request-id", uuid.uuid4().hex)
    found["cache-control"] = "no-store"  # it depends on the key
    return found


def listed(body: bytes) -> list[dict[str, Any]]:
    """What a provider's list has, each with its id."""
    try:
        data = json.loads(body)["data"]
        if all(isinstance(each["id"], str) for each in data):
            return list(data)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ApiError(502, "the provider's list cannot be read")
