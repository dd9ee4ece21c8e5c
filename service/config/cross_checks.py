"""Checks of several settings together: each is valid by itself, but they may contradict each other. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from pydantic import BaseModel

from consumers.limits.spec import AccountCaps
from consumers.prices import Prices
from consumers.providers.routes import RoutesSpec, unknown
from service.config.budget_sections import FIRST
from service.config.names import ANY, Place
from service.config.sections import Disagreement, Section
from service.config.settings import Settings
from service.config.value_types import is_provider_name
from topology.lanes import LaneSpec

_SPOKEN_OF = (("prices", "models"), ("providers", ANY, "models"), ("lanes", ANY, "model"), ("lanes", ANY, "models"))
"""Settings that name models. Whether a model is known depends on all of them."""


def every(settings: Settings) -> Iterator[Disagreement]:
    """All contradictions between settings."""
    for place, section in _sections(settings):
        yield from (each.under(place) for each in section.disagreements())
    yield from _speakers(settings)
    yield from _names(settings.providers)
    yield from _models(
        lanes=settings.lane_specs(),
        routes=settings.routes_spec(),
        prices=settings.prices.table(),
        in_money=settings.caps.spec().in_money,
    )
    yield from _limits(lanes=settings.lane_specs(), caps=settings.budget_spec().accounts)


def lacks(settings: Settings) -> Iterator[Disagreement]:
    """Settings that only processes which call providers need."""
    if any(each.name == FIRST for each in settings.routes_spec().providers) and settings.api_key is None:
        yield Disagreement(
            "not set; set it, or answer without a provider: lanekeeper serve --simulate",
            at=(("anthropic_api_key",),),
        )
    for name, provider in settings.providers.items():
        yield from (each.under(("providers", name)) for each in provider.lacks())


def _sections(node: BaseModel, place: Place = ()) -> Iterator[tuple[Place, Section]]:
    """All sections, each with its place."""
    if isinstance(node, Section):
        yield place, node
    for name, value in node:
        if isinstance(value, Section):
            yield from _sections(value, (*place, name))
    if isinstance(node, Settings):
        for name, provider in node.providers.items():
            yield from _sections(provider, ("providers", name))


def _speakers(settings: Settings) -> Iterator[Disagreement]:
    """Keys for tenants that the gateway's user may not speak for."""
    user = settings.credentials[0]
    speaks = any(key.tenant not in (None, user) for key in settings.gateway.keys.values())
    if speaks and user not in settings.speakers:
        yield Disagreement(
            f"has keys of other tenants than the broker's user {user!r}, who is not in LANEKEEPER_SPEAKERS: "
            "add it there, for the workers too",
            at=(("gateway", "keys"),),
            by=(("speakers",), ("amqp_url",)),
        )


def _names(providers: Collection[str]) -> Iterator[Disagreement]:
    """Wrong names of providers."""
    for name in providers:
        at = (("providers", name),)
        if name == FIRST:
            yield Disagreement(
                f"the name {FIRST} is taken: by ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL; choose another", at=at
            )
        elif not is_provider_name(name):
            yield Disagreement(f"{name[:80]!r} is no name: a to z, 0 to 9, _ and -, up to 40, a letter first", at=at)


def _models(*, lanes: Sequence[LaneSpec], routes: RoutesSpec, prices: Prices, in_money: bool) -> Iterator[Disagreement]:
    """Models that are unknown, or lack a price. A model is known if it has a price, or if both a lane and a provider's
    table name it. `in_money`: a cap in dollars is set."""
    in_lanes = {model for lane in lanes for model in (lane.model, *(lane.models or ()))}
    in_tables = {model for each in routes.providers for model in each.models or ()}
    others = {model for models in (*routes.fallbacks.items(), *routes.tenants.values()) for model in models}
    priced = prices.models | {model for model in in_lanes | in_tables | others if prices.of(model) is not None}
    for lane in lanes:
        for model in sorted({lane.model, *(lane.models or ())}):
            at = (("lanes", lane.name, "model" if model == lane.model else "models"),)
            if model not in priced | in_tables:
                yield Disagreement(unknown(model, priced | in_tables), at=at, by=_SPOKEN_OF)
            elif in_money and model not in priced:
                text = f"{model!r} has no price, and what is spent is capped in dollars; give it one in prices.models"
                yield Disagreement(f"{text} (LANEKEEPER_PRICES__MODELS)", at=at, by=(*_SPOKEN_OF, ("caps",)))
    for circle in routes.circles():
        yield Disagreement(circle, at=(("models", "fallbacks"),))
    for problem in routes.problems(known=priced | in_lanes):
        yield Disagreement(problem.text, at=(problem.place,), by=_SPOKEN_OF)


def _limits(*, lanes: Sequence[LaneSpec], caps: Mapping[str, AccountCaps]) -> Iterator[Disagreement]:
    """Limits that are too low: one answer of every lane must fit into a provider's limit for a minute. `caps`: by
    provider."""
    longest = max(lanes, key=lambda lane: lane.max_tokens)
    for provider, cap in caps.items():
        if cap.output_tokens is not None and cap.output_tokens < longest.max_tokens:
            section = ("budget",) if provider == FIRST else ("providers", provider)
            yield Disagreement(
                f"{cap.output_tokens:g} is less than one answer of lane {longest.name} may have "
                f"({longest.max_tokens} tokens); allow more, or lower the lane's MAX_TOKENS",
                at=((*section, "output_tokens_per_min"),),
                by=(("lanes", longest.name, "max_tokens"),),
            )
