"""How a call to a provider can fail, and what each failure means. The table below is the only place that says it.

ProviderError
├── TransientError          connection, timeout, 5xx, a stream or body cut short
├── RateLimitedError        429
├── OverloadedError         529
├── SpendLimitError         the account's or workspace's spend limit
├── RejectedError           the provider refused the request (400, 401, 403, 404, 413, 422, other 4xx)
└── AnswerTooLargeError     the answer is more than can be read or sent back

BreakerOpen                 no call was made: every provider that may be called is known to fail now

Each ProviderError carries its row of the table. mypy fails for a new class that passes no row, for a new row that does
not fill every column, and for a new value of a column until the code that reads the column handles it (`assert_never`).
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypedDict, Unpack

from consumers.limits.base import Kind
from consumers.limits.headers import RateHeaders
from lanekeeper.contract.identity import is_word, shown
from lanekeeper.contract.problems import LanekeeperError


class Retry(Enum):
    """Whether another attempt may help, and how long to wait before it. Read by `retry.decide`."""

    REJECTED = auto()
    """Another attempt does not help: the request ends as `provider_rejected`."""
    TOO_LARGE = auto()
    """Another attempt does not help, because its answer would be as large: the request ends as `answer_too_large`."""
    SOON = auto()
    """Another attempt may help, and the first retry comes quickly."""
    BACK_OFF = auto()
    """Another attempt may help, but not before the provider's `retry-after` is over."""
    AS_TOLD = auto()
    """Another attempt may help when the provider's `retry-after` is over."""


class Failover(Enum):
    """Who else may answer within the same attempt. Read by `attempt.py`."""

    NOBODY = auto()
    PROVIDER = auto()
    """Another provider, with any model."""
    SAME_MODEL = auto()
    """Another provider, with the same model."""
    ACCOUNT = auto()
    """Another account, with any model."""
    SAME_MODEL_FIRST = auto()
    """Another account with the same model; with another model only if the `retry-after` is long."""


class Trips(Enum):
    """Whether the circuit breaker counts it as a failure. Read by `breakers.py`."""

    NO = auto()
    """The provider works: it answered, even if it refused."""
    YES = auto()
    IN_TIME = auto()
    """A timeout is counted only if the call was given enough time."""
    UNREACHED = auto()
    """The failure is counted, and a few in a row open the breaker."""


class Paid(Enum):
    """What the provider counted against the account's limits. Read by `counting.spent`."""

    NOTHING = auto()
    REQUEST = auto()
    """The provider counted one request and no tokens."""
    UNKNOWN = auto()
    """The provider may have counted anything up to the whole reservation."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """One row of the table. `says`: what the budget learns of the account."""

    retry: Retry
    failover: Failover
    trips: Trips
    paid: Paid
    says: Kind


# fmt: off
UNSENT       = Meaning(Retry.SOON,      Failover.SAME_MODEL,       Trips.UNREACHED, Paid.NOTHING, Kind.FAILED)
SERVER_ERROR = Meaning(Retry.SOON,      Failover.SAME_MODEL,       Trips.YES,       Paid.REQUEST, Kind.FAILED)
BROKEN_OFF   = Meaning(Retry.SOON,      Failover.SAME_MODEL,       Trips.YES,       Paid.UNKNOWN, Kind.FAILED)
TIMED_OUT    = Meaning(Retry.SOON,      Failover.SAME_MODEL,       Trips.IN_TIME,   Paid.UNKNOWN, Kind.FAILED)
RATE_LIMITED = Meaning(Retry.AS_TOLD,   Failover.SAME_MODEL_FIRST, Trips.NO,        Paid.REQUEST, Kind.RATE_LIMITED)
OVERLOADED   = Meaning(Retry.BACK_OFF,  Failover.ACCOUNT,          Trips.YES,       Paid.REQUEST, Kind.OVERLOADED)
SPEND_LIMIT  = Meaning(Retry.REJECTED,  Failover.PROVIDER,         Trips.NO,        Paid.REQUEST, Kind.SPEND_LIMIT)
KEY_REFUSED  = Meaning(Retry.REJECTED,  Failover.PROVIDER,         Trips.YES,       Paid.REQUEST, Kind.FAILED)
FORBIDDEN    = Meaning(Retry.REJECTED,  Failover.PROVIDER,         Trips.NO,        Paid.REQUEST, Kind.FAILED)
REJECTED     = Meaning(Retry.REJECTED,  Failover.NOBODY,           Trips.NO,        Paid.REQUEST, Kind.FAILED)
TOO_LARGE    = Meaning(Retry.TOO_LARGE, Failover.NOBODY,           Trips.NO,        Paid.UNKNOWN, Kind.FAILED)
# fmt: on

UNREACHABLE: Final = "unreachable"
"""The type of a failure to connect. A connection that is lost after sending has the type `connection`."""
TIMEOUT: Final = "timeout"
"""The type of a call that took longer than it may, or than its request's deadline."""
_BY_TYPE: Final = {UNREACHABLE: UNSENT, "credentials": UNSENT, TIMEOUT: TIMED_OUT}
"""UNSENT: there was no connection, or no credentials to sign with, before anything was sent."""
_BY_STATUS: Final = {401: KEY_REFUSED, 403: FORBIDDEN}


