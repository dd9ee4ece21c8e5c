"""Translates the provider's error responses, and the exceptions of Anthropic's SDK, into the exceptions of
`consumers/failures.py`, and reads what its headers say about limits.

An error is classified by its code, then by its type, then by the HTTP status. The status alone is not enough: after
HTTP 200 a stream can contain any error, and an HTTP 429 can mean a rate limit, which soon ends, or a spend limit, which
does not.
"""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import anthropic
import httpx2

from consumers.failures import (
    TIMEOUT,
    UNREACHABLE,
    AccountError,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
    read_retry_after_s,
)
from consumers.limits.base import LEAST_LIMITS, ROUNDED_UP_BY, BucketHeaders, RateHeaders
from lanekeeper.contract.identity import encodable
from lanekeeper.contract.problems import PROVIDER_ERROR_BYTES

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
"""408 (timeout), 409 (conflict with a call that still runs), 424 (a fault of the model, Bedrock), 425 (too early in the
handshake)."""
_SPEND_LIMIT_TEXTS: Final = ("You have reached your specified API usage limits", "Your credit balance is too low")
"""They mark a spend limit in an error without an error code."""
_UNPAID: Final = "its account has reached a spend limit, or is not paid"
ACCOUNT_CODES: Final[Mapping[str, str]] = {
    "organization_on_hold": "Anthropic has disabled its organization",
    "cmek_key_disabled": "the encryption key of its workspace is disabled",
    "cmek_key_network_blocked": "the encryption key of its workspace cannot be reached, because access is blocked",
    "claude_code_key_creator_not_member": "who created its key is no member of its organization any more",
    "contract_spend_limit_reached": _UNPAID,
    "enforced_spend_limit_reached": _UNPAID,
}
"""Error codes (`error.details.error_code`) of an account that answers nobody, with what is wrong."""
TEMPORARY_CODES: Final = frozenset({"cmek_key_unreachable", "compaction_unavailable", "thread_continue_in_flight"})
REQUEST_CODES: Final = frozenset(
    {
        "available_tools_limit_exceeded", "claude_code_version_too_old", "compaction_block_ambiguous",
        "compaction_block_misplaced", "compaction_content_mismatch", "compaction_incomplete_turn",
        "compaction_nothing_to_summarize", "compaction_signature_invalid", "compaction_too_many_tool_references",
        "compaction_tool_changes_mismatch", "image_dimensions_too_large", "linked_organization_billing_unavailable",
        "linked_organization_spend_limit_reached", "request_body_encoding_invalid",
        "request_body_encoding_unsupported", "request_body_too_large_after_decoding",
        "skill_read_blocked_undecryptable", "thread_already_continued", "thread_fingerprint_mismatch",
        "thread_not_found", "thread_unsupported_request", "tool_name_conflict", "tool_reference_unresolved",
        "user_profile_billing_not_authorized", "user_profile_not_billable", "user_profile_required",
    }
)  # fmt: skip
"""Error codes of what is wrong with one request, or with the customer's own organization or profile that it names,
whatever the status."""
LIMIT_CODES: Final = frozenset({"ramp_limit_exceeded"})
"""Their status says it."""
ERROR_BYTES: Final = 64 * 1024
"""No more of an error's body is read."""
_MESSAGE_CHARACTERS: Final = 300
_TYPE_CHARACTERS: Final = 60
_READ_CHARACTERS: Final = 10_000
"""The message may have millions of characters."""
NETWORK_ERRORS: Final = (httpx2.RequestError, aiohttp.ClientError, OSError)
"""What the transport raises if the network fails. Anthropic's client lets it pass, or raises its own with it as the
cause."""
_WRONG_ADDRESS: Final[Mapping[type[Exception], str]] = {
    aiohttp.ClientConnectorCertificateError: "its TLS certificate is not trusted",
    aiohttp.ClientConnectorSSLError: "TLS fails there",
    aiohttp.ClientConnectorDNSError: "the name of its host cannot be resolved",
    aiohttp.ClientHttpProxyError: "the HTTP proxy refuses the way to it",
    aiohttp.NonHttpUrlClientError: "its base URL is no http or https URL",
    aiohttp.InvalidURL: "its base URL is not valid",
    UnicodeError: "the name of its host is not valid",
}
"""The failures of a connection that no request causes, and that last until somebody mends them."""
_FAILURES: Final[Mapping[type[Exception], str]] = {
    aiohttp.ClientProxyConnectionError: "no connection to the HTTP proxy",
    aiohttp.ClientConnectorError: "no connection could be opened",
    aiohttp.ServerDisconnectedError: "the connection was closed",
    aiohttp.ClientPayloadError: "the body is cut or malformed",
    aiohttp.ClientResponseError: "the response is not valid HTTP",
    ConnectionResetError: "the connection was reset",
}
"""The other failures of a connection. Their own texts quote addresses and bytes, so no requester sees these."""
_ABOUT_A_MODEL: Final = re.compile(r"\bmodel\b", re.IGNORECASE)
_NOT_THERE: Final = frozenset({403, 404, 405})


