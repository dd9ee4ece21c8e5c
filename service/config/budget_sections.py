"""Settings of providers: their limits (budgets) and how the lanes share them, models, prices, and daily caps on use."""

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from consumers.limits.headers import LEAST
from consumers.limits.spec import DEFAULT_SHARES, AccountCaps, BudgetSpec
from consumers.prices import AS_OF, Prices
from consumers.spending import Cap, CapsSpec
from service.config.sections import Disagreement, Section
from service.config.table_types import CapTable, Day, ModelLists, ModelNames, PriceTable, ShareTable
from service.config.value_types import HttpUrl, Key, Number, PlaceName
from topology.lanes import BATCH, CRITICAL, NORMAL

LEAST_TOKENS_PER_MIN = LEAST[1]
"""The lowest limit of tokens a minute that an operator may set, because a single request could need more tokens than a
lower limit allows."""
FIRST = "anthropic"
"""The name of the provider that ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL configure."""
_NEEDS = {
    "anthropic": ("api_key", "base_url"),
    "bedrock": ("region",),
    "vertex": ("region", "project"),
    "foundry": ("api_key", "base_url"),
}
"""For each kind of provider (anthropic, bedrock, …): the settings that it requires."""


class LimitsSettings(Section):
    """Limits on the use of a provider, for each class of models (such as Claude Haiku) by itself, because a provider's
    own limits apply to each class by itself too. The limits set here hold even if the provider allows more."""

    requests_per_min: Number[float] | None = Field(default=None, ge=1)
    """The maximum number of requests a minute to the provider, for each class of models (such as Haiku) by itself.
    None: only the provider's own limit applies. Example: 300"""
    input_tokens_per_min: Number[float] | None = Field(default=None, ge=LEAST_TOKENS_PER_MIN)
    """The maximum number of input tokens a minute to the provider, for each class of models (such as Haiku) by itself.
    None: only the provider's own limit applies. Example: 200000"""
    output_tokens_per_min: Number[float] | None = Field(default=None, ge=LEAST_TOKENS_PER_MIN)
    """The maximum number of output tokens a minute from the provider, for each class of models (such as Haiku) by
    itself. None: only the provider's own limit applies. Example: 40000"""
    concurrency: Number[int] | None = Field(default=None, ge=1)
    """The maximum number of calls to the provider at the same time, for each class of models (such as Haiku) by itself.
    None: no limit. Example: 50"""

    def limits(self) -> AccountCaps:
        return AccountCaps(
            requests=self.requests_per_min,
            input_tokens=self.input_tokens_per_min,
            output_tokens=self.output_tokens_per_min,
            concurrency=self.concurrency,
        )


class ProviderSettings(LimitsSettings):
    """A provider in addition to the first one; the user chooses its name. For Bedrock and Vertex, credentials that are
    not given here are found by Amazon's and Google's own libraries."""

    kind: Literal["anthropic", "bedrock", "vertex", "foundry"] = "anthropic"
    """The kind of API. `anthropic`: any server at `base_url` that behaves like Anthropic's API. Example: bedrock"""
    api_key: Key | None = None
    """The provider's key. The kinds `bedrock` and `vertex` need none, because Amazon's and Google's own libraries find
    the credentials. Example: sk-secret"""
    base_url: HttpUrl | None = None
    """The URL of the provider's API, for the kinds `anthropic` and `foundry`. Example: https://other.example.com/v1"""
    region: PlaceName | None = None
    """The cloud region, for the kinds `bedrock` and `vertex`. Example: eu-central-1"""
    project: PlaceName | None = None
    """The Google Cloud project, for the kind `vertex`. Example: my-project"""
    models: ModelNames | None = None
    """The provider's name for each model that it offers. None: it offers all models under Anthropic's names. Example:
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

    def missing_for_calls(self) -> Iterator[Disagreement]:
        """Find missing settings that only a process which calls providers needs. In other processes they may be
        missing, because an application may use the same settings file without the provider's key."""
        if "api_key" in _NEEDS[self.kind] and self.api_key is None:
            yield Disagreement(f"not set; a provider of kind {self.kind} needs it", at=(("api_key",),), by=(("kind",),))


class ModelsSettings(Section):
    """Fallback models, and the models that a tenant may use."""

    fallbacks: ModelNames = Field(default_factory=dict)
    """For a model: the model that is called in its place when no provider can answer with it. Example:
    claude-sonnet-5-5=claude-haiku-5-5"""
    tenants: ModelLists = Field(default_factory=dict)
    """For a tenant, the only models that it may use. Tenants not listed may use all. Example: {"crm":
    ["claude-haiku-5-5"]}"""


