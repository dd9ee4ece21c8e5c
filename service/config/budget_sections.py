"""The sections of what is bought: providers, their budget, models, prices, caps."""

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from consumers.limits.headers import LEAST
from consumers.limits.order import FIRST_TO_AGE
from consumers.limits.spec import DEFAULT_LANES as LANE_BUDGETS
from consumers.limits.spec import BudgetSpec, Caps, LaneBudget
from consumers.prices import AS_OF, Prices
from consumers.spending import Cap, CapsSpec
from service.config.sections import Disagreement, Section
from service.config.table_types import CapTable, Day, ModelLists, ModelNames, PriceTable, ShareTable
from service.config.value_types import HttpUrl, Key, Number, PlaceName
from topology.lanes import BATCH, CRITICAL, DEFAULT_LANES, NORMAL

LEAST_TOKENS_PER_MIN = LEAST[1]
"""Lower than any provider's limit is believed to be: one request could use more."""
FIRST = "anthropic"
"""The provider of ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL."""
_NEEDS = {
    "anthropic": ("api_key", "base_url"),
    "bedrock": ("region",),
    "vertex": ("region", "project"),
    "foundry": ("api_key", "base_url"),
}


class LimitsSettings(Section):
    """What may be used of each of a provider's accounts at most, whatever it allows."""

    requests_per_min: Number[float] | None = Field(default=None, ge=1)
    """Requests a minute, at most. None: what the provider allows. Example: 300"""
    input_tokens_per_min: Number[float] | None = Field(default=None, ge=LEAST_TOKENS_PER_MIN)
    """Input tokens a minute, at most. Example: 200000"""
    output_tokens_per_min: Number[float] | None = Field(default=None, ge=LEAST_TOKENS_PER_MIN)
    """Output tokens a minute, at most. Example: 40000"""
    concurrency: Number[int] | None = Field(default=None, ge=1)
    """Calls at the same time, at most. Example: 50"""

    def limits(self) -> Caps:
        return Caps(
            requests=self.requests_per_min,
            input_tokens=self.input_tokens_per_min,
            output_tokens=self.output_tokens_per_min,
            concurrency=self.concurrency,
        )


class ProviderSettings(LimitsSettings):
    """A provider beside the first, under a name that its author chooses. Credentials of Amazon and Google that are not
    given here are found as their own libraries find them."""

    kind: Literal["anthropic", "bedrock", "vertex", "foundry"] = "anthropic"
    """`anthropic`: anything that answers like Anthropic's API at `base_url`. Example: bedrock"""
    api_key: Key | None = None
    """Its key; of Amazon and Google, none: their own libraries find theirs. Example: sk-secret"""
    base_url: HttpUrl | None = None
    """Where it is; for the kinds `anthropic` and `foundry`. Example: https://other.example.com/v1"""
    region: PlaceName | None = None
    """For the kinds `bedrock` and `vertex`. Example: eu-central-1"""
    project: PlaceName | None = None
    """For the kind `vertex`. Example: my-project"""
    models: ModelNames | None = None
    """Its own name for each model that it has; none: all, under Anthropic's names. Example:
    claude-sonnet-5-5=anthropic.claude-sonnet-5-5"""

    def disagreements(self) -> Iterator[Disagreement]:
        needs, kind = _NEEDS[self.kind], (("kind",),)
        for name in needs:
            if name != "api_key" and getattr(self, name) is None:
                yield Disagreement(f"not set; a provider of kind {self.kind} needs it", at=((name,),), by=kind)
        for name in ("region", "project"):
            if name not in needs and getattr(self, name) is not None:
                yield Disagreement(f"a provider of kind {self.kind} has none; remove it", at=((name,),), by=kind)

        if self.models is not None and not self.models:
            yield Disagreement("names no model; where it has all of them, leave it out", at=(("models",),))

    def lacks(self) -> Iterator[Disagreement]:
        """What only a caller needs: applications may have the same file, and not the key."""
        if "api_key" in _NEEDS[self.kind] and self.api_key is None:
            yield Disagreement(f"not set; a provider of kind {self.kind} needs it", at=(("api_key",),), by=(("kind",),))


class ModelsSettings(Section):
    """Which model answers where one cannot, and which tenants may use some only."""

    fallbacks: ModelNames = Field(default_factory=dict)
    """Which model answers where one cannot. Example: claude-sonnet-5-5=claude-haiku-5-5"""
    tenants: ModelLists = Field(default_factory=dict)
    """Tenants that may use these models alone. Example: {"crm": ["claude-haiku-5-5"]}"""


class PricesSettings(Section):
    """What tokens cost, as of a day. `models` adds to the table of `consumers/prices.py`, or changes it."""

    as_of: Day = AS_OF
    """The day from which the prices are known; told where dollars are. Example: 2026-11-01"""
    models: PriceTable = Field(default_factory=dict)
    """US dollars per million tokens: adds to the built-in table, or changes it. Example: {"my-model": {"input":
    1, "output": 5}}"""

    def table(self) -> Prices:
        return Prices(self.models, as_of=self.as_of)


