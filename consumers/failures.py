"""How an attempt can fail. What an adapter raises, and what `retry.decide` reads: the class says what may help.

ProviderError
├── TransientError          connection, timeout, 5xx, a stream or body cut short: try again
├── RateLimitedError        429: wait as told by `retry_after_s`
├── OverloadedError         529: back off
├── SpendLimitError         the account's or workspace's spend limit: never try again
├── RejectedError           the provider refused it for good (400, 401, 403, 404, 413, 422, other 4xx)
└── AnswerTooLargeError     its answer is more than can be read or sent back: another would be as large

BreakerOpen                 no call was made: every provider that may be called is known to fail now
"""

from consumers.limits.headers import RateHeaders
from lanekeeper.contract.identity import is_word, shown
from lanekeeper.contract.problems import LanekeeperError

UNREACHABLE = "unreachable"
"""The type of a failure to connect. What was sent and lost is `connection`."""
NEVER_SENT = frozenset({UNREACHABLE, "credentials"})
"""Types of failures before anything was sent: there was no connection, or nothing to sign with."""


class ProviderError(LanekeeperError):
    """An attempt failed. `detail` is one line for the requester, in which a provider may quote what it was asked;
    `status` the provider's, 0 if none."""

    def __init__(self, detail: str, *, status: int = 0, type: str = "", request_id: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status
        self.type = type
        """Anthropic's error type (`overloaded_error`, …) or our own word for what happened."""
        self.request_id = request_id
        self.had_begun = False
        """It came in the middle of an answer."""
        self.rate: RateHeaders | None = None
        """What the response told of the account's limits; set by the adapter."""

    @property
    def brief(self) -> str:
        """For logs and events, without content: type, status and the provider's id of the request.

        Type and id are the provider's words, and so they are believed only where they look like it.
        """
        kind = self.type if is_word(self.type) else type(self).__name__
        status = f" {self.status}" if self.status else ""
        id = f" ({shown(self.request_id)})" if self.request_id else ""
        return f"{kind}{status}{id}"


class TransientError(ProviderError):
    """Connection lost, time over, a 5xx, or an answer that is broken or incomplete: trying again may help."""


class RateLimitedError(ProviderError):
    """429. `retry_after_s` is what the provider told, None where it told nothing."""

    def __init__(
        self,
        detail: str,
        *,
        retry_after_s: float | None = None,
        status: int = 429,
        type: str = "rate_limit_error",
        request_id: str | None = None,
    ) -> None:
        super().__init__(detail, status=status, type=type, request_id=request_id)
        self.retry_after_s = retry_after_s


class OverloadedError(ProviderError):
    """529, or an `overloaded_error` in the middle of a stream. May carry a `retry-after` too."""

    def __init__(
        self,
        detail: str,
        *,
        retry_after_s: float | None = None,
        status: int = 529,
        type: str = "overloaded_error",
        request_id: str | None = None,
    ) -> None:
        super().__init__(detail, status=status, type=type, request_id=request_id)
        self.retry_after_s = retry_after_s


class SpendLimitError(ProviderError):
    """The account's or the workspace's spend limit is reached: no retry helps before a person acts."""


class RejectedError(ProviderError):
    """The provider refused the request for good."""


class AnswerTooLargeError(ProviderError):
    """The answer is larger than may be read. It was paid, and so would be the next, which would be as large."""

    def __init__(self, excess: str, *, request_id: str | None = None) -> None:
        super().__init__(
            f"the provider's answer has {excess}: ask for less "
            "(a smaller max_tokens, fewer or smaller results of tools)",
            type="too_large",
            request_id=request_id,
        )


class BreakerOpen(LanekeeperError):
    """No call was made, and no attempt is counted: every breaker on the way is open (`providers/breaker.py`)."""

    def __init__(self, retry_in_s: float) -> None:
        self.retry_in_s = retry_in_s
        """Until the first of them lets a call through again."""
        super().__init__(f"no provider may be called for {retry_in_s:.1f} s: their last calls failed")
