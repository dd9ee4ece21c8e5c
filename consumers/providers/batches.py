"""Calls Anthropic's Message Batches through the client of Anthropic's own SDK. Requests are passed on as bytes, and
results are read line by line: neither is ever parsed as a whole.

A batch costs nothing but the answers in it. Which limits a batch has, and how it is priced: docs/facts.md, section 10.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, get_args
from urllib.parse import quote

import anthropic
import httpx2

from consumers.decoding import Parsing
from consumers.dialects.answers import Answer
from consumers.dialects.anthropic import MESSAGES
from consumers.dialects.anthropic_answers import read_answer
from consumers.failures import AccountError, AnswerTooLargeError, RejectedError, TransientError
from consumers.providers.errors import (
    NETWORK_ERRORS,
    from_fields,
    is_html,
    plain,
    refuse_html,
    translate_errors,
    within,
)
from consumers.providers.streams import bounded, from_json, to_json
from topology.codec import bounds

PATH: Final = "/v1/messages/batches"
CREATE_WITHIN_S: Final = 180.0
WITHIN_S: Final = 30.0
PIECE_WITHIN_S: Final = 60.0
RESULTS_WITHIN_S: Final = 20 * 60.0
"""Reading all results of a batch takes at most this long, with the work on each: less than the broker waits for the
acknowledgement of the message that they belong to."""
MISSING_FOR_S: Final = 3600.0
PAGE: Final = 100
PAGES: Final = 100
LINE_BYTES: Final = 8 * 1024 * 1024
"""A longer result is not read: it returns to its lane in one message with its request."""
_OBJECT_BYTES: Final = 1024 * 1024
_RESULTS_HEADERS: Final = {"Accept": "application/binary"}
_NO_SUCH_PATH: Final = (404, 405)
_LEAST_URGENT: Final = 1_000_000
_HEAD_BYTES: Final = 256
_HEAD: Final = re.compile(
    rb'\s*\{\s*"custom_id"\s*:\s*"([a-zA-Z0-9_-]{1,64})"'
    rb'(?:\s*,\s*"result"\s*:\s*\{\s*"type"\s*:\s*"([a-z]+)"(\s*,\s*"message"\s*:\s*)?)?'
)
"""The begin of a result as Anthropic writes it, with which the line need not be parsed to know whose result it is, or
to cut out the Message. An answer cannot contain it, because it would not be at the begin."""

Kind = Literal["succeeded", "errored", "canceled", "expired", "broken"]
_KINDS: Final[Mapping[str, Kind]] = {kind: kind for kind in get_args(Kind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """A batch as the provider describes it. `requests`: how many it has."""

    id: str
    status: Literal["in_progress", "canceling", "ended"]
    requests: int
    created_ms: int

    @property
    def is_ended(self) -> bool:
        return self.status == "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLine:
    """One line of a batch's results. `custom_id`: empty if the line has none. `kind`: `broken` if it is no result."""

    custom_id: str
    kind: Kind
    line: bytes


