"""The types of the values with which other code uses a provider's budget: amounts, reservations, forecasts of waits,
and what a response says about limits."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from consumers.limits.headers import RateHeaders
from lanekeeper.contract.problems import LanekeeperError


class Amounts(NamedTuple):
    """What a call to a provider uses, or what an account's limits allow per minute: three numbers, always in this
    order."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0


NOTHING: Final = Amounts()
INPUT: Final = 1
"""The index of the input tokens in a value of `Amounts`."""
REASONS: Final = ("rpm", "itpm", "otpm")
"""Names of the limits that a request may wait for: requests (rpm), input tokens (itpm) and output tokens (otpm) per
minute."""
CONCURRENCY: Final = "concurrency"
PAUSED: Final = "paused"


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What is reserved of an account's budget (requests and tokens) for one call. It must be settled when the call has
    ended; settling it again has no effect."""

    account: str
    lane: str
    amounts: Amounts
    from_savings: Amounts = NOTHING
    """The part of `amounts` that came from the lane's savings, that is, from budget that was kept for this lane alone
    (`bucket.py`)."""
    at_s: float = 0.0
    """When the reservation was granted, by the clock of `Turns.now_s`."""
    is_settled: bool = False


class Wait(NamedTuple):
    """A forecast of how long a request would wait for budget, and for which limit it would wait longest (`reason`: rpm,
    itpm, otpm, concurrency or paused)."""

    seconds: float
    """The expected wait in seconds."""
    reason: str
    least_s: float = 0.0
    """The shortest possible wait in seconds. It is computed from known limits only, so that no request is refused
    because of a guess."""
    is_known: bool = True
    """False if `seconds` is computed from a guessed limit, which was neither announced by the provider nor set by the
    operator."""


class WaitTooLong(LanekeeperError):
    """The request cannot get a provider's budget in time for its deadline, or the account is paused because its spend
    limit is reached."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        """The forecast of the wait, because of which the request was refused."""
        super().__init__(f"{wait.least_s:.1f} s for {wait.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How many requests of one lane wait until the limits of one account at the provider allow their calls, and why."""

    count: int
    reason: str
    """The limit for which the lane's first waiting request waits. It delays all requests behind it as well."""
    oldest_s: float
    is_known: bool = True
    """False if the limit in `reason` is a guess: neither announced by the provider nor set by the operator."""


class Kind(StrEnum):
    """The kind of a provider's response, as far as it says something about the account's limits."""

    ANSWERED = "answered"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    SPEND_LIMIT = "spend_limit"
    FAILED = "failed"
    """The response is an error of none of the other kinds, so that only its headers may say something about the
    limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What one response of the provider says about its account: its limits, what is left of them, and when to call
    again."""

    kind: Kind
    rate: RateHeaders | None = None
    retry_after_s: float | None = None
    counted: Amounts = NOTHING
    """The requests and tokens of this call that the provider had already subtracted from the account's limits when it
    computed `rate`, the headers that say what is left."""
    took_s: float = 0.0
    """The seconds since the call began, which is the greatest possible age of the values in `rate`."""


NO_FEEDBACK: Final = Feedback(kind=Kind.FAILED)
