"""What an error response means by its HTTP status, in every dialect."""

import re
from typing import Any, Final

from consumers.dialects.base import Failure
from consumers.failures import (
    AccountError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)

UNPAID: Final = "its account has reached a spend limit, or is not paid"
_TEMPORARY: Final = frozenset({408, 409, 424, 425})
"""408 (timeout), 409 (conflict with a call that still runs), 424 (a fault of the model, Bedrock), 425 (too early in the
handshake)."""
_ABOUT_A_MODEL: Final = re.compile(r"\bmodel\b", re.IGNORECASE)
_NOT_THERE: Final = frozenset({403, 404, 405})


def detail_of(failed: Failure) -> str:
    """The line of text for the requester."""
    kind = f"{failed.status} {failed.type}" if failed.type else str(failed.status)
    return f"{kind}: {failed.message}"


def fields_of(failed: Failure) -> dict[str, Any]:
    """The arguments of each `ProviderError`."""
    return {
        "status": failed.status,
        "type": failed.type or f"http_{failed.status}",
        "request_id": failed.request_id,
        "retry_after_s": failed.retry_after_s,
    }


def by_status(failed: Failure, *, status: int, api: str) -> ProviderError:
    """`status`: the one that counts, by the error's type. `api`: what should be at the base URL."""
    detail, fields = detail_of(failed), fields_of(failed)
    if status == 402:
        return AccountError(detail, reason=UNPAID, **fields)
    if status == 401:
        return AccountError(detail, reason="it refuses the service's key", **fields)
    if status == 429:
        return RateLimitedError(detail, **fields)
    # a 503 that says when to come back means the same as a 529
    if 529 in (status, failed.status) or (failed.status == 503 and failed.retry_after_s is not None):
        return OverloadedError(detail, **fields)
    is_temporary = status >= 500 or status in _TEMPORARY
    found = TransientError(detail, **fields) if is_temporary else RejectedError(detail, **fields)
    if failed.is_html:
        return html_instead(detail, otherwise=found, **fields)
    if status in _NOT_THERE and not _ABOUT_A_MODEL.search(failed.message):
        reason = "it permits its account nothing" if status == 403 else f"there is no {api} at its base URL"
        return AccountError(detail, reason=f"{reason} ({status})", otherwise=found, **fields)
    return found


def html_instead(detail: str, *, otherwise: ProviderError, status: int, **fields: Any) -> AccountError:
    """The exception for a page of HTML in place of an answer: it comes from a proxy, or the base URL is wrong."""
    reason = f"a page of HTML answers at its base URL ({status})"
    return AccountError(detail, reason=reason, otherwise=otherwise, status=status, **fields)
