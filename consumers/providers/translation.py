"""Translates the provider's error responses, and the exceptions of Anthropic's SDK, into the exceptions of
`consumers/failures.py`.

An error is classified by its code, then by its type, then by the HTTP status. The status alone is not enough: after
HTTP 200 a stream can contain any error, and an HTTP 429 can mean a rate limit, which soon ends, or a spend limit, which
does not.
"""

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import anthropic
import httpx2

from consumers.failures import (
    TIMEOUT,
    UNREACHABLE,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    SpendLimitError,
    TransientError,
)
from consumers.limits import headers as rate_headers

_STATUS_OF_TYPE: Final[Mapping[str, int]] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_TEMPORARY: Final = frozenset({408, 409, 424, 425})
"""Statuses below 500 after which another try may succeed: 408 (timeout), 409 (conflict with a call that still runs),
424 (a fault of the model, Bedrock), 425 (too early in the handshake)."""
_SPEND_LIMIT_TEXTS: Final = ("You have reached your specified API usage limits", "Your credit balance is too low")
"""Texts by which an error is recognised as a spend limit, if it comes with HTTP 400 and without an error code."""
_LONGEST_WAIT_S: Final = 86_400.0
"""If the header `retry-after` asks for a wait of more seconds than this, the header is ignored."""
_MESSAGE_CHARACTERS: Final = 300
"""Our own error quotes at most this many characters of the message in a provider's error."""
_TYPE_CHARACTERS: Final = 60
"""Our own error quotes at most this many characters of the type in a provider's error."""
_READ_CHARACTERS: Final = 10_000
"""At most this many characters are read of the message in a provider's error, because the message may have millions of
characters."""
NETWORK_ERRORS: Final = (httpx2.RequestError, aiohttp.ClientError, OSError)
"""The exceptions of the HTTP client's transport if the network fails. Anthropic's client lets them pass as they are, or
raises its own exception with one of them as the cause."""


@contextmanager
def border(*, secret: str) -> Iterator[None]:
    """Translate the exceptions that Anthropic's SDK raises in the `with` block into those of `consumers/failures.py`.
    `secret`: the API key, which is removed from error texts."""
    try:
        yield
    except anthropic.APIStatusError as error:
        raise _from_status(error, secret=secret) from error
    except anthropic.APITimeoutError as error:
        raise TransientError("timed out while connecting to the provider", type=UNREACHABLE) from error
    except anthropic.APIConnectionError as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, NETWORK_ERRORS):
            raise RejectedError(
                f"the request cannot be sent: {_line(repr(cause), secret)}", type="unsendable"
            ) from error
        is_there = not isinstance(getattr(cause, "__cause__", None) or cause, aiohttp.ClientConnectorError)
        raise TransientError(
            f"{'the connection to the provider was lost' if is_there else 'no connection to the provider'}: "
            f"{_line(_text_of(cause), secret)}",
            type="connection" if is_there else UNREACHABLE,
        ) from error
    except httpx2.TimeoutException as error:
        raise TransientError("the provider's answer stopped coming", type=TIMEOUT) from error
    except NETWORK_ERRORS as error:
        raise TransientError(
            f"the provider's answer broke off: {_line(_text_of(error), secret)}", type="connection"
        ) from error


def from_event(event: Mapping[str, Any], *, secret: str) -> ProviderError:
    """The exception for an `error` event that the provider sent in the middle of a stream. `secret`: the API key, which
    is removed from the exception's text."""
    error = event.get("error")
    fields = error if isinstance(error, dict) else {}
    kind = _short(fields.get("type"), secret)
    details = fields.get("details")
    found = classify(
        status=_STATUS_OF_TYPE.get(kind, 500),
        type=kind,
        code=_short(details.get("error_code"), secret) if isinstance(details, dict) else "",
        message=_line(f"in the middle of the stream: {fields.get('message') or ''}", secret),
        retry_after_s=None,
    )
    found.had_begun = True
    return found


