"""Which provider is called for a model, and which after it. Pure.

The chain of a request: every provider of its lane, in order, that has the model; then the same with the model that is
its fallback, and with that one's fallback. What the lane or the tenant may not use is left out.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from topology.contract.problems import RequestProblem

MODEL_CLASSES = ("fable", "mythos", "opus", "sonnet", "haiku")
"""Anthropic counts by class: all Sonnets share one limit (facts.md, part two, A)."""
CACHED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One provider that may be called."""

    provider: str
    model: str
    """As Anthropic calls it, and the tables of prices do."""
    name: str
    """As the provider calls it."""
    account: str
    """Whose budget it uses: the provider's for this class of models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderModels:
    """What one provider has."""

    name: str
    models: Mapping[str, str] | None = None
    """Its own name for each model that it has; None: all, under the names that they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesSpec:
    """What is settled about the chains."""

    providers: tuple[ProviderModels, ...]
    """In the order in which they are asked."""
    lanes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Lanes that ask others, or in another order: by the providers' names."""
    lane_models: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    """Lanes that may use some models only. (The codec has refused what a request names; this is for fallbacks.)"""
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """The model that answers where one cannot."""
    tenants: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Tenants that may use some models only."""

    def problems(self, *, known: Collection[str]) -> list[str]:
        """Everything that is wrong, each with its name. `known`: models that a lane uses or that have a price."""
        return [*self._of_lanes(), *self._of_fallbacks(), *self._of_models(known)]

    def _of_lanes(self) -> Iterator[str]:
        names = [each.name for each in self.providers]
        for lane, wanted in self.lanes.items():
            for name in wanted:
                if name not in names:
                    yield f"lanes.{lane}.providers: no provider {name!r}; there are {', '.join(names)}"

    def _of_fallbacks(self) -> Iterator[str]:
        told: set[str] = set()
        for model in self.fallbacks:
            way = [model]
            while (following := self.fallbacks.get(way[-1])) is not None and following not in way:
                way.append(following)
            if following == model and model not in told:
                told.update(way)
                yield f"models.fallbacks: {' -> '.join([*way, model])} goes in a circle"

    def _of_models(self, known: Collection[str]) -> Iterator[str]:
        named = [(f"providers.{each.name}.models", tuple(each.models or ())) for each in self.providers]
        named.append(("models.fallbacks", tuple(dict.fromkeys([*self.fallbacks, *self.fallbacks.values()]))))
        named += [(f"models.tenants.{tenant}", tuple(models)) for tenant, models in self.tenants.items()]
        for where, models in named:
            for model in models:
                if model not in known:
                    yield (
                        f"{where}: unknown model {model!r}; known are those with a price (prices.models) "
                        f"and those that lanes name: {', '.join(sorted(known))}"
                    )
        for lane, allowed in self.lane_models.items():
            for model in allowed or ():
                if not self._has(lane, model):
                    yield f"lanes.{lane}.models: no provider of the lane has {model!r}"

    def _has(self, lane: str, model: str) -> bool:
        names = self.lanes.get(lane)
        return any(
            (names is None or each.name in names) and (each.models is None or model in each.models)
            for each in self.providers
        )


class Routes:
    """The chains."""

    def __init__(self, spec: RoutesSpec) -> None:
        self._spec = spec
        self._by_name = {each.name: each for each in spec.providers}
        self.of = lru_cache(maxsize=CACHED)(self._of)

    def _of(self, lane: str, tenant: str, model: str) -> tuple[Route, ...]:
        """At least one, the first to be asked first. Raises RequestProblem (forbidden_model)."""
        spec = self._spec
        allowed = spec.tenants.get(tenant)
        if allowed is not None and model not in allowed:
            raise RequestProblem(
                "forbidden_model",
                f"model {model[:80]!r} is not for tenant {tenant[:80]!r}; allowed: {', '.join(sorted(allowed))}",
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
            raise RequestProblem(
                "forbidden_model", f"no provider of lane {lane} has model {model[:80]!r}; there are {', '.join(has)}"
            )
        return tuple(chain)

    def _with(self, lane: str, model: str) -> Iterator[Route]:
        for name in self._spec.lanes.get(lane, self._by_name):
            provider = self._by_name[name]
            if provider.models is None or model in provider.models:
                called = model if provider.models is None else provider.models[model]
                yield Route(provider=name, model=model, name=called, account=f"{name}/{model_class(model)}")


def model_class(model: str) -> str:
    """The class whose limits a model shares; a model of another house has limits of its own."""
    return next((each for each in MODEL_CLASSES if each in model), model)


def _may(model: str, allowed: Collection[str] | None) -> bool:
    return allowed is None or model in allowed
