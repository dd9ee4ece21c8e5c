"""Contradictions between settings that are right each by itself."""

from collections.abc import Iterator
from itertools import pairwise

from service.config.flows import THE_MODEL, wrong_names, wrong_references
from service.config.settings import FIRST, Settings
from service.config.value_types import Disagreement
from topology.lanes import DEFAULT_LANES, MOST_LANES, NAME, RESERVED


def contradictions(settings: Settings) -> Iterator[Disagreement]:
    """Find those between groups; each group checks its own."""
    yield from _lanes(settings)
    yield from _speakers(settings)
    yield from wrong_names("providers", settings.providers, taken={FIRST: "ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL"})
    yield from wrong_names("handlers", settings.handlers, taken={THE_MODEL: "the model"})
    yield from wrong_names("pipelines", settings.pipelines)
    yield from wrong_names("schedules", settings.schedules)
    lanes = {lane.name: lane for lane in settings.lane_specs()}
    yield from wrong_references(settings.pipelines, handlers=settings.handlers, lanes=lanes)
    for name, schedule in settings.schedules.items():
        yield from schedule.wrong(
            name,
            lanes,
            handlers=settings.handlers,
            pipelines=settings.pipelines,
            webhooks=settings.webhooks.spec(),
            tenant=settings.credentials[0] if settings.needs_user_id else "",
        )
    yield from _models(settings)
    yield from _output_limits(settings)


def missing_for_calls(settings: Settings) -> Iterator[Disagreement]:
    """Find missing settings that only a process which calls providers needs."""
    if any(provider.name == FIRST for provider in settings.routes_spec().providers) and settings.api_key is None:
        yield Disagreement(
            "not set; set it, or answer without a provider: lanekeeper serve --simulate", at=(("anthropic_api_key",),)
        )
    for name, provider in settings.providers.items():
        yield from (disagreement.under(("providers", name)) for disagreement in provider.missing_for_calls())


def _lanes(settings: Settings) -> Iterator[Disagreement]:
    lanes = settings.lane_specs()
    at = {lane.name: ("lanes", lane.name) for lane in lanes}
    if not lanes or len(lanes) > MOST_LANES:
        yield Disagreement(f"{len(lanes)} lanes are enabled, allowed are 1 to {MOST_LANES}", at=(("lanes",),))
    for lane, after in pairwise(lanes):
        if lane.rank == after.rank:
            yield Disagreement(
                f"the lanes {lane.name} and {after.name} have one rank, {lane.rank}; give each its own",
                at=tuple((*at[each.name], "rank") for each in (lane, after)),
            )
    for name in settings.lanes.keys() - {lane.name for lane in DEFAULT_LANES}:
        if NAME.fullmatch(name) is None or name in RESERVED:
            yield Disagreement(
                f"{name[:80]!r} is no name for a lane: a to z, 0 to 9 and -, up to 32, a letter first, and none of "
                f"{', '.join(sorted(RESERVED))}",
                at=(("lanes", name),),
            )
    there = f"there are {', '.join(at)}"
    for group, table in (("budget", settings.budget.lanes), ("caps", settings.caps.lanes)):
        for name in table.keys() - settings.lanes.keys():
            yield Disagreement(f"no lane {name[:80]!r}; {there}", at=((group, "lanes", name),))
    for key in settings.gateway.keys.values():
        for name in key.lanes or ():
            if name not in at:
                text = f"the key of {key.tenant} names the lane {name[:80]!r}; {there}"
                yield Disagreement(text, at=(("gateway", "keys"),))
        for name in key.pipelines:
            if name not in settings.pipelines:
                text = f"the key of {key.tenant} names the pipeline {name[:80]!r}, which is not declared"
                yield Disagreement(text, at=(("gateway", "keys"),))
    shares = settings.budget_spec().shares
    if (total := sum(shares.values())) > 1 + 1e-9:
        listed = ", ".join(f"{lane} {share * 100:.4g} %" for lane, share in shares.items())
        yield Disagreement(
            f"the shares are {total * 100:.4g} % together ({listed}), allowed are 100 %",
            at=tuple(("budget", "lanes", lane, "share") for lane in shares),
        )


def _speakers(settings: Settings) -> Iterator[Disagreement]:
    user = settings.credentials[0]
    acts_for_others = any(key.tenant not in (None, user) for key in settings.gateway.keys.values())
    if acts_for_others and user not in settings.speakers:
        yield Disagreement(
            f"has keys of other tenants than the broker's user {user!r}, who is not in LANEKEEPER_SPEAKERS: "
            "add it there, for the workers too",
            at=(("gateway", "keys"),),
        )


def _models(settings: Settings) -> Iterator[Disagreement]:
    routes, prices, in_money = settings.routes_spec(), settings.prices.table(), settings.caps.spec().in_money
    for lane in settings.lane_specs() if in_money else ():
        for model in sorted({lane.model, *(lane.models or ())}):
            if not prices.has(model):
                text = f"{model!r} has no price, and what is spent is capped in dollars; give it one in prices.models"
                at = (("lanes", lane.name, "model" if model == lane.model else "models"),)
                yield Disagreement(f"{text} (LANEKEEPER_PRICES__MODELS)", at=at)
    for circle in routes.circles():
        yield Disagreement(circle, at=(("models", "fallbacks"),))
    for problem in routes.problems():
        yield Disagreement(problem.text, at=(problem.place,))


def _output_limits(settings: Settings) -> Iterator[Disagreement]:
    lanes = settings.lane_specs()
    if not lanes:
        return
    longest = max(lanes, key=lambda lane: lane.max_tokens)
    for provider, cap in settings.budget_spec().accounts.items():
        if cap.output_tokens is not None and cap.output_tokens < longest.max_tokens:
            section = ("budget",) if provider == FIRST else ("providers", provider)
            yield Disagreement(
                f"{cap.output_tokens:g} is less than one answer of lane {longest.name} may have "
                f"({longest.max_tokens} tokens); allow more, or lower the lane's MAX_TOKENS",
                at=((*section, "output_tokens_per_min"),),
            )
