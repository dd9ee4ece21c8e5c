"""Defines how a call to a provider can fail, and what follows from each failure. Only the table in this file (rows such
as `UNSENT` and `RATE_LIMITED`) decides what follows, and only `decide` whether and when a failed attempt is retried.

ProviderError
├── TransientError          connection, timeout, 5xx, a stream or body cut short
├── RateLimitedError        429
├── OverloadedError         529
├── AccountError            no request can be answered there: key, account or base URL are wrong (an operator's mistake)
├── RejectedError           the provider refused the request (400, 403, 404, 413, 422, other 4xx)
├── HandlerError            a registered function raised an exception, or took too long
│   └── HandlerDied         its process died under it
└── AnswerTooLargeError     the answer is larger than a worker reads, or than a reply may be

BreakerOpen                 no call was made: all providers that may be called are paused, or their breakers are open

The attribute `means` of each class is its row of the table.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Final, assert_never

from consumers.limits.base import NOTHING, Amounts, Kind, RateHeaders
from consumers.outcomes import DeadLettered, Refused, Retried, end_with
from lanekeeper.contract.identity import encodable, is_word, shown
from lanekeeper.contract.problems import LanekeeperError, ProviderFailure


class Retry(Enum):
    """Says whether another attempt may help, and how long to wait before it."""

    REJECTED = auto()
    TOO_LARGE = auto()
    SOON = auto()
    BACK_OFF = auto()
    RETRY_AFTER = auto()


class Failover(Enum):
    """Says which other provider or account may be called within the same attempt after a failed call."""

    NOBODY = auto()
    PROVIDER = auto()
    SAME_MODEL = auto()
    ACCOUNT = auto()
    SAME_MODEL_FIRST = auto()


class Trips(Enum):
    """Says whether the circuit breaker counts the error as a failure of the provider."""

    NO = auto()
    YES = auto()
    IN_TIME = auto()
    ACCOUNT = auto()
    UNREACHED = auto()
    """No connection to the provider could be opened."""


class Paid(Enum):
    """Says what the provider has counted for a failed call against the account's limits of requests and tokens."""

    NOTHING = auto()
    REQUEST = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Meaning:
    """Says what follows from one kind of failed call: one row of the table of failures, such as `TIMED_OUT`."""

    retry: Retry
    failover: Failover
    trips: Trips
    paid: Paid
    says: Kind


# fmt: off
UNSENT       = Meaning(Retry.SOON,        Failover.SAME_MODEL,       Trips.UNREACHED, Paid.NOTHING, Kind.FAILED)
SERVER_ERROR = Meaning(Retry.SOON,        Failover.SAME_MODEL,       Trips.YES,       Paid.REQUEST, Kind.FAILED)
BROKEN_OFF   = Meaning(Retry.SOON,        Failover.SAME_MODEL,       Trips.YES,       Paid.UNKNOWN, Kind.FAILED)
TIMED_OUT    = Meaning(Retry.SOON,        Failover.SAME_MODEL,       Trips.IN_TIME,   Paid.UNKNOWN, Kind.FAILED)
RATE_LIMITED = Meaning(Retry.RETRY_AFTER, Failover.SAME_MODEL_FIRST, Trips.NO,        Paid.REQUEST, Kind.RATE_LIMITED)
OVERLOADED   = Meaning(Retry.BACK_OFF,    Failover.ACCOUNT,          Trips.YES,       Paid.REQUEST, Kind.OVERLOADED)
NO_ACCOUNT   = Meaning(Retry.BACK_OFF,    Failover.PROVIDER,         Trips.ACCOUNT,   Paid.REQUEST, Kind.FAILED)
NO_ACCESS    = Meaning(Retry.BACK_OFF,    Failover.PROVIDER,         Trips.ACCOUNT,   Paid.NOTHING, Kind.FAILED)
FORBIDDEN    = Meaning(Retry.REJECTED,    Failover.PROVIDER,         Trips.NO,        Paid.REQUEST, Kind.FAILED)
REJECTED     = Meaning(Retry.REJECTED,    Failover.NOBODY,           Trips.NO,        Paid.REQUEST, Kind.FAILED)
TOO_LARGE    = Meaning(Retry.TOO_LARGE,   Failover.NOBODY,           Trips.NO,        Paid.UNKNOWN, Kind.FAILED)
OF_HANDLER   = Meaning(Retry.SOON,        Failover.NOBODY,           Trips.NO,        Paid.NOTHING, Kind.FAILED)
# fmt: on

CAUSES: Final = {
    UNSENT: "unreachable", SERVER_ERROR: "server_error", BROKEN_OFF: "broken_off", TIMED_OUT: "timeout",
    RATE_LIMITED: "rate_limited", OVERLOADED: "overloaded", NO_ACCOUNT: "account", NO_ACCESS: "account",
    FORBIDDEN: "rejected", REJECTED: "rejected", TOO_LARGE: "too_large", OF_HANDLER: "handler",
}  # fmt: skip
UNREACHABLE: Final = "unreachable"
TIMEOUT: Final = "timeout"
_BY_TYPE: Final = {UNREACHABLE: UNSENT, TIMEOUT: TIMED_OUT}


