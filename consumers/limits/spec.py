"""The settings of the budget of provider calls: each lane's share, the operator's limits, and the values that are
assumed before a provider has answered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from consumers.limits.base import Amounts
from topology.lanes import BATCH, CRITICAL, NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountCaps:
    """The most that one account may use per minute, as the operator has set it; None: as much as the provider
    allows."""

    requests: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    concurrency: int | None = None
    """The maximum number of calls to the account at the same time; None: no limit."""

    def per_minute(self) -> tuple[float | None, float | None, float | None]:
        return (self.requests, self.input_tokens, self.output_tokens)


DEFAULT_SHARES: Mapping[str, float] = MappingProxyType({CRITICAL.name: 0.30, NORMAL.name: 0.20, BATCH.name: 0.05})


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec:
    """All settings of the budget of provider calls. The defaults suit any account, because its limits are learned from
    the provider's answers."""

    shares: Mapping[str, float] = field(default_factory=lambda: DEFAULT_SHARES)
    """Each lane's share of every token bucket, above 0 and up to 1, the most urgent lane first: this part of what flows
    into the bucket is saved for the lane alone, so that it always gets some budget."""
    burst_s: float = 60.0
    """The largest size of a bucket, in seconds' worth of its limit (up to 60). Up to this, the size is what the
    provider's own bucket is proven to hold (`burst.py`). A smaller value leaves less for bursts and large requests."""
    accounts: Mapping[str, AccountCaps] = field(default_factory=dict)
    """The operator's caps by the name of an account (`Route.account`) or of a provider. The caps of a provider apply to
    each of its accounts that has no caps of its own."""
    start: Amounts = Amounts(50, 30_000, 8_000)  # noqa: RUF009  a value that cannot change
    """The limits per minute that are assumed until the provider has announced its own: those of the smallest
    accounts."""
    first_output_tokens: int = 512
    """The expected length of an answer in tokens, until the first request of the same lane, task and model has
    ended."""
    first_bytes_per_token: float = 3.5
    """How many bytes of a request's body are expected to make one input token, until the first request for its model
    has ended."""
    overflow_s: float | None = None
    """A request that would wait longer than this many seconds for a provider's budget goes to the next provider that
    may serve it, if the wait there is shorter. None: the time that requests of its lane should wait at most
    (`LaneSpec.target_wait_s`)."""
    hold_s: float = 120.0
    """How many seconds a request may wait for budget in a worker. After that it waits in a queue of the broker (it is
    deferred), because the broker takes back a delivery that is not settled for long."""
    spend_pause_s: float = 900.0
    """For how many seconds an account that has reached its spend limit is not called."""

    def caps(self, account: str) -> AccountCaps:
        """The caps of an account, or else those of its provider (the part of its name before `/`)."""
        return self.accounts.get(account) or self.accounts.get(account.partition("/")[0], NO_CAPS)


NO_CAPS = AccountCaps()
