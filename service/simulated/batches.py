"""The simulated Message Batches: create, retrieve, list, cancel, delete, and results as lines of JSON. A batch takes
its time by the clock; what has become of it is determined when somebody asks.

An invalid request in a batch fails alone, with its error in the results. Only what is wrong with the batch itself (no
or duplicated ids, too many requests) is answered 400. The markers in a request's prompt work in a batch too: an error
answer becomes the error of this request.
"""

import asyncio
import json
import math
import random
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from service.simulated import messages
from service.simulated.faults import Fault, Faults, Refusal, invalid
from service.simulated.sending import json_answer, read_body, time_text

BATCHES_PATH: Final = "/v1/messages/batches"
ID_PREFIX: Final = "msgbatch_"
KINDS: Final = ("succeeded", "errored", "canceled", "expired")
_REQUESTS_KEPT: Final = 100_000
"""In batches that have ended; the oldest batches are forgotten."""
_CALLS_KEPT: Final = 1000
_BODY_KEPT_BYTES: Final = 64 * 1024
_CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SOME: Final = 100
NEVER_S: Final = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How long batches take, and what they may have. With the defaults, a batch ends at once."""

    processing_s: float = 0.0
    item_s: float = 0.0
    """How long each request of a batch takes in addition, one after the other."""
    cancelling_s: float = 0.0
    """How long a batch goes on after it was cancelled."""
    expires_s: float = 24 * 3600.0
    is_shuffled: bool = True
    """Whether the results are in another order than the requests."""
    requests: int = 100_000
    bytes: int = 256 * 1024 * 1024
    enqueued: int = 500_000
    """How many requests may be in all batches that have not ended."""


@dataclass(slots=True, kw_only=True)
class SimulatedItem:
    """One request of a batch. `asked`: None if it is invalid; `done_s`: when its answer is there."""

    custom_id: str
    asked: messages.Asked | None = None
    refusal: Refusal | None = None
    fault: Fault | None = None
    done_s: float = NEVER_S
    kind: str = "processing"


@dataclass(slots=True, kw_only=True)
class SimulatedBatch:
    """A batch. `ends_s`: when its processing ends, if it is not cancelled."""

    id: str
    items: list[SimulatedItem]
    created_s: float
    began_s: float
    ends_s: float
    expires_s: float
    request_id: str
    line: "Callable[[SimulatedBatch, int], dict[str, Any]]"
    """What the results say of an item, by its number, besides its id."""
    cancelled_s: float | None = None
    ended_s: float | None = None

    @property
    def counts(self) -> Counter[str]:
        return Counter(item.kind for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesCall:
    """The record of one call to an endpoint of the batches."""

    endpoint: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int


class SimulatedBatches:
    """The batches of a simulated API. `calls`: the latest calls to their endpoints."""

    def __init__(self, *, check_model: Callable[[str], None], notify: Callable[[], None]) -> None:
        self._check_model = check_model
        self._notify = notify
        self._batches: OrderedDict[str, SimulatedBatch] = OrderedDict()
        self._outcomes: Counter[str] = Counter()
        self._created = 0
        self.calls: deque[BatchesCall] = deque(maxlen=_CALLS_KEPT)

    def configure(self, options: BatchOptions, *, item_faults: Faults, output_tokens: int | None, seed: int) -> None:
        """Use other options from now on. The batches stay."""
        self.options, self._item_faults, self._output_tokens, self._seed = options, item_faults, output_tokens, seed

    @property
    def all(self) -> Mapping[str, SimulatedBatch]:
        """By id, the oldest first."""
        for batch in self._batches.values():
            self._look_at(batch)
        return self._batches

    def stats(self) -> dict[str, Any]:
        batches = self.all.values()
        return {
            "created": self._created,
            "processing": sum(batch.ended_s is None for batch in batches),
            "requests": dict(sorted(self._outcomes.items())),
        }

    async def answer(self, request: web.BaseRequest, request_id: str, headers: dict[str, str]) -> web.StreamResponse:
        body = await read_body(request)
        endpoint, id = _asked(request.method, request.path.removeprefix(BATCHES_PATH))
        status = 0
        try:
            response = await self._answer(request, endpoint, id, body, request_id, headers)
            status = response.status
            return response
        except Refusal as refusal:
            status = refusal.status
            raise
        finally:
            kept = body if len(body) <= _BODY_KEPT_BYTES else b""
            self.calls.append(
                BatchesCall(
                    endpoint=endpoint,
                    method=request.method,
                    path=request.path_qs,
                    headers=request.headers,
                    body=kept,
                    status=status,
                )
            )
            self._notify()

    async def _answer(
        self, request: web.BaseRequest, endpoint: str, id: str, body: bytes, request_id: str, headers: dict[str, str]
    ) -> web.StreamResponse:
        url = f"{request.scheme}://{request.host}{BATCHES_PATH}"
        match endpoint:
            case "create":
                found = _described(await self._create(body, request_id), url)
            case "list":
                found = self._list(request.query, url)
            case "results":
                return await self._results(request, self.batch(id), headers)
            case _:
                found = getattr(self, f"_{endpoint}")(self.batch(id), url)
        return json_answer(found, headers)

    async def _create(self, body: bytes, request_id: str) -> SimulatedBatch:
        given = _requests_in(body)
        options = self.options
        if len(given) > options.requests:
            raise invalid(f"requests: at most {options.requests} are allowed, not {len(given)}")
        if self.has_no_room_for(len(given)):
            raise Refusal(
                429,
                f"This batch would exceed your organization's limit of {options.enqueued} requests in batches.",
                outcome="rate_limited",
                headers={"retry-after": "60"},
            )
        return await self.begin(given, ID_PREFIX, request_id, read=self._read, line=self._result_line)

    def has_no_room_for(self, requests: int) -> bool:
        """Whether so many more would exceed the limit of requests in batches."""
        waiting = sum(len(batch.items) for batch in self.all.values() if batch.ended_s is None)
        return waiting + requests > self.options.enqueued

    async def begin(
        self,
        given: Sequence[tuple[str, dict[str, Any]]],
        id_prefix: str,
        request_id: str,
        *,
        read: Callable[[bytes], messages.Asked],
        line: Callable[[SimulatedBatch, int], dict[str, Any]],
    ) -> SimulatedBatch:
        """A new batch of these requests by `custom_id`."""
        began_s, options = time.monotonic(), self.options
        items: list[SimulatedItem] = []
        for nth, (custom_id, params) in enumerate(given):
            items.append(self._item(custom_id, params, read=read, began_s=began_s, nth=nth))
            if nth % _SOME == _SOME - 1:
                await asyncio.sleep(0)
        self._created += 1
        batch = SimulatedBatch(
            id=f"{id_prefix}{self._created:024d}",
            items=items,
            created_s=time.time(),
            began_s=began_s,
            ends_s=min(max(item.done_s for item in items), began_s + options.expires_s),
            expires_s=options.expires_s,
            request_id=request_id,
            line=line,
        )
        self._batches[batch.id] = batch
        ended = [each for each in self._batches.values() if each.ended_s is not None]
        too_many = sum(len(each.items) for each in ended) - _REQUESTS_KEPT
        for old in ended:
            if too_many > 0:
                del self._batches[old.id]
                too_many -= len(old.items)
        return batch

    def _read(self, body: bytes) -> messages.Asked:
        asked = messages.read_request(body)
        self._check_model(asked.model)
        if asked.stream or "speed" in asked.fields:
            raise invalid(f"{'stream' if asked.stream else 'speed'}: not supported in batches")
        return asked

    def _item(
        self,
        custom_id: str,
        params: dict[str, Any],
        *,
        read: Callable[[bytes], messages.Asked],
        began_s: float,
        nth: int,
    ) -> SimulatedItem:
        body = json.dumps(params).encode()
        done_s = began_s + self.options.processing_s + (nth + 1) * self.options.item_s
        item = SimulatedItem(custom_id=custom_id, done_s=done_s)
        try:
            item.asked = asked = read(body)
            item.fault = self._item_faults.choose(asked.script, asked.prompt)
        except Refusal as refusal:
            item.refusal = refusal
            return item
        if asked.script.latency_s is not None:
            item.done_s = began_s + asked.script.latency_s
        if item.fault is not None:
            item.refusal = self._item_faults.refusal(item.fault)
        return item

    def _look_at(self, batch: SimulatedBatch) -> None:
        """Let the batch end, if it is over by now."""
        if batch.ended_s is not None or time.monotonic() < batch.ends_s:
            return
        batch.ended_s = batch.created_s + batch.ends_s - batch.began_s
        for item in batch.items:
            item.kind = self._kind(item, batch)
            self._outcomes[item.kind] += 1

    def batch(self, id: str) -> SimulatedBatch:
        if (batch := self._batches.get(id)) is None:
            raise Refusal(404, f"Batch {id[:100]} not found", outcome="not_found")
        self._look_at(batch)
        return batch

    def _retrieve(self, batch: SimulatedBatch, url: str) -> dict[str, Any]:
        return _described(batch, url)

    def _cancel(self, batch: SimulatedBatch, url: str) -> dict[str, Any]:
        if batch.ended_s is not None:
            raise invalid(f"Batch {batch.id} cannot be canceled: its processing has ended")
        self.cancel(batch)
        return _described(batch, url)

    def cancel(self, batch: SimulatedBatch) -> None:
        if batch.cancelled_s is None:
            batch.cancelled_s = time.monotonic()
            batch.ends_s = min(batch.ends_s, batch.cancelled_s + self.options.cancelling_s)

    def _delete(self, batch: SimulatedBatch, _: str) -> dict[str, Any]:
        if batch.ended_s is None:
            raise invalid(f"Batch {batch.id} cannot be deleted: cancel it first")
        del self._batches[batch.id]
        return {"id": batch.id, "type": "message_batch_deleted"}

    def _list(self, query: Mapping[str, str], url: str) -> dict[str, Any]:
        limit = query.get("limit", "20")
        if not limit.isdigit() or not 1 <= int(limit) <= 1000:
            raise invalid("limit: Input should be an integer from 1 to 1000")
        newest_first = [batch for batch in self.all.values() if batch.id.startswith(ID_PREFIX)][::-1]
        start, most = 0, int(limit)
        if "after_id" in query:
            start = newest_first.index(self.batch(query["after_id"])) + 1
        elif "before_id" in query:
            before = newest_first.index(self.batch(query["before_id"]))
            start, most = max(0, before - most), min(before, most)
        end = start + most
        has_more = start > 0 if "before_id" in query else end < len(newest_first)
        found = [_described(batch, url) for batch in newest_first[start:end]]
        return {
            "data": found,
            "has_more": has_more,
            "first_id": found[0]["id"] if found else None,
            "last_id": found[-1]["id"] if found else None,
        }

    def _kind(self, item: SimulatedItem, batch: SimulatedBatch) -> str:
        if item.done_s > batch.ends_s:
            return "expired" if batch.cancelled_s is None else "canceled"
        return "succeeded" if item.refusal is None else "errored"

    async def _results(
        self, request: web.BaseRequest, batch: SimulatedBatch, headers: dict[str, str]
    ) -> web.StreamResponse:
        lines = self.lines(batch)
        response = web.StreamResponse(headers={**headers, "content-type": "application/x-jsonl"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for line in lines:
            await response.write(line)
        await response.write_eof()
        return response

    def lines(self, batch: SimulatedBatch, *, kinds: Collection[str] = KINDS) -> list[bytes]:
        """The results of these kinds. Raises `Refusal` (404)."""
        if batch.ended_s is None:
            raise Refusal(404, f"Batch {batch.id} has no results", outcome="not_found")
        order = [nth for nth, item in enumerate(batch.items) if item.kind in kinds]
        if self.options.is_shuffled:
            random.Random(f"{self._seed} {batch.id}").shuffle(order)
        return [self._line(batch.items[nth], batch, nth) for nth in order]

    def _line(self, item: SimulatedItem, batch: SimulatedBatch, nth: int) -> bytes:
        return json.dumps({"custom_id": item.custom_id, **batch.line(batch, nth)}).encode() + b"\n"

    def output(self, asked: messages.Asked) -> messages.Output:
        """What the model writes."""
        return messages.echo(asked, output_tokens=self._output_tokens)

    def _result_line(self, batch: SimulatedBatch, nth: int) -> dict[str, Any]:
        item = batch.items[nth]
        result: dict[str, Any] = {"type": item.kind}
        if item.kind == "succeeded" and item.asked is not None:
            id = f"msg_{batch.id[9:]}{nth}"
            result["message"] = messages.message(item.asked, self.output(item.asked), id=id, tier="batch")
        elif item.kind == "errored" and item.refusal is not None:
            result["error"] = json.loads(item.refusal.body(batch.request_id))
        return {"result": result}


def _asked(method: str, path: str) -> tuple[str, str]:
    match method, path.strip("/").split("/"):
        case "POST", [""]:
            return "create", ""
        case "GET", [""]:
            return "list", ""
        case "GET", [id]:
            return "retrieve", id
        case "DELETE", [id]:
            return "delete", id
        case "POST", [id, "cancel"]:
            return "cancel", id
        case "GET", [id, "results"]:
            return "results", id
    raise Refusal(404, "Not found", outcome="not_found")


def _requests_in(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {error}") from error
    given = fields.get("requests") if isinstance(fields, dict) else None
    if not isinstance(given, list) or not given:
        raise invalid("requests: at least one request is required")
    found: dict[str, dict[str, Any]] = {}
    for nth, each in enumerate(given):
        custom_id, params = (each.get("custom_id"), each.get("params")) if isinstance(each, dict) else (None, None)
        if not isinstance(custom_id, str) or not _CUSTOM_ID.fullmatch(custom_id):
            raise invalid(f"requests.{nth}.custom_id: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'")
        if not isinstance(params, dict):
            raise invalid(f"requests.{nth}.params: Input should be a valid dictionary")
        if custom_id in found:
            raise invalid(f"requests.{nth}.custom_id: {custom_id} is duplicated")
        found[custom_id] = params
    return list(found.items())


def _described(batch: SimulatedBatch, url: str) -> dict[str, Any]:
    counts = batch.counts
    has_ended = batch.ended_s is not None
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "in_progress" if batch.cancelled_s is None else "canceling",
        "request_counts": {kind: counts[kind] for kind in ("processing", *KINDS)},
        "created_at": time_text(batch.created_s),
        "expires_at": time_text(batch.created_s + batch.expires_s),
        "ended_at": time_text(batch.ended_s),
        "cancel_initiated_at": time_text(
            None if batch.cancelled_s is None else batch.created_s + batch.cancelled_s - batch.began_s
        ),
        "archived_at": None,
        "results_url": f"{url}/{batch.id}/results" if has_ended else None,
    }
