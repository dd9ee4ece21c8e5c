"""OpenAI's embeddings: the table of the dialect, and how several requests become one call. They are never streamed."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from consumers.dialects.answers import Answer
from consumers.dialects.base import StreamedAnswer
from consumers.dialects.openai import answer_of
from consumers.dialects.openai_chat import CHAT
from consumers.failures import RejectedError, TransientError
from lanekeeper.contract.names import OPENAI_EMBEDDINGS
from lanekeeper.telemetry import signals
from topology.codec.decoding import Request

LEAST_TOKEN_CHARACTERS: Final = 2
"""A text is taken to have no more tokens than one for each of so many characters; four are usual in English."""
_ITEM: Final = re.compile(rb'\{[^{}\[\]]*"embedding"\s*:\s*(?:\[[^{}\[\]]*\]|"[^"]*")[^{}\[\]]*\}')
_DATA: Final = re.compile(rb'"data"\s*:\s*\[\s*$')
_INDEX: Final = re.compile(rb'"index"\s*:\s*(\d{1,9})')


def _read_answer(message: dict[str, Any], body: bytes, **about: Any) -> Answer:
    data = message.get("data")
    if not isinstance(data, list) or not data:
        raise TransientError("the answer is JSON, but no embeddings", type="broken_answer")
    return answer_of(message, body, **about)


def _new_stream(request: Request, *, max_bytes: int, max_values: int) -> StreamedAnswer:
    raise RejectedError("embeddings are not streamed", type="unsendable")


class EmbeddingInputs(NamedTuple):
    """What a request for embeddings asks for."""

    others: str
    """All fields but the input, and its kind. Requests in which this is equal may become one call."""
    inputs: list[Any]
    tokens: int
    """How many they have at most."""


def inputs_of(body: bytes) -> EmbeddingInputs:
    """The inputs in a request's body: texts, or arrays of tokens."""
    fields = json.loads(body)
    given = fields.pop("input")
    inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    others = json.dumps([fields, isinstance(inputs[0], list)], sort_keys=True)
    return EmbeddingInputs(others, inputs, sum(map(_tokens, inputs)))


def _tokens(given: object) -> int:
    size = len(given) if isinstance(given, list) else len(str(given)) // LEAST_TOKEN_CHARACTERS
    return max(1, size)


def join(several: Sequence[EmbeddingInputs]) -> bytes:
    """The body of one call for all of them."""
    fields, _ = json.loads(several[0].others)
    inputs = [each for asked in several for each in asked.inputs]
    return json.dumps({**fields, "input": inputs}, ensure_ascii=False).encode(errors="surrogatepass")


def separate(answer: Answer, several: Sequence[EmbeddingInputs]) -> list[Answer]:
    """The answer for each, with its part of the usage. The vectors are copied as they came. Raises TransientError if
    the answer has not one for each input."""
    found: dict[int, bytes] = {}
    for number, item in enumerate(_entries(answer.body)):
        index = _INDEX.search(item)
        found[number if index is None else int(index[1])] = item
    count = sum(len(asked.inputs) for asked in several)
    if found.keys() != set(range(count)):
        raise TransientError(f"{len(found)} embeddings for {count} inputs", type="broken_answer")
    made, at = [], 0
    shares = _shares(answer.usage.input_tokens, [asked.tokens for asked in several])
    for asked, tokens in zip(several, shares, strict=True):
        items = [_INDEX.sub(b'"index":%d' % nth, found[at + nth]) for nth in range(len(asked.inputs))]
        at += len(items)
        about = json.dumps({"model": answer.model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
        body = b'{"object":"list","data":[%b],%b' % (b",".join(items), about[1:].encode())
        usage = replace(answer.usage, input_tokens=tokens)
        made.append(replace(answer, body=body, usage=usage, requests=1 / len(several)))
    return made


def _entries(body: bytes) -> list[bytes]:
    """The entries of the field `data`: cut out of the answer, or, if a text has brackets in it, written anew."""
    found = list(_ITEM.finditer(body))
    if (
        found
        and _DATA.search(body, 0, found[0].start())
        and all(body[one.end() : other.start()].strip() == b"," for one, other in pairwise(found))
        and body[found[-1].end() :].lstrip().startswith(b"]")
    ):
        return [each[0] for each in found]
    return [json.dumps(each).encode() for each in json.loads(body)["data"]]


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    """Parts of a whole number, by these weights, which are the number together."""
    ends = [total * part // sum(weights) for part in accumulate(weights)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


EMBEDDINGS: Final = replace(
    CHAT,
    name=OPENAI_EMBEDDINGS,
    path="/embeddings",
    content=b'"embedding"',
    body=lambda request, streamed: request.body,
    read_answer=_read_answer,
    new_stream=_new_stream,
    operation=signals.EMBEDDINGS,
)