@contextmanager
def translate_errors(*, secret: str) -> Iterator[None]:
    """Translate what Anthropic's SDK raises into the exceptions of `consumers/failures.py`. `secret`: the API key,
    which is removed from error texts."""
    try:
        yield
    except anthropic.APIStatusError as error:
        raise _from_status(error, secret=secret) from error
    except anthropic.APITimeoutError as error:
        raise TransientError("timed out while connecting to the provider", type=UNREACHABLE) from error
    except anthropic.APIConnectionError as error:
        cause = error.__cause__
        if cause is not None and not isinstance(cause, (*NETWORK_ERRORS, UnicodeError)):
            raise RejectedError(f"the request cannot be sent ({type(cause).__name__})", type="unsendable") from error
        raise _from_network(cause) from error
    except httpx2.TimeoutException as error:
        raise TransientError("the provider's answer stopped coming", type=TIMEOUT) from error
    except NETWORK_ERRORS as error:
        raise TransientError(f"the provider's answer broke off: {_kind(error)}", type="connection") from error


@asynccontextmanager
async def within(seconds: float, *, why: str) -> AsyncIterator[None]:
    """Raise a `TransientError` with the text `why` if the block takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TransientError(why, type=TIMEOUT) from error


def _from_network(error: BaseException | None) -> ProviderError:
    lowest = _lowest(error)
    if (reason := _named(lowest, _WRONG_ADDRESS)) is not None:
        return AccountError(reason, reason=reason, type=UNREACHABLE)
    if isinstance(lowest, aiohttp.ClientConnectorError):
        return TransientError(f"no connection to the provider: {_kind(error)}", type=UNREACHABLE)
    return TransientError(f"the connection to the provider was lost: {_kind(error)}", type="connection")


def _kind(error: BaseException | None) -> str:
    """In our own words: the exception's text may quote the base URL, which may contain a secret, and bytes of the
    response."""
    lowest = _lowest(error)
    return _named(lowest, _WRONG_ADDRESS) or _named(lowest, _FAILURES) or type(lowest).__name__


def _lowest(error: BaseException | None) -> BaseException | None:
    """aiohttp's exception, which the SDK's transport wraps."""
    return error if error is None or isinstance(error, aiohttp.ClientError) else error.__cause__ or error


def _named(error: BaseException | None, names: Mapping[type[Exception], str]) -> str | None:
    return next((name for kind, name in names.items() if isinstance(error, kind)), None)


def from_event(event: Mapping[str, Any], *, secret: str, data: bytes = b"") -> ProviderError:
    """The exception for an `error` event in the middle of a stream. `data`: its JSON."""
    found = from_body(event, secret=secret, where="in the middle of the stream: ")
    found.had_begun = True
    found.body = _body_text(data, secret)
    return found


def from_body(body: Mapping[str, Any], *, secret: str, where: str = "") -> ProviderError:
    """The exception for an error in Anthropic's format that came without an HTTP status, from an account that is
    well."""
    error = body.get("error")
    fields = error if isinstance(error, dict) else {}
    kind = _short(fields.get("type"), secret)
    details = fields.get("details")
    found = classify(
        status=_STATUS_OF_TYPE.get(kind, 500),
        type=kind,
        code=_short(details.get("error_code"), secret) if isinstance(details, dict) else "",
        message=_line(f"{where}{fields.get('message') or ''}", secret),
        retry_after_s=None,
        request_id=_short(body.get("request_id"), secret) or None,
    )
    if isinstance(found, AccountError) and found.otherwise is not None:
        found = found.otherwise
    return found


def classify(
    *,
    status: int,
    type: str,
    code: str,
    message: str,
    retry_after_s: float | None,
    request_id: str | None = None,
    is_html: bool = False,
) -> ProviderError:
    """The exception for an error response. `type`, `code`: the error's in Anthropic's format, or empty."""
    detail = f"{status} {type}: {message}" if type else f"{status}: {message}"
    fields: dict[str, Any] = {
        "status": status, "type": type or f"http_{status}", "request_id": request_id, "retry_after_s": retry_after_s
    }  # fmt: skip
    effective = _STATUS_OF_TYPE.get(type, status)
    if code in REQUEST_CODES:
        return RejectedError(detail, **fields)
    if code in TEMPORARY_CODES:
        return TransientError(detail, **fields)
    if code.endswith("spend_limit_reached") or effective == 402:
        return AccountError(detail, reason=_UNPAID, **fields)
    # a request may name another workspace, or have brought an error to quote such a text
    if code in ACCOUNT_CODES or message.startswith(_SPEND_LIMIT_TEXTS):
        reason = ACCOUNT_CODES.get(code, _UNPAID)
        return AccountError(detail, reason=reason, otherwise=RejectedError(detail, **fields), **fields)
    if effective == 401:
        return AccountError(detail, reason="it refuses the service's key", **fields)
    if effective == 429:
        return RateLimitedError(detail, **fields)
    # a 503 that says when to come back means the same as a 529
    if 529 in (effective, status) or (status == 503 and retry_after_s is not None):
        return OverloadedError(detail, **fields)
    is_temporary = effective >= 500 or effective in _TEMPORARY
    found = TransientError(detail, **fields) if is_temporary else RejectedError(detail, **fields)
    if is_html:
        return html_instead(detail, otherwise=found, **fields)
    if effective in _NOT_THERE and not _ABOUT_A_MODEL.search(message):
        reason = "it permits its account nothing" if effective == 403 else "there is no Messages API at its base URL"
        return AccountError(detail, reason=f"{reason} ({effective})", otherwise=found, **fields)
    return found


def html_instead(detail: str, *, otherwise: ProviderError, status: int, **fields: Any) -> AccountError:
    """The exception for a page of HTML in place of an answer: it comes from a proxy, or the base URL is wrong."""
    reason = f"a page of HTML answers at its base URL ({status})"
    return AccountError(detail, reason=reason, otherwise=otherwise, status=status, **fields)


def refuse_html(status: int, headers: Mapping[str, str]) -> None:
    """Raise an error if the answer is a page. `headers`: by name in lower case."""
    if is_html(headers.get("content-type", "")):
        broken = TransientError("the answer is a page of HTML", type="broken_answer")
        raise html_instead(broken.detail, otherwise=broken, status=status, type=broken.type)


_MOST_LIMIT: Final = 1e12
_FARTHEST_RESET_S: Final = 86_400.0
"""All headers about a limit are ignored if its `reset` is further away, because a bucket refills within a minute."""
_LIMITS: Final = [
    [f"anthropic-{prefix}-{what}" for what in ("reset", "limit", "remaining")]
    for prefix in ("ratelimit-requests", "ratelimit-input-tokens", "ratelimit-output-tokens")
]
_FAST_LIMITS: Final = [
    _LIMITS[0],
    *(
        [f"anthropic-fast-{name}-{what}" for what in ("reset", "limit", "remaining")]
        for name in ("input-tokens", "output-tokens")
    ),
]


def read_rate(headers: Mapping[str, str], *, now_s: float) -> RateHeaders | None:
    """Read the limits from a response's headers, `anthropic-ratelimit-{requests,input-tokens,output-tokens}-` followed
    by `limit` (per minute), `remaining` or `reset` (docs/facts.md, section 10); of an answer in fast mode, the tokens'
    `anthropic-fast-…`. Impossible values are ignored. Returns None if the headers say nothing about limits. `headers`:
    the values by name in lower case, in a dict, because a look-up in httpx2's own type searches all headers."""
    names = _FAST_LIMITS if _FAST_LIMITS[1][1] in headers else _LIMITS
    found = RateHeaders(*(_bucket_headers(headers, names[index], index, now_s) for index in range(3)))
    return found if any(header.limit or header.remaining is not None for header in found) else None