@dataclass(slots=True, eq=False, repr=False)  # it knows the key
class Batches:
    """The batches of one provider's account. All methods raise `ProviderError`, of the same classes as live calls."""

    client: Any
    _: KW_ONLY
    name: str
    secret: str
    max_answer_bytes: int = bounds.ANSWER_BYTES
    max_values: int = bounds.VALUES
    parsing: Parsing = field(default_factory=Parsing)
    headers_of: Callable[[Mapping[str, str]], Mapping[str, str]] = dict
    """`HeaderRules.of`: the headers that the provider gets."""
    _missing_until_s: float = field(default=0.0, init=False)

    @property
    def _max_line_bytes(self) -> int:
        return min(self.max_answer_bytes, LINE_BYTES)

    @property
    def is_missing(self) -> bool:
        """Whether the provider has answered within the last hour that it has no batches."""
        return asyncio.get_running_loop().time() < self._missing_until_s

    async def create(
        self, requests: Sequence[tuple[str, bytes]], *, headers: Mapping[str, str] | None = None
    ) -> BatchInfo:
        """Create a batch of (custom_id, body of the Messages request). `headers`: `anthropic-*`, for all.

        What is raised says whether a batch may exist: `RejectedError` and `RateLimitedError`: none; others: perhaps. A
        `RejectedError` with status 404 or 405 means that this provider has no batches (`is_missing`)."""
        items = (b'{"custom_id":"%b","params":%b}' % (custom_id.encode(), body) for custom_id, body in requests)
        body = b'{"requests":[%b]}' % b",".join(items)
        try:
            passed = self.headers_of(headers or {})
            return _info(await self._object("post", PATH, within_s=CREATE_WITHIN_S, headers=passed, content=body))
        except RejectedError as error:
            if error.status in _NO_SUCH_PATH:
                self._missing_until_s = asyncio.get_running_loop().time() + MISSING_FOR_S
            raise

    async def retrieve(self, id: str) -> BatchInfo:
        """Raises `RejectedError` with status 404 if there is no such batch."""
        return _info(await self._object("get", _path(id)))

    async def cancel(self, id: str) -> BatchInfo:
        return _info(await self._object("post", f"{_path(id)}/cancel"))

    async def list_since(self, ms: int) -> AsyncIterator[BatchInfo]:
        """The batches that were created at `ms` or later, the newest first; at most the newest 10,000."""
        after: dict[str, str] = {}
        for _ in range(PAGES):
            page = await self._object("get", PATH, params={"limit": str(PAGE), **after})
            found = page.get("data")
            for each in found if isinstance(found, list) else ():
                if (info := _info(each)).created_ms < ms:
                    return
                yield info
            if page.get("has_more") is not True or not isinstance(page.get("last_id"), str):
                return
            after = {"after_id": page["last_id"]}

    async def results(self, id: str) -> AsyncGenerator[ResultLine, None]:
        """The results of a batch that has ended, in any order, each read when the one before it was worked on."""
        # The SDK reads them from the batch's `results_url`. It would send the key to any host that is named there.
        async with (
            self._response("get", f"{_path(id)}/results", headers=_RESULTS_HEADERS) as response,
            aclosing(self._lines(response)) as lines,
        ):
            async for line, is_whole in lines:
                yield await self._read(line, is_whole=is_whole)

    async def answer(self, line: bytes) -> Answer:
        """The answer in one line of results, without its cost. Raises the `ProviderError` that it tells instead."""
        rank = (_LEAST_URGENT, len(line))
        if (excess := await self.parsing.excess(line, max_values=self.max_values, rank=rank)) is not None:
            raise AnswerTooLargeError(excess)
        result, body = await self.parsing.run(partial(_result, line), rank=rank)
        match result:
            case {"type": "succeeded", "message": dict(message)}:
                answer = read_answer(message, body, provider=self.name, request_id=None)
                return replace(answer, usage=replace(answer.usage, is_batch=True))
            case {"type": "errored", "error": dict(error)}:
                raise from_fields(MESSAGES.error(error), MESSAGES, secret=self.secret)
            case {"type": "too_large"}:
                raise AnswerTooLargeError(f"more than {self._max_line_bytes} bytes")
        raise TransientError("its line of the batch's results is no result", type="broken_answer")

    async def _read(self, line: bytes, *, is_whole: bool) -> ResultLine:
        head = _HEAD.match(line)
        custom_id, kind = (head[1].decode(), (head[2] or b"").decode()) if head else ("", "")
        if not is_whole:
            too_large = json.dumps({"custom_id": custom_id, "result": {"type": "too_large"}}).encode()
            return ResultLine(custom_id=custom_id, kind="errored", line=too_large)
        rank = (_LEAST_URGENT, len(line))
        if (
            kind not in _KINDS
            and await self.parsing.excess(line, max_values=self.max_values, rank=rank) is None
            and (found := await self.parsing.run(partial(_object_in, line), rank=rank)) is not None
        ):
            match found:
                case {"custom_id": str(custom_id), "result": {"type": str(kind)}}:
                    pass
        return ResultLine(custom_id=custom_id, kind=_KINDS.get(kind, "broken"), line=line)

    async def _lines(self, response: httpx2.Response) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Each line that is not empty, and whether it is whole: of one that is too long, only the begin is kept."""
        kept, size = bytearray(), 0
        body_pieces = aiter(response.aiter_bytes())
        until_s = asyncio.get_running_loop().time() + RESULTS_WITHIN_S
        while (piece := await self._piece(body_pieces, until_s)) is not None:
            for nth, part in enumerate(piece.split(b"\n")):
                if nth:  # a line has ended
                    if kept.strip():
                        yield bytes(kept), size <= self._max_line_bytes
                    kept.clear()
                    size = 0
                size += len(part)
                if size <= self._max_line_bytes:
                    kept += part
                else:
                    del kept[_HEAD_BYTES:]
        if kept.strip():
            if size <= self._max_line_bytes:
                _parsed(bytes(kept))  # raises if the last line, which has no end, was cut
            yield bytes(kept), size <= self._max_line_bytes

    async def _piece(self, body_pieces: AsyncIterator[bytes], until_s: float) -> bytes | None:
        left_s = until_s - asyncio.get_running_loop().time()
        async with within(min(PIECE_WITHIN_S, left_s), why="the batch's results stopped coming, or took too long"):
            with translate_errors(secret=self.secret):
                return await anext(body_pieces, None)

    async def _object(self, method: str, path: str, *, within_s: float = WITHIN_S, **more: Any) -> dict[str, Any]:
        async with (
            within(within_s, why=f"no answer from the provider within {within_s:g} s"),
            self._response(method, path, **more) as response,
        ):
            with translate_errors(secret=self.secret):
                found = bounded(response.aiter_bytes(), _OBJECT_BYTES)
                body = b"".join([piece async for piece in found])
        return _parsed(body)

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        options = {"headers": {**self.headers_of({}), **(headers or {})}, "params": dict(params or {})}
        given = {} if content is None else {"content": content}
        call = getattr(self.client, method)
        try:
            with translate_errors(secret=self.secret):
                response = await call(path, cast_to=httpx2.Response, options=options, stream=True, **given)
        except AccountError as error:
            cause = error.__cause__
            if (
                error.status in _NO_SUCH_PATH
                and error.otherwise is not None
                and isinstance(cause, anthropic.APIStatusError)
                and not is_html(cause.response.headers.get("content-type", ""))
            ):
                raise error.otherwise from cause  # it is about this batch, or about all batches
            raise
        try:
            refuse_html(response.status_code, plain(response.headers))
            yield response
        finally:
            with suppress(*NETWORK_ERRORS):
                await response.aclose()


def _path(id: str) -> str:
    return f"{PATH}/{quote(id, safe='')}"


def _info(found: object) -> BatchInfo:
    """Raises `TransientError` if it describes no batch."""
    match found:
        case {
            "id": str(id),
            "processing_status": "in_progress" | "canceling" | "ended" as status,
            "created_at": str(created),
            "request_counts": dict(counts),
        }:
            with suppress(ValueError):
                return BatchInfo(
                    id=id,
                    status=status,
                    requests=sum(count for count in counts.values() if type(count) is int),
                    created_ms=round(datetime.fromisoformat(created).timestamp() * 1000),
                )
    raise TransientError("the answer is JSON, but no batch", type="broken_answer")


def _result(line: bytes) -> tuple[object, bytes]:
    """The field `result` of a line, and the JSON of its Message, if it has one. Raises `TransientError`."""
    head = _HEAD.match(line)
    if head and head[3] and head[2] == b"succeeded":
        body = line.rstrip().removesuffix(b"}}")[head.end() :]
        if (message := _object_in(body)) is not None:
            return {"type": "succeeded", "message": message}, body
    result = _parsed(line).get("result")
    match result:
        case {"message": dict(message)}:
            return result, to_json(message)
    return result, b""


def _object_in(body: bytes) -> dict[str, Any] | None:
    try:
        found = from_json(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _parsed(body: bytes) -> dict[str, Any]:
    if (found := _object_in(body)) is None:
        raise TransientError(f"the answer ({len(body)} bytes) is no JSON object", type="broken_answer")
    return found
