"""Finds settings that are each valid by themselves, but contradict each other. The checks do no I/O."""

from collections.abc import Collection, Iterator

from pydantic import BaseModel

from consumers.providers.routes import unknown
from service.config.budget_sections import FIRST
from service.config.names import ANY, Place
from service.config.sections import Disagreement, Section
from service.config.settings import Settings
from service.config.value_types import is_provider_name

_NAMING_MODELS = (("prices", "models"), ("providers", ANY, "models"), ("lanes", ANY, "model"), ("lanes", ANY, "models"))
"""The settings that name models. Whether a model is known depends on all of them together."""


def every(settings: Settings) -> Iterator[Disagreement]:
    """All contradictions between settings that are each valid by themselves."""
    for place, section in _sections(settings):
        yield from (disagreement.under(place) for disagreement in section.disagreements())
    yield from _speakers(settings)
    yield from _names(settings.providers)
    yield from _models(settings)
    yield from _limits(settings)


def missing_for_calls(settings: Settings) -> Iterator[Disagreement]:
    """Find missing keys of providers, which only processes that call providers need."""
    if any(provider.name == FIRST for provider in settings.routes_spec().providers) and settings.api_key is None:
        yield Disagreement(
            "not set; set it, or answer without a provider: lanekeeper serve --simulate", at=(("anthropic_api_key",),)
        )
    for name, provider in settings.providers.items():
        yield from (disagreement.under(("providers", name)) for disagreement in provider.missing_for_calls())


def _sections(node: BaseModel, place: Place = ()) -> Iterator[tuple[Place, Section]]:
    """All sections (groups) of the settings, each with its path, such as ("lanes", "batch")."""
    if isinstance(node, Section):
        yield place, node
    for name, value in node:
        if isinstance(value, Section):
            yield from _sections(value, (*place, name))
    if isinstance(node, Settings):
        for name, provider in node.providers.items():
            yield from _sections(provider, ("providers", name))


def _speakers(settings: Settings) -> Iterator[Disagreement]:
    """Find gateway keys of other tenants than the gateway's AMQP user, if the setting `speakers` does not allow this
    user to publish requests for others."""
    user = settings.credentials[0]
    acts_for_others = any(key.tenant not in (None, user) for key in settings.gateway.keys.values())
    if acts_for_others and user not in settings.speakers:
        yield Disagreement(
            f"has keys of other tenants than the broker's user {user!r}, who is not in LANEKEEPER_SPEAKERS: "
            "add it there, for the workers too",
            at=(("gateway", "keys"),),
            by=(("speakers",), ("amqp_url",)),
        )


def _names(providers: Collection[str]) -> Iterator[Disagreement]:
    """Find providers whose names are not allowed."""
    for name in providers:
        at = (("providers", name),)
        if name == FIRST:
            yield Disagreement(
                f"the name {FIRST} is taken: by ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL; choose another", at=at
            )
        elif not is_provider_name(name):
            yield Disagreement(f"{name[:80]!r} is no name: a to z, 0 to 9, _ and -, up to 40, a letter first", at=at)


def _models(settings: Settings) -> Iterator[Disagreement]:
    """Find models in the settings that are unknown, or that have no price although a daily cap is in dollars. A model
    is known if it has a price, or if both a lane and a provider's table name it."""
    lanes, routes, prices = settings.lane_specs(), settings.routes_spec(), settings.prices.table()
    in_lanes = {model for lane in lanes for model in (lane.model, *(lane.models or ()))}
    in_tables = {model for provider in routes.providers for model in provider.models or ()}
    others = {model for models in (*routes.fallbacks.items(), *routes.tenants.values()) for model in models}
    priced = prices.models | {model for model in in_lanes | in_tables | others if prices.of(model) is not None}
    for lane in lanes:
        for model in sorted({lane.model, *(lane.models or ())}):
            at = (("lanes", lane.name, "model" if model == lane.model else "models"),)
            if model not in priced | in_tables:
                yield Disagreement(unknown(model, priced | in_tables), at=at, by=_NAMING_MODELS)
            elif settings.caps.spec().in_money and model not in priced:
                text = f"{model!r} has no price, and what is spent is capped in dollars; give it one in prices.models"
                yield Disagreement(f"{text} (LANEKEEPER_PRICES__MODELS)", at=at, by=(*_NAMING_MODELS, ("caps",)))
    for circle in routes.circles():
        yield Disagreement(circle, at=(("models", "fallbacks"),))
    for problem in routes.problems(known=priced | in_lanes):
        yield Disagreement(problem.text, at=(problem.place,), by=_NAMING_MODELS)


def _limits(settings: Settings) -> Iterator[Disagreement]:
    """Find limits on output tokens a minute that are too low for one answer of the lane with the highest
    `max_tokens`."""
    longest = max(settings.lane_specs(), key=lambda lane: lane.max_tokens)
    for provider, cap in settings.budget_spec().accounts.items():
        if cap.output_tokens is not None and cap.output_tokens < longest.max_tokens:
            section = ("budget",) if provider == FIRST else ("providers", provider)
            yield Disagreement(
                f"{cap.output_tokens:g} is less than one answer of lane {longest.name} may have "
                f"({longest.max_tokens} tokens); allow more, or lower the lane's MAX_TOKENS",
                at=((*section, "output_tokens_per_min"),),
                by=(("lanes", longest.name, "max_tokens"),),
            )