class PricesSettings(Section):
    """The prices of tokens, and the day on which they were valid. The prices in `models` are added to the table in
    `consumers/prices.py`, or replace prices in it."""

    as_of: Day = AS_OF
    """The day on which the prices were valid. It is shown beside amounts in dollars. Example: 2026-11-01"""
    models: PriceTable = Field(default_factory=dict)
    """Prices in US dollars per million tokens. They are added to the built-in table; for a model that is also in that
    table, the price set here is used. Example: {"my-model": {"input": 1, "output": 5}}"""

    def table(self) -> Prices:
        return Prices(self.models, as_of=self.as_of)


class CapSettings(Section):
    """Limits for what a lane may use in one day (UTC)."""

    requests: Number[float] | None = Field(default=None, gt=0)
    """The maximum number of requests of this lane in a day (UTC). Example: 10000"""
    tokens: Number[float] | None = Field(default=None, gt=0)
    """The maximum number of input and output tokens together that this lane may use in a day (UTC). Example: 5000000"""
    usd: Number[float] | None = Field(default=None, gt=0)
    """The most US dollars that this lane may spend in a day (UTC). Example: 25"""


class LaneBudgetSettings(Section):
    """One lane's share of the providers' budgets, that is, of what the providers' limits allow in a minute."""

    share: Number[float] = Field(gt=0, le=1)
    """The share of each provider's budget (what its limits allow in a minute) that is reserved for this lane. What is
    reserved for no lane goes to the most urgent request that waits."""


class LaneBudgetsSettings(Section):
    """For each lane, the share of the providers' budgets (what their limits allow in a minute) that is reserved for
    it."""

    critical: LaneBudgetSettings = LaneBudgetSettings(share=DEFAULT_SHARES[CRITICAL.name])
    normal: LaneBudgetSettings = LaneBudgetSettings(share=DEFAULT_SHARES[NORMAL.name])
    batch: LaneBudgetSettings = LaneBudgetSettings(share=DEFAULT_SHARES[BATCH.name])

    def shares(self) -> dict[str, float]:
        """The lanes' shares by name, the most urgent lane first."""
        return {lane: budget["share"] for lane, budget in self.model_dump().items()}

    def disagreements(self) -> Iterator[Disagreement]:
        shares = self.shares()
        if (total := sum(shares.values())) > 1 + 1e-9:
            listed = ", ".join(f"{lane} {share * 100:g} %" for lane, share in shares.items())
            yield Disagreement(
                f"the shares are {total * 100:g} % together ({listed}), allowed are 100 %",
                at=tuple((lane, "share") for lane in shares),
            )


class BudgetSettings(LimitsSettings):
    """How the lanes share the providers' budgets, that is, the requests and tokens that the limits allow in a minute.
    The four limits here apply to the first provider; other providers have their own settings. Limits that a provider
    sends in its headers always hold as well."""

    lanes: LaneBudgetsSettings = LaneBudgetsSettings()
    burst_s: Number[float] = Field(default=BudgetSpec().burst_s, gt=0, le=60)
    """Requests and tokens that a provider's limits allow, but that are not used, accumulate for at most this many
    seconds, and can then be used at once."""
    overflow_s: Number[float] | None = Field(default=None, gt=0, le=3600)
    """A request that would wait longer than this until a provider's limits allow its call goes to the next provider, if
    the wait there is shorter. None: the lane's `target_wait_s`. Example: 5"""

    def spec(self, others: Mapping[str, ProviderSettings]) -> BudgetSpec:
        """Convert these settings to the `BudgetSpec` that workers use: the lanes' shares, and the limits of all
        providers' accounts."""
        return BudgetSpec(
            shares=self.lanes.shares(),
            burst_s=self.burst_s,
            overflow_s=self.overflow_s,
            accounts={FIRST: self.limits(), **{name: other.limits() for name, other in others.items()}},
        )


class LaneCapsSettings(Section):
    """For each lane, the limits for what it may use in one day (UTC)."""

    critical: CapSettings = CapSettings()
    normal: CapSettings = CapSettings()
    batch: CapSettings = CapSettings()


class FairSettings(Section):
    """How tenants share the slots of a lane, each of which works on one request at a time (docs/fairness.md)."""

    tenants: ShareTable = Field(default_factory=dict)
    """`weight`: a tenant's share relative to the others, 1 by default. `in_flight`: how many of the tenant's requests a
    process works on at a time in one lane; further requests of the tenant wait. `*`: each tenant that is not listed.
    Example: {"*": {"in_flight": 8}, "crm": {"weight": 2}}"""


class CapsSettings(Section):
    """Limits for what lanes and tenants may use in one day (UTC)."""

    lanes: LaneCapsSettings = LaneCapsSettings()
    tenants: CapTable = Field(default_factory=dict)
    """What each tenant may use in a day (UTC). `*`: each tenant that is not listed. Example: {"*": {"usd": 5}, "crm":
    {"requests": 10000}}"""

    def spec(self) -> CapsSpec:
        return CapsSpec(lanes={name: Cap(**cap) for name, cap in self.lanes.model_dump().items()}, tenants=self.tenants)
