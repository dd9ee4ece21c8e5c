"""`/v1/messages/batches`: Anthropic's Message Batches. A batch is a group of requests (`consumers/state/groups.py`).

In this order: the body is received into a file and checked as a whole, so that a wrong request refuses the batch; the
group is opened in the store; its requests are noted there and published, some at a time; the group is sealed, and
answered. Until it is sealed, no worker runs one of them, and if this process dies before, none ever will.
"""

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from mmap import ACCESS_READ, mmap
from typing import Any, BinaryIO, Final

import structlog
from aiohttp import web

from consumers.background import Background
from consumers.batches.groups import SHOWN_WITHIN_S
from consumers.clock import moment_text, now_ms
from consumers.job import group_in
from consumers.state.base import Identity, StoreSpec, StoreUnavailable
from consumers.state.groups import KINDS, Head, Member, Opened, State, StoredGroup
from consumers.state.store import Store
from lanekeeper import Client
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import GROUP_AT_MOST, is_request_id
from lanekeeper.contract.messages import body_address_in
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.replies import Problem
from lanekeeper.requests import Options
from service.config.settings import GatewayKey, GatewaySettings
from service.gateway.access import only_value
from service.gateway.answers import in_one_line
from service.gateway.batch_bodies import BatchBody, Item
from service.gateway.calls import IDEMPOTENCY_KEY, BatchCall, Bodies, CallReader, limit_of, page_in
from service.gateway.groups import JSONL, GroupPaths
from service.gateway.problems import ApiError, answer, api_error_of, encoded, refused
from service.gateway.requests import LargeStatus
from service.gateway.shares import SharedLimit
from topology.lanes import MIB