def classify(
    *, status: int, type: str, code: str, message: str, retry_after_s: float | None, request_id: str | None = None
) -> ProviderError:
    """The exception of `consumers/failures.py` for an error response of the provider. `type`, `code`: the error's type
    and code in Anthropic's format; empty if the response has none."""
    detail = f"{status} {type}: {message}" if type else f"{status}: {message}"
    fields: dict[str, Any] = {"status": status, "type": type or f"http_{status}", "request_id": request_id}
    is_spent = any(text in message for text in _SPEND_LIMIT_TEXTS)
    if code.endswith("spend_limit_reached") or type == "billing_error" or is_spent:
        return SpendLimitError(detail, **fields)
    effective = _STATUS_OF_TYPE.get(type, status)
    if effective == 429:
        return RateLimitedError(detail, retry_after_s=retry_after_s, **fields)
    # a 503 that says when to come back means the same as a 529
    if 529 in (effective, status) or (status == 503 and retry_after_s is not None):
        return OverloadedError(detail, retry_after_s=retry_after_s, **fields)
    if effective >= 500 or effective in _TEMPORARY:
        return TransientError(detail, **fields)
    return RejectedError(detail, **fields)


def read_retry_after_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """The seconds to wait, by the header `retry-after-ms` or `retry-after` (seconds or a date); None if neither has a
    sensible value.

    A value that is negative, not finite or longer than a day is ignored.
    """
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


def plain(headers: httpx2.Headers) -> dict[str, str]:
    """The headers of a response as a dict, by names in lower case: look-ups in a dict are faster than those in
    `httpx2.Headers`."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers.raw}


def _redirected(response: httpx2.Response) -> RejectedError:
    """The exception for a provider's redirect, which is not followed. The exception names only the host of the
    redirect's target, because the rest of the address may contain a secret."""
    try:
        host = urlsplit(response.headers.get("location", "")).hostname or "another path of it"
    except ValueError:
        host = "no address"
    return RejectedError(
        f"the provider's address redirects to {_line(host, '')} ({response.status_code}), which is not followed: "
        "the operator has to set the provider's base URL to where it is",
        status=502,
        type="redirected",
    )


def _from_status(error: anthropic.APIStatusError, *, secret: str) -> ProviderError:
    if 300 <= error.status_code < 400:
        return _redirected(error.response)
    headers = error.response.headers
    now_s = time.time()
    if error.api_message:
        message = _line(str(error.api_message), secret)
    else:
        message = f"not an error body of Anthropic's ({_line(headers.get('content-type', 'no content type'), secret)})"
    found = classify(
        status=error.status_code,
        type=_short(error.type, secret),
        code=_short(error.error_code, secret),
        message=message,
        retry_after_s=read_retry_after_s(headers, now_s=now_s),
        request_id=error.request_id,
    )
    found.rate = rate_headers.read(plain(headers), now_s=now_s)
    return found


def one_line(error: BaseException) -> str:
    """The class and the text of an exception, on one line. It does not remove API keys, so it is not for exceptions
    whose text may contain one."""
    return _line(_text_of(error), "")


def _text_of(error: BaseException | None) -> str:
    return f"{error.__class__.__name__} {error}".strip() if error is not None else "unknown"


def _short(value: object, secret: str) -> str:
    """The type or the code of a provider's error, cut to a short line; empty if the value is no text."""
    return _line(value, secret)[:_TYPE_CHARACTERS] if isinstance(value, str) else ""


def _line(text: str, secret: str) -> str:
    """The text as one line of at most 300 printable characters, without the API key (`secret`)."""
    cut = len(text) > _READ_CHARACTERS
    text = text[:_READ_CHARACTERS]
    if secret:
        text = text.replace(secret, "***")
        if cut:  # the text may have been cut in the middle of a key
            text = text[: -len(secret)]
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip()[:_MESSAGE_CHARACTERS]