class ProviderError(LanekeeperError):
    """A call failed. `detail`: one line for the requester, in which the provider may quote the request. `status`: the
    provider's, 0 if none. `retry_after_s`: the provider's `retry-after`, None if it sent none."""

    def __init__(
        self,
        detail: str,
        *,
        means: Meaning,
        status: int = 0,
        type: str = "",
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.means = means
        self.status = status
        self.type = type
        """Anthropic's error type (`overloaded_error`, …) or our own word for what happened."""
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.had_begun = False
        """Whether it came in the middle of an answer."""
        self.rate: RateHeaders | None = None
        """The account's limits in the response's headers; set by the adapter."""

    @property
    def paid(self) -> Paid:
        """What was paid, by its row in the table; unknown if an answer had begun."""
        return Paid.UNKNOWN if self.had_begun else self.means.paid

    @property
    def is_outage(self) -> bool:
        """Whether the provider itself failed, before it did anything that is paid. If its breaker is open then, the
        attempt does not count."""
        is_its_own = self.means.trips is not Trips.NO and self.means.retry is not Retry.REJECTED
        return is_its_own and self.paid is not Paid.UNKNOWN

    @property
    def brief(self) -> str:
        """For logs and events, without content: type, status and the provider's id of the request.

        Type and id come from the provider, so they are shown only if they look like a type and an id.
        """
        kind = self.type if is_word(self.type) else type(self).__name__
        status = f" {self.status}" if self.status else ""
        id = f" ({shown(self.request_id)})" if self.request_id else ""
        return f"{kind}{status}{id}"


class TransientError(ProviderError):
    """Connection lost, timeout, a 5xx, or an answer that is broken or incomplete."""

    def __init__(self, detail: str, *, status: int = 0, type: str = "", request_id: str | None = None) -> None:
        means = SERVER_ERROR if status >= 400 else _BY_TYPE.get(type, BROKEN_OFF)
        super().__init__(detail, means=means, status=status, type=type, request_id=request_id)


class ErrorFields(TypedDict, total=False):
    """What the provider may say beside a status and a type."""

    request_id: str | None
    retry_after_s: float | None


class RateLimitedError(ProviderError):
    """429."""

    def __init__(
        self, detail: str, *, status: int = 429, type: str = "rate_limit_error", **said: Unpack[ErrorFields]
    ) -> None:
        super().__init__(detail, means=RATE_LIMITED, status=status, type=type, **said)


class OverloadedError(ProviderError):
    """529, or an `overloaded_error` in the middle of a stream. May carry a `retry-after` too."""

    def __init__(
        self, detail: str, *, status: int = 529, type: str = "overloaded_error", **said: Unpack[ErrorFields]
    ) -> None:
        super().__init__(detail, means=OVERLOADED, status=status, type=type, **said)


class SpendLimitError(ProviderError):
    """The account's or the workspace's spend limit is reached: no retry helps before a person acts."""

    def __init__(self, detail: str, *, status: int = 0, type: str = "", request_id: str | None = None) -> None:
        super().__init__(detail, means=SPEND_LIMIT, status=status, type=type, request_id=request_id)


class RejectedError(ProviderError):
    """The provider refused the request for good."""

    def __init__(self, detail: str, *, status: int = 0, type: str = "", request_id: str | None = None) -> None:
        means = _BY_STATUS.get(status, REJECTED)
        super().__init__(detail, means=means, status=status, type=type, request_id=request_id)


class AnswerTooLargeError(ProviderError):
    """The answer is larger than allowed. It was paid for; another would be paid for too, and be as large."""

    def __init__(self, excess: str, *, request_id: str | None = None) -> None:
        super().__init__(
            f"the provider's answer has {excess}: ask for less "
            "(a smaller max_tokens, fewer or smaller results of tools)",
            means=TOO_LARGE,
            type="too_large",
            request_id=request_id,
        )


class BreakerOpen(LanekeeperError):
    """No call was made, and no attempt is counted: the breakers of the routes are open (`providers/breakers.py`)."""

    def __init__(self, retry_in_s: float) -> None:
        self.retry_in_s = retry_in_s
        """Until the first of them allows a call again."""
        super().__init__(f"no provider may be called for {retry_in_s:.1f} s: their last calls failed")
