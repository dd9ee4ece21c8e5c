"""The seam to the budget: reserve before a call, settle after it, learn from responses. Processes may share budgets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from consumers.limits.amounts import NOTHING, Amounts
from consumers.limits.headers import RateHeaders
from lanekeeper.contract.problems import LanekeeperError


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What a call may use. Settle it once, whatever the call came to; settling it again does nothing."""

    account: str
    lane: str
    amounts: Amounts
    own: Amounts = NOTHING
    """How much of it the lane had saved."""
    at_s: float = 0.0
    is_settled: bool = False


class Wait(NamedTuple):
    """How long a request would wait now, and mostly for what: rpm, itpm, otpm, concurrency or paused."""

    seconds: float
    """The expected wait."""
    reason: str
    least_s: float = 0.0
    """The shortest possible wait, by known limits only: no request is refused because of a guess."""
    is_known: bool = True
    """False if `seconds` follows from a limit that neither the provider has told nor a setting says."""


class WaitTooLong(LanekeeperError):
    """The request cannot be granted in time."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        """The forecast at that moment."""
        super().__init__(f"{wait.least_s:.1f} s for {wait.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The requests of one lane that wait for one account."""

    count: int
    reason: str
    """What the first of them waits for, and so all of them."""
    oldest_s: float
    is_known: bool = True
    """False if that limit is a guess: nobody has told or set it."""


class Kind(StrEnum):
    """What a response says about the account."""

    ANSWERED = "answered"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    SPEND_LIMIT = "spend_limit"
    FAILED = "failed"
    """Any other error: only its headers say something about the account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one response says about the account."""

    kind: Kind
    rate: RateHeaders | None = None
    retry_after_s: float | None = None
    counted: Amounts = NOTHING
    """What the provider had counted for the call when it told `rate`: that is what is left after it."""
    took_s: float = 0.0
    """How long ago the call began. `rate` is at most so old, because it is told before the answer."""


NO_NEWS: Final = Heard(kind=Kind.FAILED)


class Budgets(Protocol):
    """The budgets of all accounts. `name`: the account's; times are the event loop's."""

    async def reserve(
        self,
        name: str,
        *,
        lane: str,
        amounts: Amounts,
        until: float | None,
        arrived: float | None = None,
        on_wait: Callable[[Wait], None] | None = None,
    ) -> Reservation:
        """Wait in line for a reservation; `on_wait` is called if it is not granted at once. `arrived`: when the request
        first asked, if that was before now; its place in line goes by it.

        Raises WaitTooLong if the account is paused, and as soon as known limits show that it cannot be granted before
        `until`. A request that is cancelled leaves the line.
        """

    async def try_reserve(self, name: str, *, lane: str, amounts: Amounts) -> Reservation | None:
        """Reserve at once, or return None."""

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        """Settle after the call. `used` None: the provider counted nothing."""

    def learn(self, name: str, heard: Heard) -> None:
        """Learn from every response, errors included."""

    async def predicted_wait(self, name: str, *, lane: str, amounts: Amounts) -> Wait:
        """The forecast for a request that would join its lane's line now."""

    def waiting(self) -> Mapping[str, Mapping[str, Waiting]]:
        """By account and lane: who waits in this process, and for what."""

    def paused(self) -> Mapping[str, float]:
        """For each account that a spend limit has paused: for how many seconds more."""
