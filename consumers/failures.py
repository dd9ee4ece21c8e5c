"""Defines how a call to a provider can fail, and what follows from each failure. Only the table in this file (rows such
as `UNSENT` and `RATE_LIMITED`) decides what follows.

ProviderError
├── TransientError          connection, timeout, 5xx, a stream or body cut short
├── RateLimitedError        429
├── OverloadedError         529
├── SpendLimitError         the account's or workspace's spend limit
├── RejectedError           the provider refused the request (400, 401, 403, 404, 413, 422, other 4xx)
└── AnswerTooLargeError     the answer is larger than a worker reads, or than a reply may be

BreakerOpen                 no call was made: the circuit breakers of all providers that may be called are open

The attribute `means` of each class is its row of the table. mypy reports three kinds of omissions: a class without
`means`, at the line that creates an object of the class; a row that lacks a column; and a new value of a column, if the
code that reads the column does not handle it (`assert_never`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, assert_never

from consumers.limits.base import NOTHING, Amounts, Kind
from consumers.limits.headers import RateHeaders
from lanekeeper.contract.identity import is_word, shown
from lanekeeper.contract.problems import LanekeeperError


class Retry(Enum):
    """Says whether another attempt may help, and how long to wait before it. `retry.decide` reads it."""

    REJECTED = auto()
    """No further attempt is made, because it would not help: the request ends with the error `provider_rejected`."""
    TOO_LARGE = auto()
    """No further attempt is made, because the next answer would be too large again: the request ends with the error
    `answer_too_large`."""
    SOON = auto()
    """Another attempt may help, and the pause before the first retry is short (`RetryPolicy.floor_s`)."""
    BACK_OFF = auto()
    """Another attempt may help. The pause before the attempt is the one that `retry.py` computes, or the provider's
    `retry-after` if that is longer."""
    RETRY_AFTER = auto()
    """Another attempt may help when the provider's `retry-after` is over, even if that is shorter than the pause that
    `retry.py` computes."""


class Failover(Enum):
    """Says which other provider or account may be called within the same attempt after a failed call. `attempt.py`
    reads it."""

    NOBODY = auto()
    """After the failed call, no other provider or model is called within the attempt, because that call would fail for
    the same reason."""
    PROVIDER = auto()
    """After the failed call, another provider may be called, with any model."""
    SAME_MODEL = auto()
    """After the failed call, another provider may be called, but only with the same model."""
    ACCOUNT = auto()
    """After the failed call, any model of another account may be called. An account stands for the limits of one
    provider for one class of models."""
    SAME_MODEL_FIRST = auto()
    """After the failed call, another account (one provider's limits for a class of models) may be called with the same
    model; if the `retry-after` of the failed call is longer than 5 s, with any model."""


class Trips(Enum):
    """Says whether the circuit breaker counts the error as a failure of the provider. `breakers.py` reads it."""

    NO = auto()
    """The circuit breaker does not count the error: the provider answered, so it works, even if it refused the
    request."""
    YES = auto()
    """The circuit breaker counts the error as a failure of the provider."""
    IN_TIME = auto()
    """The call has timed out. The circuit breaker counts this as a failure of the provider only if the call's timeout
    was at least 5 s (`FAIR_S`)."""
    UNREACHED = auto()
    """No connection to the provider could be opened. The circuit breaker counts the error, and opens after a few such
    failures in a row."""


class Paid(Enum):
    """Says what the provider has counted for a failed call against the account's limits of requests and tokens.
    `ProviderError.spent` reads it."""

    NOTHING = auto()
    """The provider counted nothing against the account's limits: the call did not reach it."""
    REQUEST = auto()
    """The provider counted one request and no tokens against the account's limits."""
    UNKNOWN = auto()
    """It is unknown what the provider counted against the account's limits: it may be any amount up to what was
    reserved for the call."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """Says what follows from one kind of failed call: one row of the table of failures, such as `TIMED_OUT`. `retry`:
    whether another attempt may help. `failover`: which other provider may be called at once. `trips`: whether the
    circuit breaker counts the failure. `paid`: what the provider may have counted against the account's limits. `says`:
    the kind of response that is reported to the budget, which tracks the account's limits."""

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
SPEND_LIMIT  = Meaning(Retry.REJECTED,    Failover.PROVIDER,         Trips.NO,        Paid.REQUEST, Kind.SPEND_LIMIT)
KEY_REFUSED  = Meaning(Retry.REJECTED,    Failover.PROVIDER,         Trips.YES,       Paid.REQUEST, Kind.FAILED)
FORBIDDEN    = Meaning(Retry.REJECTED,    Failover.PROVIDER,         Trips.NO,        Paid.REQUEST, Kind.FAILED)
REJECTED     = Meaning(Retry.REJECTED,    Failover.NOBODY,           Trips.NO,        Paid.REQUEST, Kind.FAILED)
TOO_LARGE    = Meaning(Retry.TOO_LARGE,   Failover.NOBODY,           Trips.NO,        Paid.UNKNOWN, Kind.FAILED)
# fmt: on

UNREACHABLE: Final = "unreachable"
"""The error type of a failed call for which no connection to the provider could be opened. (If the connection was lost
after the request was sent, the type is `connection`.)"""
TIMEOUT: Final = "timeout"
"""The error type of a call that was ended by its timeout or by its request's deadline."""
_BY_TYPE: Final = {UNREACHABLE: UNSENT, "credentials": UNSENT, TIMEOUT: TIMED_OUT}
"""The row of the table of failures for a TransientError without an HTTP status of 400 or more, by the error's type. All
other types have the row `BROKEN_OFF`. The type `credentials` means that the request could not be signed for lack of
credentials, so nothing was sent."""
_BY_STATUS: Final = {401: KEY_REFUSED, 403: FORBIDDEN}
"""The row of the table of failures for a RejectedError, by its HTTP status. All other statuses have the row
`REJECTED`."""


class ProviderError(LanekeeperError, ABC):
    """A call to a provider failed. `detail`: a line of text for the requester. It may quote the request, because the
    provider may have written it. `status`: the HTTP status; 0 if there was no response. `retry_after_s`: the response's
    header `retry-after`, in seconds; None if there is none."""

    def __init__(
        self,
        detail: str,
        *,
        status: int = 0,
        type: str = "",
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.type = type
        """Anthropic's error type (such as `overloaded_error`), or one of Lanekeeper's own (such as `timeout` and
        `unreachable`)."""
        self.request_id = request_id
        """The provider's id of the failed call; None if there was no response. The provider's adapter sets it."""
        self.retry_after_s = retry_after_s
        self.had_begun = False
        """Whether the answer had begun when the call failed. The provider's adapter sets it."""
        self.rate: RateHeaders | None = None
        """The account's rate limits, as the headers of the error response give them. The provider's adapter sets it."""

    @property
    @abstractmethod
    def means(self) -> Meaning:
        """What follows from the error: its row of the table of failures, such as `RATE_LIMITED`."""

    @property
    def paid(self) -> Paid:
        """What the provider counted against the account's limits for this call. The table of failures says it, except
        if the answer had begun: then it is UNKNOWN."""
        return Paid.UNKNOWN if self.had_begun else self.means.paid

    def spent(self, reserved: Amounts) -> Amounts:
        """What the failed call has used of its account's limits. `reserved`: what was reserved for the call. If the
        usage is unknown, because the answer was cut off or did not come in time, all of `reserved` counts as used."""
        match self.paid:
            case Paid.NOTHING:
                return NOTHING
            case Paid.REQUEST:
                return Amounts(requests=1)
            case Paid.UNKNOWN:
                return reserved
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
    """A failure that may be over soon: no connection to the provider, a lost connection, a timeout, a 5xx, or an answer
    that is malformed or incomplete."""

    @property
    def means(self) -> Meaning:
        return SERVER_ERROR if self.status >= 400 else _BY_TYPE.get(self.type, BROKEN_OFF)


class RateLimitedError(ProviderError):
    """The provider answered 429: the account has reached a rate limit."""

    means = RATE_LIMITED


class OverloadedError(ProviderError):
    """The provider is overloaded: it answered 529, perhaps with a `retry-after`, or sent an `overloaded_error` in the
    middle of a stream."""

    means = OVERLOADED


class SpendLimitError(ProviderError):
    """The spend limit of the account or the workspace is reached, so no retry helps until a person raises the limit."""

    means = SPEND_LIMIT


class RejectedError(ProviderError):
    """The provider refused the request, and would refuse it again if it were sent again."""

    @property
    def means(self) -> Meaning:
        return _BY_STATUS.get(self.status, REJECTED)


class AnswerTooLargeError(ProviderError):
    """The provider's answer is larger than allowed. The call is not retried, because another answer would cost as much,
    and may be as large."""

    means = TOO_LARGE

    def __init__(self, excess: str) -> None:
        super().__init__(
            f"the provider's answer has {excess}: ask for less "
            "(a smaller max_tokens, fewer or smaller results of tools)",
            type="too_large",
        )


class BreakerOpen(LanekeeperError):
    """No call was made, because the circuit breakers (`providers/breakers.py`) of all providers that may be called are
    open. This does not count as an attempt."""

    def __init__(self, retry_in_s: float) -> None:
        self.retry_in_s = retry_in_s
        """The time, in seconds, until one of the circuit breakers allows a call again."""
        super().__init__(f"no provider may be called for {retry_in_s:.1f} s: their last calls failed")