class CapSettings(Section):
    """What may be used in a day (UTC)."""

    requests: Number[float] | None = Field(default=None, gt=0)
    """Requests a day (UTC). Example: 10000"""
    tokens: Number[float] | None = Field(default=None, gt=0)
    """Input and output tokens a day. Example: 5000000"""
    usd: Number[float] | None = Field(default=None, gt=0)
    """US dollars a day. Example: 25"""


class LaneBudgetSettings(Section):
    """What a lane may count on; argued in `consumers/limits/spec.py`."""

    share: Number[float] = Field(gt=0, le=1)
    """The part of each budget that is saved for this lane alone, to be spent at any time; what is more goes by rank."""
    boost_s: Number[float] | None = Field(default=None, gt=0)
    """A request that has waited longer goes before younger ones of the lane above, never before the top lane: for batch
    alone. None: never. Example: 20"""

    @classmethod
    def of(cls, lane: str) -> "LaneBudgetSettings":
        return cls(share=LANE_BUDGETS[lane].share, boost_s=LANE_BUDGETS[lane].boost_s)

    def spec(self) -> LaneBudget:
        return LaneBudget(share=self.share, boost_s=self.boost_s)


class LaneBudgetsSettings(Section):
    """Of each lane."""

    critical: LaneBudgetSettings = LaneBudgetSettings.of(CRITICAL.name)
    normal: LaneBudgetSettings = LaneBudgetSettings.of(NORMAL.name)
    batch: LaneBudgetSettings = LaneBudgetSettings.of(BATCH.name)

    def specs(self) -> dict[str, LaneBudget]:
        """By the lane's name, the most urgent first."""
        return {lane.name: getattr(self, lane.name).spec() for lane in DEFAULT_LANES}

    def disagreements(self) -> Iterator[Disagreement]:
        top, *_ = DEFAULT_LANES
        for lane in DEFAULT_LANES[:FIRST_TO_AGE]:
            if getattr(self, lane.name).boost_s is not None:
                yield Disagreement(
                    f"has no effect: waiting never lifts a request into lane {top.name}; remove it",
                    at=((lane.name, "boost_s"),),
                )
        shares = {lane.name: getattr(self, lane.name).share for lane in DEFAULT_LANES}
        if (total := sum(shares.values())) > 1 + 1e-9:
            each = ", ".join(f"{lane} {share * 100:g} %" for lane, share in shares.items())
            yield Disagreement(
                f"the shares are {total * 100:g} % together ({each}), allowed are 100 %",
                at=tuple((lane, "share") for lane in shares),
            )


class BudgetSettings(LimitsSettings):
    """How the providers' budgets are spent. The four limits are of the first provider's accounts; the others have their
    own. What the provider tells in its headers is kept to in any case."""

    lanes: LaneBudgetsSettings = LaneBudgetsSettings()
    burst_s: Number[float] = Field(default=BudgetSpec().burst_s, gt=0, le=60)
    """Seconds' worth of budget that may be saved up for a burst."""
    overflow_s: Number[float] | None = Field(default=None, gt=0, le=3600)
    """A wait longer than this goes to the next provider, if that one's is shorter. None: the lane's
    `target_wait_s`. Example: 5"""

    def spec(self, others: Mapping[str, ProviderSettings]) -> BudgetSpec:
        """Of all accounts: the first provider's, and those of the others."""
        return BudgetSpec(
            lanes=self.lanes.specs(),
            burst_s=self.burst_s,
            overflow_s=self.overflow_s,
            accounts={FIRST: self.limits(), **{name: other.limits() for name, other in others.items()}},
        )


class LaneCapsSettings(Section):
    """Of each lane."""

    critical: CapSettings = CapSettings()
    normal: CapSettings = CapSettings()
    batch: CapSettings = CapSettings()


class FairSettings(Section):
    """How tenants share the slots of a lane (docs/fairness.md)."""

    tenants: ShareTable = Field(default_factory=dict)
    """`weight`: a tenant's share beside the others'; 1 where nothing is said. `in_flight`: its requests of one lane
    that a process works on at a time, at most; further ones wait without a slot. `*`: each tenant that is not named.
    Example: {"*": {"in_flight": 8}, "crm": {"weight": 2}}"""


class CapsSettings(Section):
    """Whose day is capped."""

    lanes: LaneCapsSettings = LaneCapsSettings()
    tenants: CapTable = Field(default_factory=dict)
    """What each tenant may use in a day (UTC); `*`: each that is not named. Example: {"*": {"usd": 5}, "crm":
    {"requests": 10000}}"""

    def spec(self) -> CapsSpec:
        return CapsSpec(
            lanes={name: Cap(**cap) for name, cap in self.lanes.model_dump().items()},
            tenants=self.tenants,
        )
