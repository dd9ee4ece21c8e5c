"""Anthropic's Messages API: its errors, its limits, and the table of its dialect.

An error is classified by its code, then by its type, then by the HTTP status. The status alone is not enough: after
HTTP 200 a stream can contain any error, and an HTTP 429 can mean a rate limit, which soon ends, or a spend limit, which
does not.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from consumers.dialects.answers import DONE
from consumers.dialects.anthropic_answers import read_answer
from consumers.dialects.anthropic_stream import StreamedMessage
from consumers.dialects.base import Dialect, ErrorFields, Failure, StreamedAnswer
from consumers.dialects.bodies import set_stream
from consumers.dialects.errors import UNPAID, by_status, detail_of, fields_of
from consumers.dialects.fields import bucket_headers, object_in, text_in
from consumers.failures import AccountError, ProviderError, RejectedError, TransientError
from consumers.limits.base import BucketHeaders, RateHeaders
from lanekeeper.contract.names import ANTHROPIC_MESSAGES
from topology.codec.decoding import Request

MAX_TOKENS_AT_ONCE: Final = 128_000 * 600 // 3600
"""A request with more `max_tokens` than this is always streamed, because Anthropic's client assumes a rate of output at
which the answer could take longer than ten minutes."""
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
_SPEND_LIMIT_TEXTS: Final = ("You have reached your specified API usage limits", "Your credit balance is too low")
"""They mark a spend limit in an error without an error code."""
ACCOUNT_CODES: Final[Mapping[str, str]] = {
    "organization_on_hold": "Anthropic has disabled its organization",
    "cmek_key_disabled": "the encryption key of its workspace is disabled",
    "cmek_key_network_blocked": "the encryption key of its workspace cannot be reached, because access is blocked",
    "claude_code_key_creator_not_member": "who created its key is no member of its organization any more",
    "contract_spend_limit_reached": UNPAID,
    "enforced_spend_limit_reached": UNPAID,
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
_KNOWN: Final = frozenset(
    {
        b"message_start", b"message_delta", b"message_stop", b"content_block_start", b"content_block_delta",
        b"content_block_stop", b"error",
    }
)  # fmt: skip


def error_in(body: object) -> ErrorFields:
    """What an error body says: `{"type": "error", "error": {"type", "message", "details"}, "request_id"}`."""
    whole = object_in(body)
    error = object_in(whole.get("error"))
    return ErrorFields(
        type=text_in(error.get("type")),
        code=text_in(object_in(error.get("details")).get("error_code")),
        message=text_in(error.get("message")),
        request_id=text_in(whole.get("request_id")),
    )


def classify(failed: Failure) -> ProviderError:
    """The exception for an error."""
    detail, fields = detail_of(failed), fields_of(failed)
    status = _STATUS_OF_TYPE.get(failed.type, failed.status)
    if failed.code in REQUEST_CODES:
        return RejectedError(detail, **fields)
    if failed.code in TEMPORARY_CODES:
        return TransientError(detail, **fields)
    if failed.code.endswith("spend_limit_reached"):
        return AccountError(detail, reason=UNPAID, **fields)
    # a request may name another workspace, or have brought an error to quote such a text
    if status != 402 and (failed.code in ACCOUNT_CODES or failed.message.startswith(_SPEND_LIMIT_TEXTS)):
        reason = ACCOUNT_CODES.get(failed.code, UNPAID)
        return AccountError(detail, reason=reason, otherwise=RejectedError(detail, **fields), **fields)
    return by_status(failed, status=status, api="Messages API")


def _is_readable(name: bytes, data: bytes) -> bool:
    """Whether clients read such an event. They skip what is no JSON object and has no name of Anthropic's events, such
    as a server's own keep-alive."""
    return data.lstrip().startswith(b"{") or data.strip() == DONE or name in _KNOWN


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


def read_rate(headers: Mapping[str, str], now_s: float) -> RateHeaders | None:
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
    return bucket_headers(headers.get(of_limit), headers.get(of_remaining), index)


def _is_near(text: str, now_s: float) -> bool:
    try:
        since = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return False
    return abs(since - now_s) <= _FARTHEST_RESET_S


def _error_within(event: Mapping[str, Any]) -> ErrorFields | None:
    return error_in(event) if event.get("type") == "error" else None


def _new_stream(request: Request, *, max_bytes: int, max_values: int) -> StreamedAnswer:
    return StreamedMessage(max_bytes=max_bytes, max_values=max_values)


MESSAGES: Final = Dialect(
    name=ANTHROPIC_MESSAGES,
    path="/v1/messages",
    content=b'"content_block_',
    body=lambda request, streamed: set_stream(request.body, streamed, is_stated=request.states_stream),
    streams_above=MAX_TOKENS_AT_ONCE,
    read_answer=read_answer,
    new_stream=_new_stream,
    is_event=_is_readable,
    error_within=_error_within,
    error=error_in,
    status_of=lambda error: _STATUS_OF_TYPE.get(error.type, 500),
    classify=classify,
    read_rate=read_rate,
)
