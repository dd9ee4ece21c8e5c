"""`/v1/requests`: submit a request, get its status, wait for its end, follow it, or cancel it.

The gateway publishes without `reply_to` and follows the request in the store, so that any gateway can answer for any
request, and nothing is lost if a gateway dies (docs/decisions/0019). In this order: the HTTP paths; what they and the
WebSocket do with requests; the JSON of a status; the poller of the store; the position of a waiting request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, NamedTuple

import structlog
from aiohttp import web

from consumers.background import Background, background_task
from consumers.clock import moment_text, now_ms
from consumers.flows import webhooks
from consumers.job import MODEL_LISTED, group_in
from consumers.slots import activity
from consumers.state import base as state
from consumers.state.base import Identity, StoreUnavailable
from consumers.state.store import Store
from lanekeeper import Client
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import encodable, is_request_id
from lanekeeper.contract.messages import BodyAddress, body_address_in
from lanekeeper.contract.problems import BrokerError, ClientMisused, LanekeeperError, RequestProblem, invalid_request
from lanekeeper.replies import ControlRefused, NoReply, Problem
from lanekeeper.telemetry import signals
from service.config.settings import GatewayKey
from service.gateway.access import Access, require_operator
from service.gateway.answers import EVENT_STREAM, StoredAnswers, event_stream, in_one_line, send_pieces
from service.gateway.calls import SUBMITTED, Bodies, CheckedCall, submitted_id_of
from service.gateway.problems import ABOUT_REQUEST, JSON, ApiError, answer, detail_of, refused, stopping
from service.gateway.shares import SharedLimit
from topology.codec.decoding import app_of

WAIT_AT_MOST_S: Final = 60.0
LAST_EVENT_ID: Final = "Last-Event-ID"
BEGIN: Final = b"retry: 1000\n\n"
HEARTBEAT: Final = b": waiting\n\n"
LARGEST_NUMBER = 1 << 53
KEPT_AFTER_MS = 86_400_000
"""For how long after its deadline a submitted request stays known to the gateway if no worker has received it."""
WAITING = frozenset({"queued", "delayed", "retrying"})
EVERY_S = 0.05
AGAIN_S = 0.5
FAULTS_AT_MOST = 3
AGE_S = 1.0
ESTIMATED_WITHIN_S = 0.5
PACE_AGE_S = 60.0
_WAIT = re.compile(r"(?P<number>\d{1,6}(\.\d{1,3})?)(?P<unit>ms|s|m)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_HEADER_FIELDS = {n.MODEL: "model", n.PROVIDER: "provider", n.WAIT_MS: "wait_ms", n.RUN_MS: "run_ms"}
log = structlog.get_logger()


@dataclass(slots=True)
class RequestPaths:
    """The handlers of the path `/v1/requests` and of those below it. All of them raise ApiError, LanekeeperError."""

    requests: SubmittedRequests
    bodies: Bodies
    answers: StoredAnswers
    _: KW_ONLY
    ping_every_s: float

    async def post(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        request[ABOUT_REQUEST] = id = submitted_id_of(request.headers)
        async with self.bodies.checked_call(request, caller, request_id=id, task=SUBMITTED) as call:
            await self.requests.submit(call, caller)
        return answer({"id": id, **request_urls(id)}, status=202, Location=request_urls(id)["status_url"])

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        request[ABOUT_REQUEST] = id = request.match_info["id"]
        wait_s, tenant = _wait_s(request.query.get("wait")), request.query.get("tenant")
        owner = await self.requests.owner_of(id, caller, tenant, acts=False)
        if owner is not caller:
            return answer(await self.requests.status_for_operator(id, owner))
        status = await self.requests.status(id, caller, wait_s=wait_s)
        if not isinstance(status, LargeStatus):
            return answer(status)
        async with self.answers.fetched(status.result, caller.tenant) as result:
            return await send_pieces(
                request,
                result.pieces(begin=status.begin, end=status.end),
                size=len(status.begin) + result.size + len(status.end),
                headers={"content-type": JSON, "cache-control": "no-store"},
            )

    async def delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        request[ABOUT_REQUEST] = id = request.match_info["id"]
        owner = await self.requests.owner_of(id, caller, request.query.get("tenant"), acts=True)
        outcome = await self.requests.cancel(id, owner)
        return answer({"id": id, "outcome": outcome}, status=200 if outcome == "ended" else 202)

    async def events(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """From the entry after `Last-Event-ID`; 204 after the last one, because then no browser connects again."""
        request[ABOUT_REQUEST] = id = request.match_info["id"]
        after = _number_of(request.headers.get(LAST_EVENT_ID))
        await self.requests.known(id, caller)
        poller = self.requests.poller
        if poller.closing.is_set():
            return _no_events_yet(id)
        writing = event_stream(request, id)
        try:
            async with (
                poller.following(caller),
                background_task(writing.pings(HEARTBEAT, every_s=self.ping_every_s), name=f"heartbeats {id}"),
                aclosing(self.requests.entries(id, caller, after=after)) as entries,
            ):
                async for entry in entries:
                    head = b"id: %d\nevent: %b\ndata: " % (entry.number, entry.kind.encode())
                    if not writing.has_begun:
                        head = BEGIN + head
                    if not isinstance(entry.body, LargeStatus):
                        await writing.write(b"%b%b\n\n" % (head, in_one_line(entry.body)))
                        continue
                    status = entry.body
                    async with self.answers.fetched(status.result, caller.tenant) as result:
                        await writing.write_all(_event_of(head, result.pieces(begin=status.begin, end=status.end)))
        except ConnectionError:
            return writing.response
        except (ApiError, LanekeeperError):
            if not writing.has_begun:
                raise
            # The stream ends without its last entry: the client connects again, and is answered with the error.
        if writing.has_begun:
            return await writing.end()
        if poller.closing.is_set():
            return _no_events_yet(id)
        return web.Response(status=204, headers={"cache-control": "no-store"})


def _no_events_yet(id: str) -> web.Response:
    """While the process stops: a browser connects again after an empty stream, and never after a 503."""
    headers = {"content-type": EVENT_STREAM, "cache-control": "no-store", "connection": "close", "request-id": id}
    return web.Response(body=BEGIN, headers=headers)


def _wait_s(text: str | None) -> float:
    if text is None:
        return 0.0
    found = _WAIT.fullmatch(text)
    wait_s = float(found["number"]) * _UNITS[found["unit"] or "s"] if found else -1.0
    if not 0 <= wait_s <= WAIT_AT_MOST_S:
        raise invalid_request(f"parameter wait: found {text[:20]!r}, allowed are 0s to {WAIT_AT_MOST_S:g}s")
    return wait_s


def _number_of(text: str | None) -> int:
    if text and (re.fullmatch("[0-9]{1,16}", text) is None or int(text) > LARGEST_NUMBER):
        raise invalid_request(f"header {LAST_EVENT_ID}: found {text[:20]!r}, allowed is an event's id")
    return int(text or 0)


async def _event_of(head: bytes, pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    yield head
    async for piece in pieces:
        yield in_one_line(piece)
    yield b"\n\n"


class SubmittedRequests:
    """Submits requests, tells of them from the store, and cancels them. A caller sees only those of its tenant."""

    def __init__(self, client: Client, store: Store, poller: Poller) -> None:
        self._client = client
        self._store = store
        self.poller = poller
        self._positions = Positions(client, store)
        self._background = Background()

    async def submit(self, call: CheckedCall, caller: GatewayKey) -> None:
        """Publish what no worker has seen, even if this call is cancelled. Raises ApiError, LanekeeperError."""
        submitting = self._background.begin(self._submit(call, caller), name=f"submit {call.request.id}")
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            await asyncio.wait((submitting,))  # until then the caller must keep the body and count the call
            raise
        finally:
            del submitting  # its error's traceback holds this frame: a circle that would keep the body

    async def known(self, id: str, caller: GatewayKey) -> Known:
        if not is_request_id(id):
            raise _unknown(id)
        identity = identity_of(id, caller)
        found, submission = await asyncio.gather(self._store.find(identity), self._store.submission(identity))
        if found is None:
            raise _unknown(id)
        return Known(id, found, submission)

    async def first_entry(self, id: str, caller: GatewayKey) -> Mapping[str, Any]:
        """What was stored when the request was submitted; empty if it is kept no longer."""
        (look,) = await self._store.look([(identity_of(id, caller), 0)])
        entry = next(iter(look.entries), None) if look is not None else None
        found: Mapping[str, Any] = json.loads(entry.body) if entry is not None and entry.kind == state.QUEUED else {}
        return found

    async def owner_of(self, id: str, caller: GatewayKey, tenant: str | None, *, acts: bool) -> GatewayKey:
        """As whom the caller gets at a request: an operator as the tenant that it names, or as the only one that has a
        request with this id, if its own has none. Raises ApiError."""
        if tenant not in (None, caller.tenant):
            require_operator(caller, acts=acts)
            return replace(caller, tenant=tenant)
        if caller.operator == "no" or (acts and caller.operator != "act") or not is_request_id(id):
            return caller
        if tenant is not None or await self._store.find(identity_of(id, caller)) is not None:
            return caller
        tenants = await self._store.tenants_of(id)
        if len(tenants) > 1:
            named = ", ".join(tenants[:20])
            raise ApiError(409, f"{len(tenants)} tenants have a request with this id: {named}; name one with ?tenant=")
        return replace(caller, tenant=tenants[0]) if tenants else caller

    async def status_for_operator(self, id: str, owner: GatewayKey) -> bytes:
        """Whose it is, and all but the answer, which is the tenant's."""
        status = status_of(await self.known(id, owner), now_ms=now_ms(), of_tenant=owner.tenant or "")
        assert isinstance(status, bytes)  # only results are large
        return status

    async def status(self, id: str, caller: GatewayKey, *, wait_s: float) -> bytes | LargeStatus:
        known = await self.known(id, caller)
        if wait_s and known.found.completion is None:
            async with self.poller.following(caller):
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self.poller.news(identity_of(id, caller), LARGEST_NUMBER)  # no entries, only the end
            known = await self.known(id, caller)
        place = pause = None
        if known.submission is not None and (word := word_of(known, now_ms())) in WAITING:
            pause = await self._pause_of(known.submission.lane, caller)
            if word == "queued" and pause is None:
                place = await self._positions.of(known.submission.lane)
        row = None if known.found.completion is None else await self._store.webhook(identity_of(id, caller))
        webhook = None if row is None else webhooks.log_entry(row)
        return status_of(known, now_ms=now_ms(), place=place, pause=pause, webhook=webhook)

    async def _pause_of(self, lane: str, caller: GatewayKey) -> state.Pause | None:
        with suppress(StoreUnavailable):
            for pause in await self._store.pauses():
                if (pause.kind, pause.name) in (("lane", lane), ("tenant", caller.tenant)):
                    return pause
        return None

    async def entries(self, id: str, caller: GatewayKey, *, after: int) -> AsyncGenerator[state.Entry | End, None]:
        identity = identity_of(id, caller)
        while (look := await self.poller.news(identity, after)) is not None:
            for entry in look.entries:
                yield entry
                after = entry.number
            if look.is_known and not (look.ended and after >= look.last):
                continue
            known = await self.known(id, caller)
            if (completion := known.found.completion) is None:
                continue  # a dead letter was replayed, and the request runs again
            if after != look.last + 1:
                yield End(look.last + 1, end_of(completion), status_of(known, now_ms=now_ms()))
            return

    async def cancel(self, id: str, caller: GatewayKey) -> str:
        known = await self.known(id, caller)
        if known.found.completion is not None:
            return "ended"
        try:
            return await self._client.cancel(id, tenant=caller.tenant)
        except NoReply:  # no worker runs: the broker keeps the cancellation
            return "unseen"
        except ControlRefused as error:
            raise refused(str(error), status=429 if error.is_passing else 503) from error

    async def forget(self, id: str, caller: GatewayKey) -> None:
        """Remove what is kept of a request that has ended, unless it was cancelled."""
        await self._store.forget(identity_of(id, caller))

    async def _submit(self, call: CheckedCall, caller: GatewayKey) -> None:
        request = call.request
        identity = identity_of(request.id, caller)
        first: dict[str, str] = {"lane": request.lane, "submitted_at": moment_text(request.published.ms)}
        if (dialect := call.options["headers"].get(n.DIALECT)) is not None:
            first |= {"dialect": str(dialect), "model": request.model}
        if request.due_ms is not None:
            first["due_at"] = moment_text(request.due_ms)
        submitted = await self._store.follow(
            identity,
            state.Submission.of(request, call.body_hash),
            first_entry=state.NewEntry(state.QUEUED, json.dumps(first).encode()),
            keep_until_ms=max(request.deadline_ms, now_ms()) + KEPT_AFTER_MS,
            group=group_in(call.options.get("headers", {}), key=call.key),
            labels=state.Labels(request.lane, app_of(call.key), encodable(request.model[:MODEL_LISTED])),
        )
        if submitted is state.Submitted.CONFLICT:
            raise RequestProblem("idempotency_conflict", "Idempotency-Key: it was used with another body")
        if submitted is state.Submitted.KNOWN and await self._is_seen(identity):
            return
        headers = {**call.options.get("headers", {}), n.SENT_MS: request.published.ms}
        if call.stream:
            headers[n.STREAM] = True
        call.options["headers"] = headers
        try:
            await self._client.publish(call.body, key=call.key, **call.options)
        except LanekeeperError as error:
            maybe_published = isinstance(error, (BrokerError, ClientMisused)) and error.maybe_published
            if submitted is state.Submitted.NEW and not maybe_published:
                await self._store.unfollow(identity)
            raise

    async def _is_seen(self, identity: Identity) -> bool:
        found = await self._store.find(identity)
        return found is not None and (found.running or found.attempts > 0 or found.completion is not None)