BATCHES: Final = "/v1/messages/batches"
MOST_BYTES: Final = 256 * MIB
CREATED_AT_ONCE: Final = 4
CHECKED_AT_ONCE: Final = 100
PUBLISHED_AT_ONCE: Final = 256
PUBLISHED_BYTES: Final = 8 * MIB
LEASE_MS: Final = 30_000
"""If this process dies while it publishes a batch, the batch is void after this time."""
PAGE: Final = 20
PAGE_AT_MOST: Final = 1000
log = structlog.get_logger()
_Handler = Callable[[web.Request, GatewayKey], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class BatchPaths:
    """The handlers of Message Batches. All of them raise ApiError, LanekeeperError."""

    client: Client
    store: Store
    bodies: Bodies
    reader: CallReader
    groups: GroupPaths
    _: KW_ONLY
    spec: GatewaySettings
    kept: StoreSpec
    most_item_bytes: int
    _creating: SharedLimit = field(init=False)
    _background: Background = field(default_factory=Background, init=False)

    def __post_init__(self) -> None:
        self._creating = SharedLimit(CREATED_AT_ONCE, "batches that are being created", spared=2)

    def handlers(self) -> Mapping[tuple[str, str], _Handler]:
        return {
            ("POST", BATCHES): self._create,
            ("GET", BATCHES): self._list,
            ("GET", f"{BATCHES}/{{id}}"): self._retrieve,
            ("DELETE", f"{BATCHES}/{{id}}"): self._delete,
            ("POST", f"{BATCHES}/{{id}}/cancel"): self._cancel,
            ("GET", f"{BATCHES}/{{id}}/results"): self._results,
        }

    # ---- creating a batch --------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        key = only_value(request.headers, IDEMPOTENCY_KEY)
        created_ms = now_ms()
        try:
            batch = self.reader.read_batch(request.headers, caller, sent_ms=created_ms)
        except RequestProblem as problem:
            raise api_error_of(problem) from problem
        with self._creating.taken(caller.tenant):
            async with self.bodies.in_file(request, caller, most_bytes=MOST_BYTES) as file:
                group = await self._created(file, batch, Identity(caller.tenant or "", _id(caller, key)), created_ms)
        return self._answer(group, request)

    async def _created(self, file: BinaryIO, batch: BatchCall, identity: Identity, created_ms: int) -> StoredGroup:
        data = _mapped(file)  # closed with the last thread that reads it
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        items, expires_ms = await self._checked(data, batch, identity.id)
        head = Head(
            lease_ms=now_ms() + LEASE_MS,
            owner=batch.caller.name,
            digest=digest,
            size_bytes=len(data),
            created_ms=created_ms,
            expires_ms=expires_ms,
            keep_ms=expires_ms + self.kept.keep_ms,
            is_live=batch.is_live,
        )
        await self._check_share(identity, head)
        match await self.store.open_group(identity, head):
            case Opened.KNOWN:
                return await self._found(identity, batch.caller)
            case Opened.BUSY:
                raise refused("this batch is being created by another call", status=409)
            case Opened.CONFLICT:
                raise api_error_of(RequestProblem("idempotency_conflict", ""), chose_id=True)
            case Opened.NEW:
                pass
        try:
            await self._publish(data, items, batch, identity, head)
            if (group := await self.store.seal_group(identity)) is None:
                raise _too_slow()
        except BaseException:
            self._background.begin(self._discard(identity), name=f"discard {identity.id}")
            raise
        return group

    async def _checked(self, data: mmap, batch: BatchCall, id: str) -> tuple[Sequence[Item], int]:
        """The requests of a batch, of which each is valid, and the last one's deadline."""
        items: list[Item] = []
        expires_ms = 0
        body = BatchBody(
            data,
            most_requests=GROUP_AT_MOST,
            most_bytes=self.most_item_bytes,
            most_values=self.reader.max_values,
        ).items()

        def check() -> None:
            nonlocal expires_ms
            for item in islice(body, CHECKED_AT_ONCE):
                try:
                    request = self.reader.read_item(
                        batch, data[item.begin : item.end], request_id=f"{id}.{item.custom_id}"
                    )
                except RequestProblem as problem:
                    raise _of_item(problem, item) from problem
                items.append(item)
                expires_ms = max(expires_ms, request.deadline_ms)

        checked = -CHECKED_AT_ONCE
        while len(items) == checked + CHECKED_AT_ONCE:  # else there are no more
            checked = len(items)
            await asyncio.to_thread(check)
        return items, expires_ms

    async def _check_share(self, identity: Identity, new: Head) -> None:
        kept = [each for each in await self.store.groups_of(identity.tenant) if each.identity != identity]
        if len(kept) >= self.spec.batches_per_tenant:
            raise refused(
                f"this tenant has {len(kept)} batches and groups, as many as are kept: delete some that have ended",
                status=429,
            )
        used = sum(group.head.size_bytes for group in kept if not group.has_ended)
        if used + new.size_bytes > self.spec.batch_bytes_per_tenant:
            raise refused(
                f"this tenant's batches that have not ended have {used} bytes, and with this one more than "
                f"{self.spec.batch_bytes_per_tenant}: wait until some have ended",
                status=429,
            )

    async def _publish(
        self, data: mmap, items: Sequence[Item], batch: BatchCall, identity: Identity, head: Head
    ) -> None:
        lease_ms = head.lease_ms
        headers = {**batch.headers, n.GROUP: identity.id, n.GROUP_SIZE: len(items)}
        group = group_in(headers, key=batch.key)
        assert group is not None

        async def one(item: Item) -> None:
            options = Options(message_id=f"{identity.id}.{item.custom_id}", headers=headers, cancel_abandoned=False)
            if batch.caller.tenant is not None:
                options["tenant"] = batch.caller.tenant
            await self.client.publish(data[item.begin : item.end], key=batch.key, **options)

        for some in _portions(items):
            ids = [f"{identity.id}.{item.custom_id}" for item in some]
            if not await self.store.join(identity.tenant, group, ids, keep_until_ms=head.keep_ms):
                raise ApiError(409, "Idempotency-Key: requests of this batch were sent on their own before")
            done = await asyncio.gather(*map(one, some), return_exceptions=True)
            if failed := next((each for each in done if isinstance(each, BaseException)), None):
                raise failed
            if lease_ms - now_ms() < LEASE_MS / 2:
                lease_ms = now_ms() + LEASE_MS
                if not await self.store.renew_group(identity, lease_ms=lease_ms):
                    raise _too_slow()

    async def _discard(self, identity: Identity) -> None:
        with suppress(StoreUnavailable):  # then its lease ends
            group = await self.store.discard_group(identity)
            if group is not None and group.head.state is State.VOID:
                await self._remove(identity)

    # ---- what has become of it ---------------------------------------------------------------------------------------

    async def _retrieve(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        return self._answer(await self._asked(request, caller), request)

    async def _list(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        limit = limit_of(request.query, PAGE, 1, PAGE_AT_MOST)
        groups = [each for each in await self.store.groups_of(caller.tenant or "") if _is_visible(each, caller)]
        groups.sort(key=lambda each: (each.head.created_ms, each.identity.id), reverse=True)
        return answer(_page(groups, request.query, limit, url=_url(request)))

    async def _cancel(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        group = await self._asked(request, caller)
        if group.has_ended:
            raise ApiError(400, f"Batch {group.identity.id} cannot be canceled: its processing has ended")
        await self.groups.cancelling.cancel(group.identity)
        return self._answer(await self._asked(request, caller), request)

    async def _delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        group = await self._asked(request, caller)
        removed = await self.store.remove_group(group.identity)
        if removed is not None and removed.head.state is not State.VOID:
            raise ApiError(400, f"Batch {group.identity.id} cannot be deleted: cancel it first")
        removing = self._background.begin(self._remove(group.identity), name=f"remove {group.identity.id}")
        await asyncio.wait((removing,), timeout=SHOWN_WITHIN_S)
        return answer({"id": group.identity.id, "type": "message_batch_deleted"})

    async def _remove(self, identity: Identity) -> None:
        """Remove its results. If this process dies, they are removed when they need not be kept any longer."""
        while await self.store.remove_members(identity):
            pass

    async def _results(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        group = await self._asked(request, caller)
        if not group.has_ended:
            raise ApiError(404, f"Batch {group.identity.id} has no results")
        headers = {"content-type": JSONL, **_headers(group)}
        return await self.groups.stream(request, group, caller, BatchLines(), headers=headers)

    async def _asked(self, request: web.Request, caller: GatewayKey) -> StoredGroup:
        id = request.match_info["id"]
        if not is_request_id(id):
            raise _unknown(id)
        return await self._found(Identity(caller.tenant or "", id), caller)

    async def _found(self, identity: Identity, caller: GatewayKey) -> StoredGroup:
        group = await self.store.group(identity)
        if group is None or not _is_visible(group, caller):
            raise _unknown(identity.id)
        return group

    def _answer(self, group: StoredGroup, request: web.Request) -> web.Response:
        response = answer(_described(group, url=_url(request)))
        response.headers.update(_headers(group))
        return response


def _mapped(file: BinaryIO) -> mmap:
    try:
        return mmap(file.fileno(), 0, access=ACCESS_READ)
    except ValueError:
        raise ApiError(400, "The request body is not valid JSON: it is empty") from None


def _id(caller: GatewayKey, key: str | None) -> str:
    if key is None:
        return f"msgbatch_{secrets.token_hex(12)}"
    whose = hashlib.blake2b(f"{caller.name} {key}".encode(errors="surrogateescape"), digest_size=12)
    return f"msgbatch_{whose.hexdigest()}"


def _portions(items: Iterable[Item]) -> Iterator[list[Item]]:
    """As many as are published at a time."""
    some: list[Item] = []
    size = 0
    for item in items:
        if some and (len(some) >= PUBLISHED_AT_ONCE or size + item.end - item.begin > PUBLISHED_BYTES):
            yield some
            some, size = [], 0
        some.append(item)
        size += item.end - item.begin
    if some:
        yield some


def _is_visible(group: StoredGroup, caller: GatewayKey) -> bool:
    return group.head.state is State.SEALED and group.head.owner == caller.name


def _of_item(problem: RequestProblem, item: Item) -> ApiError:
    error = api_error_of(problem)
    error.message = f"requests.{item.number}.params: {error.message}"
    return error


def _too_slow() -> ApiError:
    return refused("the batch could not be published in time; try again")


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"Batch {id[:100]} not found")


def _url(request: web.Request) -> str:
    scheme = "https" if request.headers.get("x-forwarded-proto", "").lower() == "https" else request.scheme
    return f"{scheme}://{request.host}{BATCHES}"


def _headers(group: StoredGroup) -> dict[str, str]:
    headers = {"request-id": secrets.token_hex(16)}
    return headers | ({n.BATCHED: "live"} if group.head.is_live else {})


def _described(group: StoredGroup, *, url: str) -> dict[str, Any]:
    head, has_ended, id = group.head, group.has_ended, group.identity.id
    return {
        "id": id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "canceling" if head.cancelled_ms else "in_progress",
        "request_counts": {kind: group.counts[kind] for kind in KINDS},
        "created_at": moment_text(head.created_ms),
        "expires_at": moment_text(head.expires_ms),
        "ended_at": moment_text(group.last_ended_ms) if has_ended else None,
        "cancel_initiated_at": moment_text(head.cancelled_ms) if head.cancelled_ms else None,
        "archived_at": None,
        "results_url": f"{url}/{id}/results" if has_ended else None,
    }


def _page(groups: Sequence[StoredGroup], query: Mapping[str, str], limit: int, *, url: str) -> dict[str, Any]:
    try:
        where, has_more = page_in([group.identity.id for group in groups], query, limit)
    except KeyError as unknown:
        raise _unknown(unknown.args[0]) from None
    found = [_described(group, url=url) for group in groups[where]]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "has_more": has_more, "first_id": first, "last_id": last}


# ---- lines of results ------------------------------------------------------------------------------------------------


class BatchLines:
    """Implements `Lines`, as Anthropic's API writes them."""

    def of(self, member: Member) -> bytes | LargeStatus:
        end = member.completion
        if end is None:  # a dead letter of it was replayed, and runs again
            return self.of_lost(member, ApiError(503, "it runs again at this moment"))
        if end.status == "ok":
            begin = b'{"custom_id": %b, "result": {"type": "succeeded", "message": '
            begin %= json.dumps(_custom_id(member)).encode()
            if (kept := body_address_in(end.headers)) is not None:
                return LargeStatus(begin, kept, b"}}\n")
            return begin + in_one_line(end.body) + b"}}\n"
        if end.code == "cancelled":
            return _result(member, {"type": "canceled"})
        if end.code == "deadline_exceeded":
            return _result(member, {"type": "expired"})
        return self.of_lost(member, api_error_of(Problem(json.loads(end.body))))

    def of_lost(self, member: Member, error: ApiError) -> bytes:
        return _result(member, {"type": "errored", "error": json.loads(error.body(member.id))})


def _result(member: Member, result: Mapping[str, Any]) -> bytes:
    return encoded({"custom_id": _custom_id(member), "result": result}) + b"\n"


def _custom_id(member: Member) -> str:
    return member.id.partition(".")[2] or member.id
