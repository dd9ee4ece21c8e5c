"""Computes what a call to a provider means for the budget: the amounts that the provider has counted for it, and what
the response says about the account's limits."""

from typing import assert_never

from consumers.failures import Paid, ProviderError
from consumers.limits.amounts import NOTHING, Amounts
from consumers.limits.base import Feedback, Kind
from consumers.limits.headers import RateHeaders
from consumers.prices import Usage
from consumers.providers.base import Answer

ONE_REQUEST = Amounts(requests=1)


def counted(usage: Usage) -> Amounts:
    """What an answer has used of its account's limits: one request, and its tokens. Tokens read from the cache count
    against no limit (docs/facts.md, section 10)."""
    return Amounts(1, usage.input_tokens + usage.cache_creation_input_tokens, usage.output_tokens)


def spent(error: ProviderError, reserved: Amounts) -> Amounts:
    """What a failed call has used of its account's limits. `reserved`: what was reserved for it. If its answer was cut
    off or did not come in time, the usage is unknown, and the whole reservation counts."""
    match error.paid:
        case Paid.NOTHING:
            return NOTHING
        case Paid.REQUEST:
            return ONE_REQUEST
        case Paid.UNKNOWN:
            return reserved
        case never:
            assert_never(never)


def answered(answer: Answer, *, took_s: float) -> Feedback:
    """What an answer says about the limits of its account. Its output tokens are left out of the counted amounts,
    because the provider counts them after it has sent the headers."""
    counts = counted(answer.usage)._replace(output_tokens=0)
    return Feedback(kind=Kind.ANSWERED, rate=answer.rate, counted=counts, took_s=took_s)


def failed(error: ProviderError, rate: RateHeaders | None, *, took_s: float) -> Feedback:
    """What a failed call says about the limits of its account."""
    return Feedback(kind=error.means.says, rate=rate, retry_after_s=error.retry_after_s, took_s=took_s)