def identity_of(id: str, caller: GatewayKey) -> Identity:
    """The identity of a caller's request in the workers' store."""
    return Identity(caller.tenant or "", id)


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"request {id[:128]!r} is not known, or is kept no longer")


def request_urls(id: str) -> dict[str, str]:
    """The fields of an answer that tell where a request's status and events are."""
    return {"status_url": f"/v1/requests/{id}", "events_url": f"/v1/requests/{id}/events"}


@dataclass(frozen=True, slots=True)
class Known:
    """What the workers' store knows about a request. `submission`: None if it was not submitted through a gateway."""

    id: str
    found: state.Found
    submission: state.Submission | None

    @property
    def due_ms(self) -> int | None:
        return self.found.due_ms or (None if self.submission is None else self.submission.due_ms)


class LargeStatus(NamedTuple):
    """A status whose result is in the store for large bodies: the JSON before it, its address, the JSON after it."""

    begin: bytes
    result: BodyAddress
    end: bytes


class End(NamedTuple):
    """The last entry that a client gets when it follows a request: how it ended, with its status."""

    number: int
    kind: str
    body: bytes | LargeStatus


def status_of(
    known: Known,
    *,
    now_ms: int,
    place: QueuePlace | None = None,
    pause: state.Pause | None = None,
    webhook: Mapping[str, Any] | None = None,
    of_tenant: str | None = None,
) -> bytes | LargeStatus:
    """As JSON; at its end with its result or problem, and its webhook's log. `of_tenant`: for an operator: whose it is;
    then it has no result."""
    found, submission, due_ms = known.found, known.submission, known.due_ms
    ended = found.completion
    fields: dict[str, Any] = {"id": known.id, "status": word_of(known, now_ms)}
    lane = None if ended is None else ended.headers.get(n.LANE_NAME)
    if of_tenant is not None:
        fields["tenant"] = of_tenant
    fields["lane"] = (lane if submission is None else submission.lane) or found.lane or None
    fields["attempts"] = found.attempts if ended is None else ended.headers.get(n.ATTEMPT, found.attempts)
    if submission is not None:
        fields["submitted_at"] = moment_text(submission.submitted_ms)
        fields["deadline_at"] = moment_text(submission.deadline_ms)
    if ended is None:
        if found.stands:
            fields["step"] = found.stands
        if due_ms is not None and due_ms > now_ms:
            fields["due_at"] = moment_text(due_ms)
        if pause is not None:
            told = pause.as_json()
            fields["paused"] = {name: told[name] for name in ("kind", "since", "until", "why") if told[name]}
        if place is not None:
            fields["position"] = place.position
            if place.starts_in_s is not None:
                fields["predicted_start_at"] = moment_text(now_ms + round(place.starts_in_s * 1000))
        return json.dumps(fields).encode()
    fields["ended_at"] = moment_text(ended.ended_ms)
    fields |= {name: ended.headers[header] for header, name in _HEADER_FIELDS.items() if header in ended.headers}
    if webhook is not None:
        fields["webhook"] = webhook
    begin = json.dumps(fields, ensure_ascii=False).encode()[:-1]
    name = b"result" if ended.status == "ok" else b"problem"
    if name == b"result" and of_tenant is not None:
        return begin + b"}"
    if (kept := body_address_in(ended.headers)) is not None:
        return LargeStatus(b'%b, "%b": ' % (begin, name), kept, b"}")
    body = ended.body
    if name == b"problem":
        found = json.loads(body)
        body = json.dumps({**found, "detail": detail_of(Problem(found))}, ensure_ascii=False).encode()
    return b'%b, "%b": %b}' % (begin, name, body)


