"""OpenAI's Batch API, simulated: files for batches, and batches of them. How long a batch takes, what its requests
become and what they cost is as for the Message Batches (`batches.py`).

What is wrong with a file is found when its batch is validated, so the batch exists, and has failed. A request that is
wrong fails alone.
"""

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import BodyPartReader, web

from service.simulated import openai
from service.simulated.batches import KINDS, SimulatedBatch, SimulatedBatches
from service.simulated.faults import Refusal
from service.simulated.messages import Asked
from service.simulated.openai import READERS, invalid
from service.simulated.sending import json_answer, read_body

BATCHES_PATH: Final = "/v1/batches"
FILES_PATH: Final = "/v1/files"
PURPOSE: Final = "batch"
_ID_PREFIX: Final = "batch_"
_MOST_BYTES: Final = 200 * 1024 * 1024
_KEPT: Final = 1_000
_NOT_RUN: Final = {"expired": "batch_expired", "canceled": "batch_cancelled"}


@dataclass(slots=True)
class _Given:
    """What a batch was created with. `error`: why it has failed."""

    endpoint: str
    file: str
    metadata: Any
    created_s: float = field(default_factory=time.time)
    error: Mapping[str, Any] | None = None
    requests: int = 0


class SimulatedFileBatches:
    """The files and batches of a simulated API. The oldest are dropped if there are too many."""

    def __init__(self, batches: SimulatedBatches, *, check_model: Callable[[str], None]) -> None:
        self._batches = batches
        self._check_model = check_model
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._given: OrderedDict[str, _Given] = OrderedDict()

    async def answer(self, request: web.BaseRequest, request_id: str, headers: dict[str, str]) -> web.StreamResponse:
        """Raises `Refusal`."""
        match request.method, *request.path.removeprefix("/v1/").strip("/").split("/"):
            case "POST", "files":
                found = await self._upload(request)
            case "GET", "files", id, "content":
                return web.Response(body=self._content(id), headers=headers)
            case "DELETE", "files", id:
                if self._files.pop(id, None) is None:
                    raise Refusal(404, f"No such File object: {id[:100]}", outcome="not_found")
                found = {"id": id, "object": "file", "deleted": True}
            case "POST", "batches":
                found = await self._create(await read_body(request), request_id)
            case "GET", "batches":
                found = self._page(request.query)
            case "GET", "batches", id:
                found = self._described(id)
            case "POST", "batches", id, "cancel":
                self._cancel(id)
                found = self._described(id)
            case _:
                raise Refusal(404, f"Invalid URL ({request.method} {request.path[:100]})", outcome="not_found")
        return json_answer(found, headers)

    async def _upload(self, request: web.BaseRequest) -> dict[str, Any]:
        content, purpose = None, ""
        if request.content_type == "multipart/form-data":
            async for part in await request.multipart():
                if isinstance(part, BodyPartReader) and part.name == "purpose":
                    purpose = await part.text()
                elif isinstance(part, BodyPartReader) and part.name == "file":
                    content = bytes(await part.read())
        if content is None or purpose != PURPOSE:
            raise invalid("'file' and 'purpose' (batch) are required.", param="file")
        if len(content) > _MOST_BYTES:
            raise Refusal(413, "The file is too large.", outcome="too_large")
        id = f"file-{secrets.token_hex(12)}"
        self._files[id] = content
        if len(self._files) > _KEPT:
            self._files.popitem(last=False)
        about = {"object": "file", "bytes": len(content), "created_at": int(time.time()), "filename": f"{id}.jsonl"}
        return {"id": id, **about, "purpose": purpose, "status": "processed"}

    async def _create(self, body: bytes, request_id: str) -> dict[str, Any]:
        try:
            match json.loads(body):
                case {"input_file_id": str(file), "endpoint": str(endpoint), "completion_window": "24h", **rest}:
                    given = _Given(endpoint, file, rest.get("metadata"))
                case _:
                    raise invalid("'input_file_id', 'endpoint' and 'completion_window' (24h) are required.", param=None)
        except (ValueError, RecursionError) as error:
            raise invalid("We could not parse the JSON body of your request.", param=None) from error
        if (content := self._files.get(file)) is None:
            raise Refusal(404, f"No such File object: {file[:100]}", outcome="not_found")
        if (reader := READERS.get(endpoint)) is None:
            raise invalid(f"Invalid value for 'endpoint': {endpoint[:100]}", param="endpoint")

        def read(body: bytes) -> Asked:
            asked = reader(body)
            self._check_model(asked.model)
            if asked.stream:
                raise invalid("Streaming is not supported in batches.", param="stream")
            return asked

        requests = await asyncio.to_thread(_requests_in, content, endpoint)
        if isinstance(requests, list) and len(requests) > self._batches.options.requests:
            requests = {"code": "too_many_tasks", "message": "The batch has too many requests.", "line": None}
        if isinstance(requests, list) and self._batches.has_no_room_for(len(requests)):
            requests = {"code": "token_limit_exceeded", "message": "Enqueued token limit reached.", "line": None}
        if isinstance(requests, list):
            given.requests = len(requests)
            id = (await self._batches.begin(requests, _ID_PREFIX, request_id, read=read, line=self._line)).id
        else:
            given.error = {**requests, "param": None}
            id = f"{_ID_PREFIX}failed_{secrets.token_hex(8)}"
        self._given[id] = given
        if len(self._given) > _KEPT:
            self._given.popitem(last=False)
        return self._described(id)

    def _line(self, batch: SimulatedBatch, nth: int) -> dict[str, Any]:
        item, id = batch.items[nth], f"{batch.id[6:]}{nth}"
        response: dict[str, Any] | None = None
        error = None
        if item.kind == "succeeded" and item.asked is not None:
            answer = item.asked.dialect.write(item.asked, self._batches.output(item.asked), id=id)
            # the same whenever the file is read
            answer |= {name: int(batch.created_s) for name in ("created", "created_at") if name in answer}
            response = {"status_code": 200, "request_id": batch.request_id, "body": answer}
        elif item.kind == "errored" and item.refusal is not None:
            status, body = openai.error(item.refusal)
            response = {"status_code": status, "request_id": batch.request_id, "body": json.loads(body)}
        else:
            error = {"code": _NOT_RUN[item.kind], "message": f"This request was {item.kind}."}
        return {"response": response, "error": error}

    def _content(self, id: str) -> bytes:
        if id in self._files:
            return self._files[id]
        kind, _, batch = id.removeprefix("file-").partition("-")
        if batch not in self._given or kind not in ("output", "error"):
            raise Refusal(404, f"No such File object: {id[:100]}", outcome="not_found")
        kinds = ("succeeded",) if kind == "output" else tuple(each for each in KINDS if each != "succeeded")
        return b"".join(self._batches.lines(self._batches.batch(batch), kinds=kinds))

    def _cancel(self, id: str) -> None:
        if (batch := self._running(id)) is None:
            raise Refusal(409, f"Cannot cancel a batch that has ended: {id[:100]}", outcome="invalid")
        self._batches.cancel(batch)

    def _running(self, id: str) -> SimulatedBatch | None:
        given = self._of(id)
        batch = None if given.error else self._batches.batch(id)
        return None if batch is None or batch.ended_s is not None else batch

    def _of(self, id: str) -> _Given:
        if (given := self._given.get(id)) is None:
            raise Refusal(404, f"No batch found with id '{id[:100]}'.", outcome="not_found")
        return given

    def _page(self, query: Mapping[str, str]) -> dict[str, Any]:
        ids, most = list(self._given)[::-1], int(query.get("limit", "20"))
        begin = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
        page = ids[begin : begin + most]
        return {
            "object": "list",
            "data": [self._described(id) for id in page],
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
            "has_more": len(ids) > begin + most,
        }

    def _described(self, id: str) -> dict[str, Any]:
        given = self._of(id)
        found: dict[str, Any] = {
            "id": id,
            "object": "batch",
            "endpoint": given.endpoint,
            "errors": None,
            "input_file_id": given.file,
            "completion_window": "24h",
            "status": "failed",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(given.created_s),
            "request_counts": {"total": given.requests, "completed": 0, "failed": 0},
            "metadata": given.metadata,
        }
        if given.error is not None:
            return {**found, "errors": {"object": "list", "data": [given.error]}}
        batch = self._batches.batch(id)
        counts = batch.counts
        found["request_counts"] |= {"completed": counts["succeeded"], "failed": counts["errored"]}
        if batch.ended_s is None:
            return {**found, "status": "in_progress" if batch.cancelled_s is None else "cancelling"}
        ended = "cancelled" if batch.cancelled_s is not None else "expired" if counts["expired"] else "completed"
        files = {
            "output_file_id": f"file-output-{id}" if counts["succeeded"] else None,
            "error_file_id": f"file-error-{id}" if counts.total() > counts["succeeded"] else None,
        }
        return {**found, "status": ended, **files}


def _requests_in(content: bytes, endpoint: str) -> list[tuple[str, dict[str, Any]]] | dict[str, Any]:
    """The requests by their ids, or what is wrong with the file."""
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            given = json.loads(line)
        except (ValueError, RecursionError):
            given = None
        match given:
            case {"custom_id": str(id), "method": "POST", "url": str(url), "body": dict(body)} if url == endpoint:
                if id in found:
                    return {"code": "duplicate_custom_id", "message": f"{id[:64]} is duplicated.", "line": number}
                found[id] = body
            case _:
                return {"code": "invalid_json_line", "message": "This line is no request.", "line": number}
    return list(found.items()) or {"code": "empty_file", "message": "The input file is empty.", "line": None}