class ProviderError(LanekeeperError, ABC):
    """A call to a provider failed. `detail`: a line of text for the requester. It may quote the request, because the
    provider may have written it."""

    def __init__(
        self,
        detail: str,
        *,
        status: int = 0,
        type: str = "",
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.detail = encodable(detail)
        super().__init__(self.detail)
        self.status = status
        self.type = type
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.body = ""
        """The provider's error as it came, if it is text; cut after `PROVIDER_ERROR_BYTES`."""
        self.is_final = False
        """The provider has said that another call brings nothing (`x-should-retry: false`)."""
        self.had_begun = False
        self.rate: RateHeaders | None = None

    @property
    @abstractmethod
    def means(self) -> Meaning: ...

    @property
    def cause(self) -> str:
        return CAUSES[self.means]

    @property
    def failure(self) -> ProviderFailure | None:
        """For the problem document; None if the provider answered nothing, or an error of the service's account."""
        if self.status < 400 or isinstance(self, AccountError):
            return None
        wait_ms = None if self.retry_after_s is None else math.ceil(1000 * self.retry_after_s)
        type_ = "" if self.type.startswith("http_") else self.type
        return ProviderFailure(
            status=self.status, type=type_, error=self.body, request_id=self.request_id, retry_after_ms=wait_ms
        )

    @property
    def paid(self) -> Paid:
        return Paid.UNKNOWN if self.had_begun else self.means.paid

    def spent(self, likely: Amounts) -> Amounts:
        match self.paid:
            case Paid.NOTHING:
                return NOTHING
            case Paid.REQUEST:
                return Amounts(requests=1)
            case Paid.UNKNOWN:
                return likely
            case never:
                assert_never(never)

    @property
    def is_outage(self) -> bool:
        """Whether the failure is the provider's own, and nothing has to be paid for the call. If the circuit breakers
        of all usable providers are open after such a failure, the attempt does not count against the request's limit of
        attempts."""
        is_its_own = self.means.trips is not Trips.NO and self.means.retry is not Retry.REJECTED
        return is_its_own and self.paid is not Paid.UNKNOWN

    @property
    def brief(self) -> str:
        """The error for logs and events, without content of the request: its type, its status and the provider's id of
        the call.

        The provider chose the type and the id, so they are shown only if they have the form of a type and of an id.
        """
        kind = self.type if is_word(self.type) else type(self).__name__
        status = f" {self.status}" if self.status else ""
        id = f" ({shown(self.request_id)})" if self.request_id else ""
        return f"{kind}{status}{id}"


class TransientError(ProviderError):
    """A failure that may be over soon."""

    @property
    def means(self) -> Meaning:
        return SERVER_ERROR if self.status >= 400 else _BY_TYPE.get(self.type, BROKEN_OFF)


class RateLimitedError(ProviderError):
    """The provider answered 429: the account has reached a rate limit."""

    means = RATE_LIMITED


class OverloadedError(ProviderError):
    """The provider is overloaded: it answered 529."""

    means = OVERLOADED


class AccountError(ProviderError):
    """The provider can answer no request: it refuses the key, its account is closed or unpaid, its base URL leads
    elsewhere. An operator has to mend that, so no request ends with it, or loses an attempt by it.

    `reason`: what is wrong, in our own words, for operators and requesters. `otherwise`: what the error means if a
    call of our own succeeds there, so that it was the request's alone; None if no request can cause it.
    """

    def __init__(
        self,
        detail: str,
        *,
        reason: str,
        otherwise: ProviderError | None = None,
        status: int = 0,
        type: str = "",
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail, status=status, type=type, request_id=request_id, retry_after_s=retry_after_s)
        self.reason = reason
        self.otherwise = otherwise

    def take_otherwise(self) -> ProviderError | None:
        """`otherwise`, to be raised in place of this error: it is then caused by this one, and if this one kept it, the
        two would be a circle that keeps the request until the next collection of garbage."""
        otherwise, self.otherwise = self.otherwise, None
        return otherwise

    @property
    def means(self) -> Meaning:
        return NO_ACCOUNT if self.status else NO_ACCESS


class RejectedError(ProviderError):
    """The provider refused the request, and would refuse it again if it were sent again."""

    @property
    def means(self) -> Meaning:
        return FORBIDDEN if self.status == 403 else REJECTED


class AnswerTooLargeError(ProviderError):
    """The provider's answer is larger than allowed."""

    means = TOO_LARGE

    def __init__(self, excess: str) -> None:
        super().__init__(
            f"the provider's answer has {excess}: ask for less "
            "(a smaller max_tokens, fewer or smaller results of tools)",
            type="too_large",
        )


class HandlerError(ProviderError):
    """A call to a handler (a registered function) failed. `where`: the exception's class, file and line."""

    means = OF_HANDLER

    def __init__(self, detail: str, *, type: str, where: str = "") -> None:
        super().__init__(detail, type=type)
        self._where = where

    @property
    def brief(self) -> str:
        return self._where or super().brief


class HandlerDied(HandlerError):
    """The handler's process died under it."""


class BreakerOpen(LanekeeperError):
    """No call was made, because all providers that may be called are paused, or their circuit breakers
    (`providers/breakers.py`) are open."""

    def __init__(self, retry_in_s: float) -> None:
        self.retry_in_s = retry_in_s
        super().__init__(f"no provider may be called for {retry_in_s:.1f} s")


JITTER = 0.5
"""Each pause before a retry is lengthened at random by up to this share of its length, so that requests that failed
together do not come back together."""
LEAST_FACTOR = 2.0
STEP_PART_OF_TIME_LEFT = 0.5
"""The pause before a retry, without its random part, is at most this share of the time left until the request's
deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait between the attempts of a request. A step is a pause without its random part.

    The first step is `floor_s`, or `base_s` after a rate limit or an overload. Each further step is the step before it
    times a factor, which is the same for all steps, and at least 2. The factor is chosen so that all steps of a request
    together last at least `span_s`, the length of a short outage. No step is longer than `cap_s` or than half of the
    time left until the deadline, and none is shorter than `floor_s`.
    """

    base_s: float = 1.0
    span_s: float = 30.0
    cap_s: float = 60.0

    @property
    def floor_s(self) -> float:
        return self.base_s / 4


def decide(
    error: ProviderError,
    *,
    attempts: int,
    max_attempts: int,
    left_ms: int,
    policy: RetryPolicy,
    rng: random.Random,
    has_other: bool = False,
) -> Retried | Refused | DeadLettered:
    """The outcome of a request whose attempt failed: a retry after a pause, or a final error.

    `has_other`: whether the retry can call another account than the failed call did; if so, the `retry-after` of the
    failed call is ignored, because it concerns only the account that was called.
    """
    failure = error.failure
    match Retry.REJECTED if error.is_final else error.means.retry:
        case Retry.REJECTED:
            status = error.status or None
            return end_with("provider_rejected", error.detail, status=status, brief=error.brief, provider=failure)
        case Retry.TOO_LARGE:
            return end_with("answer_too_large", error.detail)
        case Retry.SOON:
            first_s = policy.floor_s
        case Retry.BACK_OFF | Retry.RETRY_AFTER:
            first_s = policy.base_s
        case never:
            assert_never(never)
    if attempts >= max_attempts:
        return end_with(
            "attempts_exhausted",
            f"all {attempts} attempts failed; the last: {error.detail}",
            brief=f"after {attempts} attempts: {error.brief}",
            provider=failure,
        )
    pause_s = _step_s(
        first_s, failures=attempts, pauses=max_attempts - 1, left_s=left_ms / 1000, policy=policy
    ) * rng.uniform(1, 1 + JITTER)
    if not has_other:
        pause_s = _with_retry_after(error, pause_s, policy=policy, rng=rng)
    delay_ms = math.ceil(1000 * pause_s)
    if delay_ms >= left_ms:
        return end_with(
            "deadline_exceeded",
            f"attempt {attempts} failed ({error.detail}), and the next could start in {delay_ms} ms: "
            f"{max(0, left_ms)} ms are left",
            brief=f"after attempt {attempts}: {error.brief}",
            provider=failure,
            retry_after_ms=None if failure is None else delay_ms,
        )
    return Retried(delay_ms=delay_ms, error=error.detail, brief=error.brief)


def _step_s(first_s: float, *, failures: int, pauses: int, left_s: float, policy: RetryPolicy) -> float:
    factor = _factor(policy.span_s / first_s, pauses)
    step_s = first_s * math.pow(factor, failures - 1)
    return max(policy.floor_s, min(step_s, policy.cap_s, left_s * STEP_PART_OF_TIME_LEFT))


def _factor(total: float, count: int) -> float:

    def is_enough(factor: float) -> bool:
        return sum(factor**n for n in range(count)) >= total

    if count < 2 or is_enough(LEAST_FACTOR):
        return LEAST_FACTOR
    low, high = LEAST_FACTOR, math.pow(total, 1 / (count - 1))  # with this factor the last term alone reaches the total
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _with_retry_after(error: ProviderError, pause_s: float, *, policy: RetryPolicy, rng: random.Random) -> float:
    wanted_s = error.retry_after_s
    if wanted_s is None:
        return pause_s
    wanted_s += rng.uniform(0, min(1.0, 0.1 * wanted_s))  # so that not all come back at the same instant
    return max(policy.floor_s if error.means.retry is Retry.RETRY_AFTER else pause_s, wanted_s)


_LONGEST_WAIT_S: Final = 86_400.0


def read_retry_after_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """The seconds to wait, by `retry-after-ms` or `retry-after` (seconds or a date); None if neither has a sensible
    value."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if math.isfinite(wait_s) and 0 <= wait_s <= _LONGEST_WAIT_S:
            return wait_s
    try:
        wait_s = parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - now_s
    except (ValueError, OverflowError):  # no date, or the year 99999
        return None
    # a date in the past means that the clocks differ: do not wait
    return max(0.0, wait_s) if abs(wait_s) <= _LONGEST_WAIT_S else None