def word_of(known: Known, now_ms: int) -> str:
    """The field `status` of a request's status."""
    found = known.found
    if found.completion is not None:
        return end_of(found.completion)
    if found.running or (found.step and not found.is_in_batch):
        return "running"
    if found.attempts:
        return "retrying"
    return "delayed" if (known.due_ms or 0) > now_ms else "queued"


def end_of(completion: state.Completion) -> str:
    """How a request ended: `completed`, `failed` or `cancelled`."""
    if completion.status == "ok":
        return "completed"
    return "cancelled" if completion.code == "cancelled" else "failed"


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    identity: Identity
    after: int
    news: asyncio.Future[state.Look | None]


class Poller:
    """Polls the store for all requests that clients follow, with one query for all.

    A follower asks again when it has sent what it got, so that memory holds little for a slow client.
    """

    def __init__(self, store: Store, access: Access, *, followers: int) -> None:
        self._store = store
        self._access = access
        self._places = SharedLimit(followers, "calls that follow requests")
        self._waiters: set[_Waiter] = set()
        self._task: asyncio.Task[None] | None = None
        self.closing = asyncio.Event()

    @property
    def followers(self) -> int:
        return self._places.used

    @asynccontextmanager
    async def following(self, caller: GatewayKey) -> AsyncIterator[None]:
        if self.closing.is_set():
            raise stopping()
        with self._places.taken(caller.tenant):
            async with self._access.while_valid(caller):
                yield

    async def news(self, identity: Identity, after: int) -> state.Look | None:
        if self.closing.is_set():
            return None
        waiter = _Waiter(identity, after, asyncio.get_running_loop().create_future())
        self._waiters.add(waiter)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll(), name="poller")
        try:
            return await waiter.news
        finally:
            self._waiters.discard(waiter)

    def close(self) -> None:
        self.closing.set()
        for waiter in self._waiters:
            if not waiter.news.done():
                waiter.news.set_result(None)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _poll(self) -> None:
        faults = 0
        while waiters := list(self._waiters):
            pause_s = EVERY_S
            try:
                found = await self._store.look([(waiter.identity, waiter.after) for waiter in waiters])
            except StoreUnavailable:
                pause_s = AGAIN_S
            except Exception:
                log.exception(signals.HANDLER_FAILED, where="look")
                pause_s, faults = AGAIN_S, faults + 1
                if faults >= FAULTS_AT_MOST:
                    self._fail(waiters)
            else:
                faults = 0
                for waiter, look in zip(waiters, found, strict=True):
                    if look is not None and not waiter.news.done():
                        waiter.news.set_result(look)
                        self._waiters.discard(waiter)
            await asyncio.sleep(pause_s)

    def _fail(self, waiters: list[_Waiter]) -> None:
        for waiter in waiters:
            self._waiters.discard(waiter)
            if not waiter.news.done():
                waiter.news.set_exception(ApiError(500, "a fault of Lanekeeper; its log tells of it"))


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The estimated position of a waiting request in its lane, and when it may start."""

    position: int
    """How many requests are ahead of it at most: some of those counted may be behind it."""
    starts_in_s: float | None
    """If the lane goes on at its pace of the last minute. None: the pace is unknown, or no worker consumes the lane."""


class Positions:
    """Estimates a lane's last position, as that of all its requests: broker and store are asked once a second."""

    def __init__(self, client: Client, store: state.Allowances) -> None:
        self._client = client
        self._store = store
        self._places: dict[str, tuple[float, QueuePlace | None]] = {}
        self._paces: dict[str, tuple[float, float]] = {}

    async def of(self, lane: str) -> QueuePlace | None:
        now_s = asyncio.get_running_loop().time()
        at_s, place = self._places.get(lane, (-AGE_S, None))
        if now_s - at_s >= AGE_S:
            self._places[lane] = now_s, place  # so that other calls use the old estimate instead of asking as well
            place = await self._estimate(lane)
            self._places[lane] = now_s, place
        return place

    async def _estimate(self, lane: str) -> QueuePlace | None:
        try:
            async with asyncio.timeout(ESTIMATED_WITHIN_S):
                depth, per_s = await asyncio.gather(self._client.depth(lane), self._pace(lane))
        except TimeoutError:
            return None
        if depth is None or not depth.ready:  # the queue is empty: a worker or a side queue has the request
            return None
        return QueuePlace(depth.ready - 1, None if per_s is None or not depth.consumers else depth.ready / per_s)

    async def _pace(self, lane: str) -> float | None:
        now_s = asyncio.get_running_loop().time()
        with suppress(StoreUnavailable):
            if found := await activity.ended_per_s(self._store, lane):
                self._paces[lane] = now_s, found
        at_s, last = self._paces.get(lane, (now_s - PACE_AGE_S, None))
        return last if now_s - at_s < PACE_AGE_S else None
