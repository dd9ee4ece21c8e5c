"""What a reservation is, how long it is waited for, and what responses say about an account."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from consumers.limits.amounts import NOTHING, Amounts
from consumers.limits.headers import RateHeaders
from lanekeeper.contract.problems import LanekeeperError


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What a call may use. Settle it once, however the call ended; settling it again does nothing."""

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
    """False if `seconds` follows from a guessed limit, neither announced by the provider nor set."""


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
    """False if that limit is a guess: it was neither announced nor set."""


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
    """What one response tells about an account."""

    kind: Kind
    rate: RateHeaders | None = None
    retry_after_s: float | None = None
    counted: Amounts = NOTHING
    """What the provider had counted for the call when it sent `rate`, whose amounts are those left after that."""
    took_s: float = 0.0
    """How long ago the call began. `rate` is no older, because its headers come before the answer."""


NO_NEWS: Final = Heard(kind=Kind.FAILED)
