"""Calls OpenAI's Batch API: a file with a request in each line is uploaded, and a batch is created of it; the answers
are in one file, the errors in another. The uploaded file is deleted when the batch has ended or was not created; the
others stay at the provider until they expire there.

A batch knows its ticket (`metadata`). So if the answer to a call that created one was lost, the list of batches says
whether it exists. If it does not, its uploaded file stays, too.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote

import httpx2

from consumers.dialects import DIALECTS
from consumers.dialects.answers import Answer
from consumers.dialects.base import Dialect
from consumers.dialects.fields import count_in, name_in
from consumers.dialects.fields import object_in as fields_in
from consumers.dialects.openai_chat import CHAT
from consumers.failures import (
    AccountError,
    AnswerTooLargeError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.providers.batches import (
    CREATE_WITHIN_S,
    NO_SUCH_PATH,
    NONE_MADE,
    PAGE,
    BatchInfo,
    BatchReader,
    Kind,
    ResultLine,
    listed,
    object_in,
    parsed,
    too_large_line,
)
from consumers.providers.errors import NETWORK_ERRORS, from_fields, from_response, plain, refuse_html
from consumers.providers.streams import error_json, to_json

FILES: Final = "/files"
BATCHES: Final = "/batches"
DELETE_WITHIN_S: Final = 10.0
VERSION: Final = "/v1"
"""Endpoints are named with it, whatever the base URL is."""
TICKET: Final = "lanekeeper_ticket"
_STATUSES: Final[Mapping[str, Literal["in_progress", "canceling", "ended"]]] = {
    "validating": "in_progress",
    "in_progress": "in_progress",
    "finalizing": "in_progress",
    "cancelling": "canceling",
    "completed": "ended",
    "cancelled": "ended",
    "expired": "ended",
    "failed": "ended",
}
_NOT_RUN: Final[Mapping[str, Kind]] = {"batch_expired": "expired", "batch_cancelled": "canceled"}
_QUEUE_FULL: Final = "token_limit_exceeded"
"""A batch fails with this code if too many tokens are in the account's batches."""
_QUEUE_FULL_S: Final = 300.0
_HEAD: Final = re.compile(
    rb'\s*\{\s*(?:"id"\s*:\s*"[^"\\]*"\s*,\s*)?"custom_id"\s*:\s*"([a-zA-Z0-9_-]{1,64})"\s*,\s*'
    rb'"response"\s*:\s*\{\s*"status_code"\s*:\s*200\s*,\s*"request_id"\s*:\s*"([^"\\]*)"\s*,\s*"body"\s*:\s*'
)
"""The begin of a result as OpenAI writes it, with which the line need not be parsed to know whose result it is, and
with `_TAIL` to cut out the answer. An answer cannot contain it, because it would not be at the begin."""
_TAIL: Final = re.compile(rb'\}\s*,\s*"error"\s*:\s*null\s*\}\s*$')


class Send(Protocol):
    """Makes a call below the provider's base URL. Raises `ProviderError` if the response is an error."""

    def __call__(self, method: str, path: str, **given: Any) -> Awaitable[httpx2.Response]: ...