def _bucket_headers(headers: Mapping[str, str], names: Sequence[str], index: int, now_s: float) -> BucketHeaders:
    of_reset, of_limit, of_remaining = names
    reset = headers.get(of_reset)
    if reset is not None and not _is_near(reset, now_s):
        return BucketHeaders()
    limit = _number(headers.get(of_limit))
    remaining = _number(headers.get(of_remaining))
    if limit is not None and limit < LEAST_LIMITS[index]:
        return BucketHeaders()
    if limit is not None and remaining is not None and remaining > limit:
        remaining = limit if remaining <= limit + ROUNDED_UP_BY[index] else None
    return BucketHeaders(limit=limit, remaining=remaining)


def _number(text: str | None) -> float | None:
    if text is None or len(text) > 20 or not text.isascii():
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value < _MOST_LIMIT else None


def _is_near(text: str, now_s: float) -> bool:
    try:
        since = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return False
    return abs(since - now_s) <= _FARTHEST_RESET_S


def plain(headers: httpx2.Headers) -> dict[str, str]:
    """By names in lower case. Look-ups in a dict are faster than those in `httpx2.Headers`."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers.raw}


def _redirected(response: httpx2.Response) -> ProviderError:
    """A redirect is not followed. Only the host of its target is named, because the rest may contain a secret."""
    try:
        host = urlsplit(response.headers.get("location", "")).hostname or "another path of it"
    except ValueError:
        host = "no address"
    fields: dict[str, Any] = {"status": 502, "type": "redirected"}
    where = f"redirects to {_line(host, '')} ({response.status_code}), which is not followed"
    detail = f"the provider's address {where}: the operator has to set the provider's base URL to where it is"
    otherwise = RejectedError(detail, **fields)
    return AccountError(detail, reason=f"its base URL {where}", otherwise=otherwise, **fields)


def _from_status(error: anthropic.APIStatusError, *, secret: str) -> ProviderError:
    if 300 <= error.status_code < 400:
        return _redirected(error.response)
    headers = error.response.headers
    now_s = time.time()
    if error.api_message:
        message = _line(str(error.api_message), secret)
    elif len(error.response.content) >= ERROR_BYTES:
        message = f"an error body of more than {ERROR_BYTES} bytes"
    else:
        message = f"not an error body of Anthropic's ({_line(headers.get('content-type', 'no content type'), secret)})"
    found = classify(
        status=error.status_code,
        type=_short(error.type, secret),
        code=_short(error.error_code, secret),
        message=message,
        retry_after_s=read_retry_after_s(headers, now_s=now_s),
        request_id=error.request_id,
        is_html=is_html(headers.get("content-type", "")),
    )
    should_retry = headers.get("x-should-retry")
    if should_retry == "true" and isinstance(found, RejectedError):
        found = TransientError(
            found.detail,
            status=found.status,
            type=found.type,
            request_id=found.request_id,
            retry_after_s=found.retry_after_s,
        )
    for each in (found, found.otherwise if isinstance(found, AccountError) else None):
        if each is not None:
            each.body = _body_text(error.response.content, secret)
            each.rate = read_rate(plain(headers), now_s=now_s)
            each.is_final = should_retry == "false" and not isinstance(each, AccountError)
    return found


def _body_text(body: bytes, secret: str) -> str:
    """What the requester may see of an error's body."""
    try:
        text = body[: PROVIDER_ERROR_BYTES + 1].decode()
    except UnicodeDecodeError:
        if len(body) <= PROVIDER_ERROR_BYTES:
            return ""
        text = body[: PROVIDER_ERROR_BYTES + 1].decode(errors="ignore")
    if secret and secret in text:
        text = text.replace(secret, "***")
    return text[:PROVIDER_ERROR_BYTES]


def is_html(content_type: str) -> bool:
    """Whether it is a page for people."""
    return content_type.lower().lstrip().startswith(("text/html", "application/xhtml"))


def error_line(error: BaseException | None) -> str:
    """An exception on one line, for an operator. API keys are not removed."""
    return _line(f"{type(error).__name__} {error}", "")


def _short(value: object, secret: str) -> str:
    return _line(value, secret)[:_TYPE_CHARACTERS] if isinstance(value, str) else ""


def _line(text: str, secret: str) -> str:
    cut = len(text) > _READ_CHARACTERS
    text = text[:_READ_CHARACTERS]
    if secret:
        text = text.replace(secret, "***")
        if cut:  # the text may have been cut in the middle of a key
            text = text[: -len(secret)]
    return encodable(re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip()[:_MESSAGE_CHARACTERS])
