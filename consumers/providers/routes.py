"""Makes the chain of a request: the providers and models that may be called for it, in order; and the headers that
such a provider gets.

The chain has first the providers of the lane that have the requested model; then those that have the model's fallback
(the model that the settings name in its place); then those that have the fallback of that fallback, and so on. Models
that the lane or the tenant may not use are left out.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, NamedTuple

from consumers.job import Chain, Route
from lanekeeper.contract.names import ANTHROPIC_BETA, ANTHROPIC_MESSAGES, ANTHROPIC_VERSION

LINES: Final[Mapping[str, str]] = {
    "claude-fable-5*": "fable-5",
    "claude-opus-5-5*": "opus-5-5",
    "claude-opus-5*": "opus-5",
    "claude-opus-4*": "opus-4",
    "claude-sonnet-5-5*": "sonnet-5-5",
    "claude-sonnet-5*": "sonnet-5",
    "claude-sonnet-4*": "sonnet-4",
    "claude-haiku-5-5*": "haiku-5-5",
    "claude-haiku-4-5*": "haiku-4-5",
    "*fable*": "fable",
    "*mythos*": "mythos",
    "*opus*": "opus",
    "*sonnet*": "sonnet",
    "*haiku*": "haiku",
}
"""Which models share a provider's rate limits, by patterns of their names; the first that fits counts. As Anthropic's
page "Rate limits" lists them on 2026-10-17; the last five are for models that it does not list."""
_DATE: Final = re.compile(r"-\d{4}-\d{2}-\d{2}$")
"""The dated models of OpenAI share the limits of the one whose name has no date."""
CACHED = 10_000
ALL = "all"
OTHER = "other"
"""Stands for all models that neither the settings nor the table of prices name, in accounts and metrics: requests may
invent any number of names."""


DEFAULT_VERSION: Final = "2023-06-01"
"""What callers without an SDK have always sent. A later one refuses fields that this one allows, such as
`temperature`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRules:
    """Which headers a provider gets. `version`: of requests that state none. `passed`: patterns, such as
    `anthropic-*`, of the callers' headers that are passed on; the version and the betas always are."""

    version: str = DEFAULT_VERSION
    passed: tuple[str, ...] = ("anthropic-*",)

    def of(self, given: Mapping[str, str]) -> dict[str, str]:
        """The headers for the provider, of those that a caller has given (names in lower case)."""
        found = {name: value for name, value in given.items() if self._passes(name)}
        found.setdefault(ANTHROPIC_VERSION, self.version)
        return found

    def _passes(self, name: str) -> bool:
        return name in (ANTHROPIC_VERSION, ANTHROPIC_BETA) or any(fnmatchcase(name, each) for each in self.passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderModels:
    """The models that one provider offers."""

    name: str
    models: Mapping[str, str] | None = None
    """The provider's own name for each, by Anthropic's name. None: all models, under Anthropic's names."""
    dialects: Collection[str] = (ANTHROPIC_MESSAGES,)
    """Those that it speaks."""
    is_pooled: bool = False
    """Whether all its models share one set of limits, as on Bedrock."""


class RouteProblem(NamedTuple):
    """An error in these settings."""

    place: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesSpec:
    """Which providers and models may be called, by the settings."""

    providers: tuple[ProviderModels, ...]
    lanes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For lanes that do not use all providers in the usual order."""
    lane_models: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    tenants: Mapping[str, Collection[str]] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    """Looked at before `LINES`."""

    def problems(self) -> list[RouteProblem]:
        """The errors, except circles of fallback models."""
        return [*self._of_lanes(), *self._of_lane_models()]

    def models(self) -> Mapping[str, str]:
        """All models that these settings name, each with the provider's name for it where there is one."""
        named = {model: model for models in self.lane_models.values() for model in models or ()}
        named |= {model: model for pair in self.fallbacks.items() for model in pair}
        named |= {model: model for models in self.tenants.values() for model in models}
        for provider in self.providers:
            named |= provider.models or {}
        return named

    def _of_lanes(self) -> Iterator[RouteProblem]:
        names = [provider.name for provider in self.providers]
        for lane, wanted in self.lanes.items():
            for name in wanted:
                if name not in names:
                    yield RouteProblem(
                        ("lanes", lane, "providers"), f"no provider {name!r}; there are {', '.join(names)}"
                    )

    def circles(self) -> Iterator[str]:
        """An error text for each model that is, by way of others, its own fallback."""
        reported: set[str] = set()
        for model in self.fallbacks:
            way = [model]
            while (following := self.fallbacks.get(way[-1])) is not None and following not in way:
                way.append(following)
            if following == model and model not in reported:
                reported.update(way)
                yield f"{' -> '.join([*way, model])} goes in a circle; take one of them out"

    def _of_lane_models(self) -> Iterator[RouteProblem]:
        for lane, allowed in self.lane_models.items():
            for model in allowed or ():
                if not self._has(lane, model):
                    yield RouteProblem(("lanes", lane, "models"), f"no provider of the lane has {model!r}")

    def _has(self, lane: str, model: str) -> bool:
        names = self.lanes.get(lane)
        return any(
            (names is None or provider.name in names) and (provider.models is None or model in provider.models)
            for provider in self.providers
        )


class Routes:
    """Finds the providers and models that may be called for a request, in order (its `Chain`)."""

    def __init__(self, spec: RoutesSpec, *, priced: Collection[str] = ()) -> None:
        self._spec = spec
        self._by_name = {provider.name: provider for provider in spec.providers}
        self._known = {*priced, *spec.fallbacks, *spec.fallbacks.values()}.union(
            *(provider.models or () for provider in spec.providers),
            *spec.tenants.values(),
            *(models or () for models in spec.lane_models.values()),
        )
        self.of = lru_cache(maxsize=CACHED)(self._of)

    def _of(self, lane: str, tenant: str, model: str, dialect: str = ANTHROPIC_MESSAGES) -> Chain:
        spec = self._spec
        if forbidden := self.forbidden_to(tenant, model):
            return Chain(forbidden=forbidden)
        allowed = spec.tenants.get(tenant)
        in_lane = spec.lane_models.get(lane)
        chain: list[Route] = []
        following: str | None = model
        while following is not None:
            if following == model or (_may(following, in_lane) and _may(following, allowed)):
                chain += self._with(lane, following, dialect)
            following = spec.fallbacks.get(following)
        if not chain and not any(dialect in self._by_name[name].dialects for name in self._names(lane)):
            return Chain(
                forbidden=f"no provider of lane {lane} speaks {dialect}; the operator can add one "
                f"(LANEKEEPER_PROVIDERS__<NAME>__KIND)"
            )
        if not chain:
            has = sorted({name for provider in spec.providers for name in provider.models or ()})
            return Chain(forbidden=f"no provider of lane {lane} has model {model[:80]!r}; there are {', '.join(has)}")
        return Chain(tuple(chain))

    def forbidden_to(self, tenant: str, model: str) -> str:
        """Why the tenant may not use the model; empty: it may."""
        allowed = self._spec.tenants.get(tenant)
        if _may(model, allowed):
            return ""
        return f"model {model[:80]!r} is not for tenant {tenant[:80]!r}; allowed: {', '.join(sorted(allowed or ()))}"

    def _names(self, lane: str) -> Iterable[str]:
        return self._spec.lanes.get(lane, self._by_name)

    def _with(self, lane: str, model: str, dialect: str) -> Iterator[Route]:
        for name in self._names(lane):
            provider = self._by_name[name]
            if dialect in provider.dialects and (provider.models is None or model in provider.models):
                called = model if provider.models is None else provider.models[model]
                yield Route(provider=name, model=model, name=called, account=self.account(name, model))

    def account(self, provider: str, model: str) -> str:
        """Against whose limits a call of this model counts."""
        return f"{provider}/{ALL if self._by_name[provider].is_pooled else self._line(model)}"

    def _line(self, model: str) -> str:
        """Whose limits the model shares: its line; or its own, if it belongs to none and is known."""
        patterns = {**self._spec.lines, **{k: v for k, v in LINES.items() if k not in self._spec.lines}}
        found = next((line for pattern, line in patterns.items() if fnmatchcase(model, pattern)), None)
        for name in (model, _DATE.sub("", model)):
            if found is None and name in self._known:
                found = name
        return found or OTHER


def _may(model: str, allowed: Collection[str] | None) -> bool:
    return allowed is None or model in allowed
