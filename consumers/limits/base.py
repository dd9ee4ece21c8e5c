"""The seam to the budget: reserve before a call, settle after it, tell what was heard. All processes may share one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from consumers.limits.amounts import NOTHING, Amounts
from consumers.limits.headers import RateHeaders
from lanekeeper.contract.problems import LanekeeperError


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What a call may use. To be settled once, whatever became of it; a second time does nothing."""

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
    """As is to be expected."""
    reason: str
    least_s: float = 0.0
    """At the earliest, by limits that are known: nobody is refused by a guess."""
    is_known: bool = True
    """False where `seconds` follows from a limit that the provider has not told and no setting says."""


class WaitTooLong(LanekeeperError):
    """The request cannot be granted in time."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        """From now on."""
        super().__init__(f"{wait.least_s:.1f} s for {wait.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The requests of one lane that wait for one account."""

    count: int
    reason: str
    """What the first of them waits for, and so all."""
    oldest_s: float
    is_known: bool = True
    """False where that limit is a guess: nobody has told or set it."""


class Kind(StrEnum):
    """What a response says about the account."""

    ANSWERED = "answered"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    SPEND_LIMIT = "spend_limit"
    FAILED = "failed"
    """Any other error: only its headers say something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Of one response."""

    kind: Kind
    rate: RateHeaders | None = None
    retry_after_s: float | None = None
    counted: Amounts = NOTHING
    """Of the call: what `rate` says is left, is left after it."""
    took_s: float = 0.0
    """Since the call began, and so how old `rate` is at most: it is told before the answer is."""


NO_NEWS: Final = Heard(kind=Kind.FAILED)


class Budgets(Protocol):
    """The budgets of all accounts. `name`: of an account; times are the event loop's."""

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
        """Wait in order; `on_wait` is told, where it is not granted at once. `arrived`: when it first asked, if that
        was before now: it stands where it stood then.

        Raises WaitTooLong as soon as it cannot be granted before `until`, by limits that are known, and where the
        account is paused. Cancelling it leaves the line.
        """
        ...

    async def try_reserve(self, name: str, *, lane: str, amounts: Amounts) -> Reservation | None:
        """Reserve at once, or return None."""
        ...

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        """After the call. None: the provider counted nothing."""
        ...

    def learn(self, name: str, heard: Heard) -> None:
        """Learn from every response, errors included."""
        ...

    async def predicted_wait(self, name: str, *, lane: str, amounts: Amounts) -> Wait:
        """The forecast for a request that would join its lane's line now."""
        ...

    def waiting(self) -> Mapping[str, Mapping[str, Waiting]]:
        """By account and lane: who waits in this process, and for what."""
        ...

    def paused(self) -> Mapping[str, float]:
        """For each account that a spend limit has paused: for how many seconds more."""
        ...
