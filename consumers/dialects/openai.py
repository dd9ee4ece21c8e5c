"""What is common to OpenAI's dialects: errors, limits and usage. Many servers speak them, each a little differently."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from consumers.dialects.answers import DONE, Answer
from consumers.dialects.base import ErrorFields, Failure
from consumers.dialects.errors import UNPAID, by_status, detail_of, fields_of
from consumers.dialects.fields import bucket_headers, count_in, limit_in, name_in, object_in, text_in
from consumers.failures import AccountError, OverloadedError, ProviderError, RateLimitedError, RejectedError
from consumers.limits.base import RateHeaders
from consumers.prices import Usage

_DISABLED: Final = "the provider has disabled its account"
_WRONG_KEY: Final = "it refuses the service's key"
ACCOUNT_CODES: Final[Mapping[str, str]] = {
    "insufficient_quota": UNPAID,
    "billing_hard_limit_reached": UNPAID,
    "billing_not_active": UNPAID,
    "account_deactivated": _DISABLED,
    "access_terminated": _DISABLED,
    "invalid_api_key": _WRONG_KEY,
    "invalid_organization": "its organization does not exist, or the key is of another one",
    "mismatched_organization": "its organization does not exist, or the key is of another one",
    "mismatched_project": "its project does not exist, or the key is of another one",
    "unsupported_country_region_territory": "the provider does not serve the country from which it is called",
}
"""Codes of an account that answers nobody, whatever the status, with what is wrong."""
REQUEST_CODES: Final = frozenset(
    {
        "context_length_exceeded", "string_above_max_length", "content_filter", "content_policy_violation",
        "invalid_prompt", "model_not_found", "DeploymentNotFound", "bio_policy", "misalignment_policy_violation",
        "data_residency_mismatch", "invalid_image", "invalid_image_format", "invalid_base64_image", "invalid_image_url",
        "invalid_image_mode", "image_too_large", "image_too_small", "image_file_too_large", "image_parse_error",
        "image_content_policy_violation", "unsupported_image_media_type", "empty_image_file",
        "failed_to_download_image", "image_file_not_found",
    }
)  # fmt: skip
"""Codes of what is wrong with one request, whatever the status."""
_OVERLOADED_CODES: Final = frozenset({"slow_down", "engine_overloaded", "server_overloaded"})
_STATUSES: Final[Mapping[str, int]] = {
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "engine_overloaded": 503,
    "server_overloaded": 503,
}
"""Of errors that come with status 200: in the middle of a stream, or in place of an answer."""
_NEVER_FITS: Final = "Request too large"
"""So begins the message of a 429 about a request that needs more tokens than the account has in a minute."""
_TRY_AGAIN: Final = re.compile(r"(?:try again|retry) (?:in|after) ((?:\d+(?:\.\d+)?(?:ms|h|m|s)){1,4}|\d{1,6} second)")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_UNITS_S: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_LONGEST_S: Final = 86_400.0
_MEASURED_FROM_S: Final = 0.5
"""A shorter time until a reset is rounded too much to tell how fast the limit refills."""


def is_event(name: bytes, data: bytes) -> bool:
    """Whether clients read it: JSON, or `[DONE]`."""
    return data.lstrip().startswith(b"{") or data.strip() == DONE


def error_in(body: object) -> ErrorFields:
    """What an error body says: `{"error": {"message", "type", "param", "code"}}`, or one of the forms that other
    servers have in its place (a list of it; `{"error": "text"}`; the fields without `error`; FastAPI's `detail`)."""
    whole = object_in(body[0] if isinstance(body, list) and body else body)
    given = whole.get("error")
    error = given if isinstance(given, dict) else {"message": given} if isinstance(given, str) else whole
    code = text_in(error.get("code"))
    kind = text_in(error.get("type"))
    message = text_in(error.get("message")) or text_in(error.get("detail"))
    return ErrorFields(type=kind if code.isdecimal() or not code else code, code=code, message=message)


def error_within(event: Mapping[str, Any]) -> ErrorFields | None:
    """An error in place of an answer, or among the events of a stream."""
    return error_in(event) if event.get("error") or event.get("object") == "error" else None


def status_of(error: ErrorFields) -> int:
    """OpenRouter and vLLM give an HTTP status as `code`."""
    if len(error.code) == len("429") and error.code.isdecimal() and 400 <= int(error.code) < 600:
        return int(error.code)
    return 400 if error.type in REQUEST_CODES else _STATUSES.get(error.type, 500)


def classify(failed: Failure) -> ProviderError:
    """The exception for an error."""
    detail, fields = detail_of(failed), fields_of(failed)
    code = failed.type
    if (reason := ACCOUNT_CODES.get(code)) is not None:
        return AccountError(detail, reason=reason, **fields)
    if code in REQUEST_CODES:
        return RejectedError(detail, **fields)
    if failed.status == 429 or code == "rate_limit_exceeded":
        if failed.message.startswith(_NEVER_FITS):
            return RejectedError(detail, **fields)
        if failed.retry_after_s is None:
            fields["retry_after_s"] = _wait_s(failed.message)
        return RateLimitedError(detail, **fields)
    if code in _OVERLOADED_CODES or (failed.status == 503 and "overloaded" in failed.message):
        return OverloadedError(detail, **fields)
    return by_status(failed, status=failed.status, api="API of OpenAI's kind")


def _wait_s(message: str) -> float | None:
    """The pause that a message names: `Please try again in 6m0s.`"""
    found = _TRY_AGAIN.search(message)
    if found is None:
        return None
    return float(found[1].split()[0]) if found[1].endswith("second") else _seconds(found[1])


def _seconds(text: str) -> float | None:
    """A duration such as `6m0s`, `1h2m3.5s`, `17ms`, or a number of seconds; None if it is none, or too long."""
    if len(text) > 20:
        return None
    if (number := limit_in(text)) is not None:
        return number if number <= _LONGEST_S else None
    if not text or _DURATION.sub("", text):
        return None
    found = sum(float(each[1]) * _UNITS_S[each[2]] for each in _DURATION.finditer(text))
    return found if found <= _LONGEST_S else None


def read_rate(headers: Mapping[str, str], now_s: float) -> RateHeaders | None:
    """Read the limits from `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`. Input and output tokens count
    against one limit. None if the headers say nothing about limits a minute."""
    requests, tokens = (
        bucket_headers(headers.get(f"x-ratelimit-limit-{what}"), headers.get(f"x-ratelimit-remaining-{what}"), index)
        if _is_of_a_minute(headers, what)
        else bucket_headers(None, None, index)
        for index, what in enumerate(("requests", "tokens"))
    )
    found = RateHeaders(requests, tokens, replace(tokens, remaining=None))
    return found if any(each.limit or each.remaining is not None for each in found) else None


def _is_of_a_minute(headers: Mapping[str, str], what: str) -> bool:
    """Some accounts are told their limit of a day, under the same name: it refills more slowly."""
    limit, remaining = (limit_in(headers.get(f"x-ratelimit-{each}-{what}")) for each in ("limit", "remaining"))
    reset_s = _seconds(headers.get(f"x-ratelimit-reset-{what}", ""))
    if limit is None or remaining is None or reset_s is None or reset_s < _MEASURED_FROM_S:
        return True
    return 60 * (limit - remaining) / reset_s >= limit / 2


def read_usage(counts: object) -> tuple[Usage, bool]:
    """The usage of an answer, and whether it has one. Chat and embeddings have other names for it than responses."""
    given = object_in(counts)
    sent, made = ("prompt", "completion") if "prompt_tokens" in given else ("input", "output")
    cached = count_in(given.get(f"{sent}_tokens_details"), "cached_tokens")
    prompt = count_in(given, f"{sent}_tokens")
    usage = Usage(
        input_tokens=max(0, prompt - cached),
        output_tokens=count_in(given, f"{made}_tokens"),
        cache_read_input_tokens=min(cached, prompt),
    )
    return usage, type(given.get(f"{sent}_tokens")) is int


def answer_of(message: Mapping[str, Any], body: bytes, **about: Any) -> Answer:
    """The answer of these bytes. `about`: its other fields."""
    usage, is_counted = read_usage(message.get("usage"))
    model = name_in(message.get("model"))
    return Answer(body=body, model=model, usage=usage, is_counted=is_counted, counts_cached=True, **about)
