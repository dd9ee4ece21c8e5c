"""Calls Anthropic's Message Batches through the client of Anthropic's own SDK."""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from typing import Any, Final, get_args
from urllib.parse import quote

import anthropic
import httpx2

from consumers.dialects.answers import Answer
from consumers.dialects.anthropic import MESSAGES
from consumers.dialects.anthropic_answers import read_answer
from consumers.failures import AccountError, AnswerTooLargeError, RejectedError, TransientError
from consumers.providers.batches import (
    CREATE_WITHIN_S,
    NO_SUCH_PATH,
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
from consumers.providers.errors import NETWORK_ERRORS, from_fields, is_html, plain, refuse_html, translate_errors
from consumers.providers.streams import error_json, to_json

PATH: Final = "/v1/messages/batches"
_RESULTS_HEADERS: Final = {"Accept": "application/binary"}
_HEAD: Final = re.compile(
    rb'\s*\{\s*"custom_id"\s*:\s*"([a-zA-Z0-9_-]{1,64})"'
    rb'(?:\s*,\s*"result"\s*:\s*\{\s*"type"\s*:\s*"([a-z]+)"(\s*,\s*"message"\s*:\s*)?)?'
)
"""The begin of a result as Anthropic writes it, with which the line need not be parsed to know whose result it is, or
to cut out the Message. An answer cannot contain it, because it would not be at the begin."""
_KINDS: Final[Mapping[str, Kind]] = {kind: kind for kind in get_args(Kind)}


@dataclass(slots=True, eq=False, repr=False)  # it knows the key
class MessageBatches:
    """The batches of one account at Anthropic (see `Batches`). `headers_of`: `HeaderRules.of`, the headers that the
    provider gets."""

    client: Any
    _: KW_ONLY
    name: str
    reader: BatchReader
    headers_of: Callable[[Mapping[str, str]], Mapping[str, str]] = dict

    @property
    def is_missing(self) -> bool:
        return self.reader.is_missing

    async def create(
        self, requests: Sequence[tuple[str, bytes]], *, dialect: str, ticket: str, headers: Mapping[str, str]
    ) -> BatchInfo:
        items = (b'{"custom_id":"%b","params":%b}' % (custom_id.encode(), body) for custom_id, body in requests)
        body = b'{"requests":[%b]}' % b",".join(items)
        try:
            created = self._response("post", PATH, headers=self.headers_of(headers), content=body)
            return _info(await self.reader.object(created, within_s=CREATE_WITHIN_S))
        except RejectedError as error:
            if error.status in NO_SUCH_PATH:
                self.reader.note_missing()
            raise

    async def retrieve(self, id: str) -> BatchInfo:
        return _info(await self.reader.object(self._response("get", _path(id))))

    async def cancel(self, id: str) -> BatchInfo:
        return _info(await self.reader.object(self._response("post", f"{_path(id)}/cancel")))

    def list_since(self, ms: int) -> AsyncIterator[BatchInfo]:
        return listed(self._page, _info, since_ms=ms)

    async def _page(self, after: str) -> Mapping[str, Any]:
        params = {"limit": str(PAGE), **({"after_id": after} if after else {})}
        return await self.reader.object(self._response("get", PATH, params=params))

    async def results(self, id: str) -> AsyncGenerator[ResultLine, None]:
        # The SDK reads them from the batch's `results_url`. It would send the key to any host that is named there.
        async with (
            self._response("get", f"{_path(id)}/results", headers=_RESULTS_HEADERS) as response,
            aclosing(self.reader.lines(response)) as lines,
        ):
            async for line, is_whole in lines:
                yield await self._read(line, is_whole=is_whole)

    async def delete_input(self, batch: BatchInfo) -> None: ...

    async def answer(self, line: bytes, *, dialect: str) -> Answer:
        result, body = await self.reader.parse(line, _result)
        match result:
            case {"type": "succeeded", "message": dict(message)}:
                answer = read_answer(message, body, provider=self.name, request_id=None)
                return replace(answer, usage=replace(answer.usage, is_batch=True))
            case {"type": "errored", "error": dict(error)}:
                raise from_fields(MESSAGES.error(error), MESSAGES, secret=self.reader.secret, data=error_json(error))
            case {"type": "too_large"}:
                raise self.reader.too_large()
        raise TransientError("its line of the batch's results is no result", type="broken_answer")

    async def _read(self, line: bytes, *, is_whole: bool) -> ResultLine:
        head = _HEAD.match(line)
        custom_id, kind = (head[1].decode(), (head[2] or b"").decode()) if head else ("", "")
        if not is_whole:
            return too_large_line(custom_id)
        if kind not in _KINDS:
            with suppress(AnswerTooLargeError):
                match await self.reader.parse(line, object_in):
                    case {"custom_id": str(custom_id), "result": {"type": str(kind)}}:
                        pass
        return ResultLine(custom_id=custom_id, kind=_KINDS.get(kind, "broken"), line=line)

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
            with translate_errors(secret=self.reader.secret):
                response = await call(path, cast_to=httpx2.Response, options=options, stream=True, **given)
        except AccountError as error:
            cause = error.__cause__
            if (
                error.status in NO_SUCH_PATH
                and isinstance(cause, anthropic.APIStatusError)
                and not is_html(cause.response.headers.get("content-type", ""))
                and (otherwise := error.take_otherwise()) is not None
            ):
                try:
                    raise otherwise from cause  # it is about this batch, or about all batches
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
        if (message := object_in(body)) is not None:
            return {"type": "succeeded", "message": message}, body
    result = parsed(line).get("result")
    match result:
        case {"message": dict(message)}:
            return result, to_json(message)
    return result, b""
