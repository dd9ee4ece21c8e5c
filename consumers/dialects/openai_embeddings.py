"""OpenAI's embeddings: the table of the dialect. They are never streamed."""

from typing import Any, Final

from consumers.dialects.answers import Answer
from consumers.dialects.base import Dialect, StreamedAnswer
from consumers.dialects.fields import name_in
from consumers.dialects.openai import classify, error_in, error_within, is_event, read_rate, read_usage, status_of
from consumers.failures import RejectedError, TransientError
from consumers.limits.base import RateHeaders
from lanekeeper.contract.names import OPENAI_EMBEDDINGS
from topology.codec.decoding import Request


def _read_answer(
    message: dict[str, Any], body: bytes, *, provider: str, request_id: str | None, rate: RateHeaders | None
) -> Answer:
    data = message.get("data")
    if not isinstance(data, list) or not data:
        raise TransientError("the answer is JSON, but no embeddings", type="broken_answer")
    usage, is_counted = read_usage(message.get("usage"))
    return Answer(
        body=body,
        model=name_in(message.get("model")),
        provider=provider,
        usage=usage,
        request_id=request_id,
        rate=rate,
        is_counted=is_counted,
        counts_cached=True,
    )


def _new_stream(request: Request, *, max_bytes: int, max_values: int) -> StreamedAnswer:
    raise RejectedError("embeddings are not streamed", type="unsendable")


EMBEDDINGS: Final = Dialect(
    name=OPENAI_EMBEDDINGS,
    path="/embeddings",
    content=b'"embedding"',
    body=lambda request, streamed: request.body,
    read_answer=_read_answer,
    new_stream=_new_stream,
    is_event=is_event,
    error_within=error_within,
    error=error_in,
    status_of=status_of,
    classify=classify,
    read_rate=read_rate,
    joins_tokens=True,
)
