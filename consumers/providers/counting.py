"""What a provider's answers and failures mean for the budget: what the provider counted, and what it says about the
account."""

from typing import assert_never

from consumers.failures import Paid, ProviderError
from consumers.limits.amounts import NOTHING, Amounts
from consumers.limits.base import Heard, Kind
from consumers.limits.headers import RateHeaders
from consumers.providers.base import Answer, Usage

ONE_REQUEST = Amounts(requests=1)


def counted(usage: Usage) -> Amounts:
    """What an answer used. Tokens read from the cache count against no limit (docs/facts.md, section 10)."""
    return Amounts(1, usage.input_tokens + usage.cache_creation_input_tokens, usage.output_tokens)


def spent(error: ProviderError, reserved: Amounts) -> Amounts:
    """What a failed call used. If its answer was cut off or did not come in time, the usage is unknown, and the whole
    reservation counts."""
    match error.paid:
        case Paid.NOTHING:
            return NOTHING
        case Paid.REQUEST:
            return ONE_REQUEST
        case Paid.UNKNOWN:
            return reserved
        case never:
            assert_never(never)


def answered(answer: Answer, *, took_s: float) -> Heard:
    """What an answer says about the account. Output is left out: it is counted only after the headers."""
    counts = counted(answer.usage)._replace(output_tokens=0)
    return Heard(kind=Kind.ANSWERED, rate=answer.rate, counted=counts, took_s=took_s)


def failed(error: ProviderError, rate: RateHeaders | None, *, took_s: float) -> Heard:
    """What a failure says about the account."""
    return Heard(kind=error.means.says, rate=rate, retry_after_s=error.retry_after_s, took_s=took_s)