@dataclass(slots=True, eq=False, repr=False)  # it knows the key
class FileBatches:
    """The batches of one account at OpenAI, or at a server that has the same API (see `Batches`)."""

    send: Send
    _: KW_ONLY
    name: str
    reader: BatchReader

    @property
    def is_missing(self) -> bool:
        return self.reader.is_missing

    async def create(
        self, requests: Sequence[tuple[str, bytes]], *, dialect: str, ticket: str, headers: Mapping[str, str]
    ) -> BatchInfo:
        endpoint = VERSION + DIALECTS[dialect].path
        lines = b"\n".join(
            b'{"custom_id":"%b","method":"POST","url":"%b","body":%b}'
            % (custom_id.encode(), endpoint.encode(), body.replace(b"\n", b" ").replace(b"\r", b" "))
            for custom_id, body in requests
        )
        form = {"files": {"file": (f"{ticket}.jsonl", lines, "application/jsonl")}, "data": {"purpose": "batch"}}
        try:
            uploaded = await self.reader.object(self._response("POST", FILES, **form), within_s=CREATE_WITHIN_S / 2)
            file = uploaded.get("id")
            asked = {
                "input_file_id": file,
                "endpoint": endpoint,
                "completion_window": "24h",
                "metadata": {TICKET: ticket},
            }
            created = self._response("POST", BATCHES, json=asked)
            try:
                return self._info(await self.reader.object(created, within_s=CREATE_WITHIN_S / 2))
            except NONE_MADE:
                await self._delete(file)
                raise
        except RejectedError as error:
            if error.status in NO_SUCH_PATH:
                self.reader.note_missing()
            raise

    async def delete_input(self, batch: BatchInfo) -> None:
        await self._delete(batch.input_file)

    async def _delete(self, file: object) -> None:
        if isinstance(file, str):
            with suppress(ProviderError):
                path = f"{FILES}/{quote(file, safe='')}"
                await self.reader.object(self._response("DELETE", path), within_s=DELETE_WITHIN_S)

    async def retrieve(self, id: str) -> BatchInfo:
        return self._info(await self._batch(id))

    async def cancel(self, id: str) -> BatchInfo:
        return self._info(await self.reader.object(self._response("POST", f"{_path(id)}/cancel")))

    def list_since(self, ms: int) -> AsyncIterator[BatchInfo]:
        return listed(self._page, self._info, since_ms=ms)

    async def _page(self, after: str) -> Mapping[str, Any]:
        params = {"limit": str(PAGE), **({"after": after} if after else {})}
        return await self.reader.object(self._response("GET", BATCHES, params=params))

    async def results(self, id: str) -> AsyncGenerator[ResultLine, None]:
        batch = await self._batch(id)
        files = [file for name in ("output_file_id", "error_file_id") if isinstance(file := batch.get(name), str)]
        if not files and count_in(batch.get("request_counts"), "completed"):
            raise TransientError("the batch's results are not there yet", type="unfinished")
        for file in files:
            async with (
                self._response("GET", f"{FILES}/{quote(file, safe='')}/content") as response,
                aclosing(self.reader.lines(response)) as lines,
            ):
                async for line, is_whole in lines:
                    yield await self._read(line, is_whole=is_whole)

    async def answer(self, line: bytes, *, dialect: str) -> Answer:
        table, secret = DIALECTS[dialect], self.reader.secret
        response, body, error = await self.reader.parse(line, _result)
        match response:
            case {"status_code": 200, "body": dict(message)}:
                if (wrong := table.error_within(message)) is not None:
                    raise from_fields(wrong, table, secret=secret, data=body)
                id = name_in(response.get("request_id")) or None
                found = table.read_answer(message, body, provider=self.name, request_id=id, rate=None)
                return replace(found, usage=replace(found.usage, is_batch=True))
            case {"status_code": int(status), "body": told} if 400 <= status < 600:
                raise self._error(status, told, table)
        if error.get("type") == "too_large":
            raise self.reader.too_large()
        if error:
            told = {"error": error}
            raise from_fields(table.error(told), table, secret=secret, data=error_json(told))
        raise TransientError("its line of the batch's results is no result", type="broken_answer")

    async def _read(self, line: bytes, *, is_whole: bool) -> ResultLine:
        head = _HEAD.match(line)
        if head is not None:
            custom_id = head[1].decode()
            return (
                ResultLine(custom_id=custom_id, kind="succeeded", line=line) if is_whole else too_large_line(custom_id)
            )
        with suppress(AnswerTooLargeError):
            match await self.reader.parse(line, object_in):
                case {"custom_id": str(custom_id), "error": {"code": str(code)}} if code in _NOT_RUN:
                    return ResultLine(custom_id=custom_id, kind=_NOT_RUN[code], line=line)
                case {"custom_id": str(custom_id), "response": {"status_code": 200}}:
                    return ResultLine(custom_id=custom_id, kind="succeeded", line=line)
                case {"custom_id": str(custom_id), **rest} if rest.get("response") or rest.get("error"):
                    return ResultLine(custom_id=custom_id, kind="errored", line=line)
                case {"custom_id": str(custom_id)}:
                    return ResultLine(custom_id=custom_id, kind="broken", line=line)
        return ResultLine(custom_id="", kind="broken", line=line)

    async def _batch(self, id: str) -> dict[str, Any]:
        return await self.reader.object(self._response("GET", _path(id)))

    def _info(self, found: Mapping[str, Any]) -> BatchInfo:
        """Raises `TransientError` if it describes no batch."""
        match found:
            case {"id": str(id), "status": str(status), "created_at": int(created_s)} if status in _STATUSES:
                ticket = fields_in(found.get("metadata")).get(TICKET)
                return BatchInfo(
                    id=id,
                    status=_STATUSES[status],
                    requests=count_in(found.get("request_counts"), "total"),
                    created_ms=1000 * created_s,
                    ticket=ticket if isinstance(ticket, str) else "",
                    refusal=self._refusal(found) if status == "failed" else None,
                    input_file=name_in(found.get("input_file_id")) or None,
                )
        raise TransientError("the answer is JSON, but no batch", type="broken_answer")

    def _refusal(self, batch: Mapping[str, Any]) -> ProviderError:
        """Why it has failed: like an error 400 for its creation."""
        match batch.get("errors"):
            case {"data": [{"code": code}, *_]} if code == _QUEUE_FULL:
                told = "too many tokens are in the account's batches"
                return RateLimitedError(told, status=429, type=_QUEUE_FULL, retry_after_s=_QUEUE_FULL_S)
            case {"data": [dict(error), *_]}:
                return self._error(400, {"error": error}, CHAT)
        return self._error(400, None, CHAT)

    def _error(self, status: int, told: object, dialect: Dialect) -> ProviderError:
        """The error of a response, from an account that is well."""
        headers = {"content-type": "application/json"}
        body = b"" if told is None else error_json(told)
        response = httpx2.Response(status, headers=headers, content=body)
        error = from_response(response, dialect, secret=self.reader.secret)
        return error.otherwise if isinstance(error, AccountError) and error.otherwise is not None else error

    @asynccontextmanager
    async def _response(self, method: str, path: str, **given: Any) -> AsyncIterator[httpx2.Response]:
        try:
            response = await self.send(method, path, **given)
        except AccountError as error:
            # a page of HTML says that there are no batches, but not that a batch is gone
            is_told = method == "POST" or error.body.lstrip().startswith("{")
            if error.status in NO_SUCH_PATH and is_told and (otherwise := error.take_otherwise()) is not None:
                try:
                    raise otherwise from error
                finally:
                    del otherwise  # its traceback holds this frame: a circle that would keep the batch
            raise
        try:
            refuse_html(response.status_code, plain(response.headers))
            yield response
        finally:
            with suppress(*NETWORK_ERRORS):
                await response.aclose()


def _path(id: str) -> str:
    return f"{BATCHES}/{quote(id, safe='')}"


def _result(line: bytes) -> tuple[Mapping[str, Any], bytes, Mapping[str, Any]]:
    """The fields `response` and `error` of a line, and the JSON of the answer, if it has one. Raises
    `TransientError`."""
    head, tail = _HEAD.match(line), _TAIL.search(line)
    if head and tail:
        body = line[head.end() : tail.start()].rstrip()
        if (message := object_in(body)) is not None:
            return {"status_code": 200, "request_id": head[2].decode(errors="replace"), "body": message}, body, {}
    found = parsed(line)
    response = fields_in(found.get("response"))
    error = fields_in(found.get("error") or found.get("result"))  # `result`: `too_large_line`
    message = response.get("body")
    return response, to_json(message) if isinstance(message, dict) else b"", error
