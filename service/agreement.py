"""Whether models, lanes, providers, prices and caps go together. Pure."""

from collections.abc import Iterator, Sequence

from consumers.prices import Prices
from consumers.providers.routes import RoutesSpec, unknown
from service.sources import ANY
from service.validation import Disagreement
from topology.lanes import LaneSpec

_SPOKEN_OF = (("prices", "models"), ("providers", ANY, "models"), ("lanes", ANY, "model"), ("lanes", ANY, "models"))
"""Where models are. Which are unknown follows from all of it."""


def disagreements(
    *, lanes: Sequence[LaneSpec], routes: RoutesSpec, prices: Prices, in_money: bool
) -> Iterator[Disagreement]:
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
