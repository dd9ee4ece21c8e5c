"""Sets attributes on running spans. The attributes are sizes, counts, names and codes, never content of requests or
answers."""

from typing import Final, TypeAlias

from opentelemetry.trace import Span, Status, StatusCode

from lanekeeper.contract.identity import is_word, shown
from lanekeeper.contract.problems import LanekeeperError, RequestProblem
from lanekeeper.telemetry import signals

Attributes: TypeAlias = dict[str, str | int | float | bool | tuple[str, ...]]
_ERROR: Final = Status(StatusCode.ERROR)


def request(span: Span, *, lane: str, app: str, attempt: int, wait_ms: int, redelivered: bool = False) -> None:
    """Write a request's lane, application, attempt and wait to its `process` span. Call it as soon as the message has
    been read. `attempt` counts from 1."""
    if not span.is_recording():
        return
    attributes: Attributes = {
        signals.LANE_NAME: lane,
        signals.LANE_APP: app,
        signals.LANE_ATTEMPT: attempt,
        signals.LANE_WAIT_MS: wait_ms,
    }
    if redelivered:
        attributes[signals.LANE_REDELIVERED] = True
    span.set_attributes(attributes)


def answer(
    span: Span,
    *,
    model: str,
    input_tokens: int,
    output_tokens: int,
    cache_read_tokens: int = 0,
    cache_write_tokens: int = 0,
    stop_reason: str | None = None,
    request_id: str | None = None,
    cost_usd: float | None = None,
) -> None:
    """Write a provider's answer (model, tokens, cost, but no content) to the `chat` span of its call. `input_tokens`
    excludes cached tokens, as in Anthropic's answers; the span's attribute is the sum of all input tokens."""
    if not span.is_recording():
        return
    attributes: Attributes = {
        signals.GEN_AI_RESPONSE_MODEL: shown(model),
        signals.GEN_AI_INPUT_TOKENS: input_tokens + cache_read_tokens + cache_write_tokens,
        signals.GEN_AI_OUTPUT_TOKENS: output_tokens,
    }
    if cache_read_tokens:
        attributes[signals.GEN_AI_CACHE_READ_TOKENS] = cache_read_tokens
    if cache_write_tokens:
        attributes[signals.GEN_AI_CACHE_WRITE_TOKENS] = cache_write_tokens
    if stop_reason is not None and is_word(stop_reason):
        attributes[signals.GEN_AI_RESPONSE_FINISH_REASONS] = (stop_reason,)
    if request_id is not None and is_word(request_id):
        attributes[signals.PROVIDER_REQUEST_ID] = request_id
    if cost_usd is not None:
        attributes[signals.LANE_COST_USD] = cost_usd
    span.set_attributes(attributes)


def outcome(span: Span, name: str, *, error: str | None = None, delay_ms: int | None = None) -> None:
    """Write a request's outcome to its `process` span. `error` (a problem's code or an error's type) marks the span as
    failed."""
    if not span.is_recording():
        return
    span.set_attribute(signals.LANE_OUTCOME, name)
    if delay_ms is not None:
        span.set_attribute(signals.LANE_DELAY_MS, delay_ms)
    if error is not None:
        fail(span, error)


def fail(span: Span, error: str) -> None:
    """Mark a span as failed. It gets no description, because an exception's text may quote a prompt or an answer."""
    span.set_attribute(signals.ERROR_TYPE, error)
    span.set_status(_ERROR)


def error_type(error: BaseException) -> str:
    """A short name for an error: a problem's code, the provider's error type, or else the exception's class.

    The provider's error type comes from the body of its answer, so it is used only if `is_word` allows it.
    """
    if isinstance(error, RequestProblem):
        return error.code
    word = getattr(error, "type", None) if isinstance(error, LanekeeperError) else None
    return word if isinstance(word, str) and is_word(word) else type(error).__name__
