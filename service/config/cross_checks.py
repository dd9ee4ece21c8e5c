"""Whether providers, models, lanes, prices and caps go together. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from consumers.limits.spec import Caps
from consumers.prices import Prices
from consumers.providers.routes import RoutesSpec, unknown
from service.config.budget_sections import FIRST
from service.config.sources import ANY
from service.config.validation import Disagreement
from service.config.value_types import is_provider_name
from topology.lanes import LaneSpec

_SPOKEN_OF = (("prices", "models"), ("providers", ANY, "models"), ("lanes", ANY, "model"), ("lanes", ANY, "models"))
"""Where models are. Which are unknown follows from all of it."""


def names(providers: Collection[str]) -> Iterator[Disagreement]:
    """Of providers, as their author chose them."""
    for name in providers:
        at = (("providers", name),)
        if name == FIRST:
            yield Disagreement(
                f"the name {FIRST} is taken: by ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL; choose another", at=at
            )
        elif not is_provider_name(name):
            yield Disagreement(f"{name[:80]!r} is no name: a to z, 0 to 9, _ and -, up to 40, a letter first", at=at)


def models(*, lanes: Sequence[LaneSpec], routes: RoutesSpec, prices: Prices, in_money: bool) -> Iterator[Disagreement]:
    """A model is known that has a price, or that both a lane and a provider's table speak of. `in_money`: dollars are
    capped."""
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


def limits(*, lanes: Sequence[LaneSpec], caps: Mapping[str, Caps]) -> Iterator[Disagreement]:
    """Every lane's request must fit into a minute of every provider that has a limit set. `caps`: by provider."""
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
