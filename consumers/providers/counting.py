"""What a provider's answers and failures mean for the budget: what it counted, and what it says about the account."""

from consumers.failures import (
    NEVER_SENT,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    SpendLimitError,
    TransientError,
)
from consumers.limits.amounts import NOTHING, Amounts
from consumers.limits.base import Heard, Kind
from consumers.limits.headers import RateHeaders
from consumers.providers.base import Answer, Usage

ONE_REQUEST = Amounts(requests=1)
_SOMETHING = Amounts(1, 1, 1)


def counted(usage: Usage) -> Amounts:
    """Of an answer: what was read from the cache counts against no limit (docs/facts.md, section 10)."""
    return Amounts(1, usage.input_tokens + usage.cache_creation_input_tokens, usage.output_tokens)


def spent(error: ProviderError, reserved: Amounts) -> Amounts:
    """Of a failure. Refused with a status of its own: the request, and no tokens. Never connected: nothing. An answer
    that broke off or did not come in time was counted as far as it got, which is not known: what was reserved."""
    match error:
        case ProviderError(had_begun=True):
            return reserved
        case RateLimitedError() | OverloadedError() | SpendLimitError() | RejectedError():
            return ONE_REQUEST
        case ProviderError(status=status) if status >= 400:
            return ONE_REQUEST
        case ProviderError(type=type) if type in NEVER_SENT:
            return NOTHING
        case _:
            return reserved


def is_unpaid(error: ProviderError) -> bool:
    """The provider's own failure, before it has done anything that it counts: none was reached, or a 5xx."""
    return isinstance(error, (TransientError, OverloadedError)) and not spent(error, _SOMETHING).output_tokens


def answered(answer: Answer, *, took_s: float) -> Heard:
    """What an answer says. Its output is counted as it is produced: after its headers."""
    counts = counted(answer.usage)._replace(output_tokens=0)
    return Heard(kind=Kind.ANSWERED, rate=answer.rate, counted=counts, took_s=took_s)


def failed(error: ProviderError, rate: RateHeaders | None, *, took_s: float) -> Heard:
    """What a failure says."""
    match error:
        case RateLimitedError(retry_after_s=retry_after_s):
            return Heard(kind=Kind.RATE_LIMITED, rate=rate, retry_after_s=retry_after_s, took_s=took_s)
        case OverloadedError(retry_after_s=retry_after_s):
            return Heard(kind=Kind.OVERLOADED, rate=rate, retry_after_s=retry_after_s, took_s=took_s)
        case SpendLimitError():
            return Heard(kind=Kind.SPEND_LIMIT, rate=rate, took_s=took_s)
        case _:
            return Heard(kind=Kind.FAILED, rate=rate, took_s=took_s)
