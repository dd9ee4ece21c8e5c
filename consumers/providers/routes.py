"""Which provider is called for a model, and which ones may be called after it. Pure.

The chain of a request: every provider of its lane that has the model, in order; then the same for the model's fallback,
for that one's fallback, and so on. Models that the lane or the tenant may not use are left out.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple

from consumers.chain import Chain, Route

MODEL_CLASSES = ("fable", "mythos", "opus", "sonnet", "haiku")
"""Anthropic counts by class: all Sonnets share one limit (docs/facts.md, section 10)."""
CACHED = 10_000
MADE_UP = 256
"""This many models that are in no setting get their own account. All others share one account for each provider, so
that requests with invented model names do not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderModels:
    """The models of one provider."""

    name: str
    models: Mapping[str, str] | None = None
    """The provider's own name for each of its models; None: it has all models, under Anthropic's names."""


class Problem(NamedTuple):
    """An error in one of the settings for chains."""

    place: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesSpec:
    """The settings for chains."""

    providers: tuple[ProviderModels, ...]
    """The providers in the order in which they are called."""
    lanes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Lanes with other providers, or in another order: the names of the providers."""
    lane_models: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    """Lanes that may use some models only. (The codec checks the model that a request names; this is for fallbacks.)"""
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """For a model: the model that is called when no provider can answer with it."""
    tenants: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Tenants that may use some models only."""

    def problems(self, *, known: Collection[str]) -> list[Problem]:
        """All that is wrong, except fallbacks that go in a circle. `known`: models that a lane uses or that have a
        price."""
        return [*self._of_lanes(), *self._of_models(known), *self._of_lane_models()]

    def _of_lanes(self) -> Iterator[Problem]:
        names = [each.name for each in self.providers]
        for lane, wanted in self.lanes.items():
            for name in wanted:
                if name not in names:
                    yield Problem(("lanes", lane, "providers"), f"no provider {name!r}; there are {', '.join(names)}")

    def circles(self) -> Iterator[str]:
        """What is wrong with fallbacks that go in a circle."""
        told: set[str] = set()
        for model in self.fallbacks:
            way = [model]
            while (following := self.fallbacks.get(way[-1])) is not None and following not in way:
                way.append(following)
            if following == model and model not in told:
                told.update(way)
                yield f"{' -> '.join([*way, model])} goes in a circle; take one of them out"

    def _of_models(self, known: Collection[str]) -> Iterator[Problem]:
        for each in self.providers:
            for model in each.models or ():
                if model not in known:
                    yield Problem(("providers", each.name, "models"), unknown(model, known))
        known = {*known, *(model for each in self.providers for model in each.models or ())}
        for model in dict.fromkeys([*self.fallbacks, *self.fallbacks.values()]):
            if model not in known:
                yield Problem(("models", "fallbacks"), unknown(model, known))
        for tenant, models in self.tenants.items():
            for model in models:
                if model not in known:
                    yield Problem(("models", "tenants"), f"of {tenant[:80]!r}: {unknown(model, known)}")

    def _of_lane_models(self) -> Iterator[Problem]:
        for lane, allowed in self.lane_models.items():
            for model in allowed or ():
                if not self._has(lane, model):
                    yield Problem(("lanes", lane, "models"), f"no provider of the lane has {model!r}")

    def _has(self, lane: str, model: str) -> bool:
        """Whether a provider of the lane has the model."""
        names = self.lanes.get(lane)
        return any(
            (names is None or each.name in names) and (each.models is None or model in each.models)
            for each in self.providers
        )


def unknown(model: str, known: Collection[str]) -> str:
    """The error message for an unknown model."""
    near = get_close_matches(model, known, n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? Else" if near else f"known are {', '.join(sorted(known))};"
    return f"unknown model {model!r}; {meant} give it a price in prices.models (LANEKEEPER_PRICES__MODELS)"


class Routes:
    """Makes the chains of requests."""

    def __init__(self, spec: RoutesSpec) -> None:
        self._spec = spec
        self._by_name = {each.name: each for each in spec.providers}
        self._settled = {*spec.fallbacks, *spec.fallbacks.values()}.union(
            *(each.models or () for each in spec.providers),
            *spec.tenants.values(),
            *(models or () for models in spec.lane_models.values()),
        )
        self._made_up: set[str] = set()
        self.of = lru_cache(maxsize=CACHED)(self._of)
        """The chain for a lane, a tenant and a model."""

    def _of(self, lane: str, tenant: str, model: str) -> Chain:
        spec = self._spec
        allowed = spec.tenants.get(tenant)
        if allowed is not None and model not in allowed:
            return Chain(
                forbidden=f"model {model[:80]!r} is not for tenant {tenant[:80]!r}; "
                f"allowed: {', '.join(sorted(allowed))}"
            )
        in_lane = spec.lane_models.get(lane)
        chain: list[Route] = []
        following: str | None = model
        while following is not None:
            if following == model or (_may(following, in_lane) and _may(following, allowed)):
                chain += self._with(lane, following)
            following = spec.fallbacks.get(following)
        if not chain:
            has = sorted({each for provider in spec.providers for each in provider.models or ()})
            return Chain(forbidden=f"no provider of lane {lane} has model {model[:80]!r}; there are {', '.join(has)}")
        return Chain(tuple(chain))

    def _with(self, lane: str, model: str) -> Iterator[Route]:
        for name in self._spec.lanes.get(lane, self._by_name):
            provider = self._by_name[name]
            if provider.models is None or model in provider.models:
                called = model if provider.models is None else provider.models[model]
                yield Route(provider=name, model=model, name=called, account=f"{name}/{self._class(model)}")

    def _class(self, model: str) -> str:
        found = model_class(model)
        if found != model or model in self._settled or model in self._made_up:
            return found
        if len(self._made_up) >= MADE_UP:
            return "other"
        self._made_up.add(model)
        return model


def model_class(model: str) -> str:
    """The class whose limits a model shares; a model of no such class has limits of its own."""
    return next((each for each in MODEL_CLASSES if each in model), model)


def _may(model: str, allowed: Collection[str] | None) -> bool:
    return allowed is None or model in allowed
