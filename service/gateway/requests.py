"""`/v1/requests`: submit a request, ask for its status, wait for its end, cancel it.

The gateway publishes without `reply_to` and follows the request in the store, so that any gateway can serve any
request, and none of them holds anything that could be lost with it (docs/decisions/0019).
"""

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from multidict import MultiMapping

from consumers.background import Background
from consumers.job import moment_text, now_ms
from consumers.state.base import Found, Identity, StoreUnavailable
from consumers.state.following import QUEUED, FollowedStore, Submission, Submitted, Told
from lanekeeper import Client
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import is_request_id
from lanekeeper.contract.problems import BrokerError, LanekeeperError, RequestProblem
from lanekeeper.errors import ControlRefused, NoReply
from service.config.gateway_section import GatewayKey
from service.gateway.asking import Asked, Reading, request_id_of
from service.gateway.bodies import Bodies
from service.gateway.documents import answer, path_of, refusal, status_of
from service.gateway.looking import Looking
from service.gateway.positions import Positions
from service.gateway.problems import ApiError, refused
from service.gateway.room import Room

WAIT_AT_MOST_S = 60.0
"""The longest `?wait=`: proxies and clients seldom keep a call open for longer."""
KEPT_AFTER_MS = 86_400_000
"""How long a submission is known after its deadline where no worker runs."""
_WAIT = re.compile(r"(?P<number>\d{1,6}(\.\d{1,3})?)(?P<unit>ms|s|m)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
WITHOUT_LIMIT = 1 << 53
"""After this entry's number nothing is new but the end."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about a request."""

    found: Found
    submission: Submission | None


class Requests:
    """Submits, finds and cancels the requests of a caller's tenant."""

    def __init__(
        self,
        client: Client,
        store: FollowedStore,
        *,
        reading: Reading,
        room: Room,
        bodies: Bodies,
        looking: Looking,
    ) -> None:
        self._client = client
        self._store = store
        self._reading = reading
        self._room = room
        self._bodies = bodies
        self._looking = looking
        self._background = Background()
        self._positions = Positions(client)

    async def post(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """`POST /v1/requests`."""
        id: str | None = None
        try:
            id, chose_id = request_id_of(request.headers)
            with self._room.taken(self._bodies.memory_of(request)):
                read = partial(self._read, request.headers, caller=caller, id=id, chose_id=chose_id)
                async with self._bodies.asked(request, read) as asked:
                    await self._submitted(asked, caller)
        except (ApiError, LanekeeperError) as error:
            return refusal(error, id)
        path = path_of(id)
        told = json.dumps({"id": id, "status_url": path, "events_url": f"{path}/events"}).encode()
        return answer(told, status=202, Location=path)

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """`GET /v1/requests/{id}`."""
        id = request.match_info["id"]
        try:
            wait_s = _wait_s(request.query.get("wait"))
            return answer(await self.status(id, caller, wait_s=wait_s))
        except (ApiError, LanekeeperError) as error:
            return refusal(error, id)

    async def delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """`DELETE /v1/requests/{id}`."""
        id = request.match_info["id"]
        try:
            outcome = await self.cancel(id, caller)
        except (ApiError, LanekeeperError) as error:
            return refusal(error, id)
        told = json.dumps({"id": id, "outcome": outcome}).encode()
        return answer(told, status=200 if outcome == "ended" else 202)

    async def submit(
        self, said: MultiMapping[str], body: bytes, caller: GatewayKey, *, id: str, chose_id: bool
    ) -> None:
        """Publish a request, unless it is known. Raises ApiError, LanekeeperError."""
        with self._room.taken(len(body)):
            await self._submitted(self._read(said, body, caller, id=id, chose_id=chose_id), caller)

    def _read(self, said: MultiMapping[str], body: bytes, caller: GatewayKey, *, id: str, chose_id: bool) -> Asked:
        return self._reading.read(said, body, caller, request_id=id, chose_id=chose_id, task="requests")

    async def _submitted(self, asked: Asked, caller: GatewayKey) -> None:
        submitting = self._background.begin(self._submit(asked, caller), name=f"submit {asked.request.id}")
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # The client has gone, and the request is published all the same. Until then its body is needed, and the
            # call is under way.
            await asyncio.wait((submitting,))
            raise

    async def known(self, id: str, caller: GatewayKey) -> Known:
        """What is known about a request of the caller's tenant. Raises ApiError 404, 503."""
        identity = identity_of(id, caller)
        if not is_request_id(id):
            raise _unknown(id)
        try:
            found, submission = await asyncio.gather(self._store.find(identity), self._store.submission(identity))
        except StoreUnavailable as error:
            raise refused(f"the store: {error}") from error
        if found is None:
            raise _unknown(id)
        return Known(found, submission)

    async def status(self, id: str, caller: GatewayKey, *, wait_s: float = 0) -> bytes:
        """Its status; waits up to `wait_s` for its end. Raises ApiError."""
        known = await self.known(id, caller)
        if wait_s and known.found.completion is None:
            async with self._looking.following():
                await self._ended(identity_of(id, caller), within_s=wait_s)
            known = await self.known(id, caller)
        position = None
        if known.submission is not None and is_queued(known, now_ms()):
            position = await self._positions.of(known.submission.lane)
        return status_of(id, known.found, known.submission, now_ms=now_ms(), position=position)

    async def cancel(self, id: str, caller: GatewayKey) -> str:
        """Cancel it. Returns what `Client.cancel` returns. Raises ApiError, LanekeeperError."""
        known = await self.known(id, caller)
        if known.found.completion is not None:
            return "ended"
        try:
            return await self._client.cancel(id, tenant=caller.tenant)
        except NoReply:  # no worker runs: the broker keeps the cancellation
            return "unseen"
        except ControlRefused as error:
            raise refused(str(error), status=429 if error.is_passing else 503) from error

    async def _submit(self, asked: Asked, caller: GatewayKey) -> None:
        request = asked.request
        identity = identity_of(request.id, caller)
        submission = Submission(
            body_hash=asked.body_hash,
            lane=request.lane,
            streams=asked.stream,
            submitted_ms=request.sent_ms,
            due_ms=request.due_ms,
            deadline_ms=request.deadline_ms,
        )
        first: dict[str, str] = {"lane": request.lane, "submitted_at": moment_text(request.sent_ms)}
        if request.due_ms is not None:
            first["due_at"] = moment_text(request.due_ms)
        try:
            came_to = await self._store.follow(
                identity,
                submission,
                told=Told(QUEUED, json.dumps(first).encode()),
                keep_until_ms=request.deadline_ms + KEPT_AFTER_MS,
            )
        except StoreUnavailable as error:
            raise refused(f"the store: {error}") from error
        if came_to is Submitted.CONFLICT:
            raise RequestProblem("idempotency_conflict", "Idempotency-Key: it was used with another body")
        if came_to is Submitted.KNOWN and await self._is_seen(identity):
            return
        try:
            await self._publish(asked)
        except LanekeeperError as error:
            maybe_published = isinstance(error, BrokerError) and error.maybe_published
            if came_to is Submitted.NEW and not maybe_published:
                await self._store.unfollow(identity)
            raise

    async def _publish(self, asked: Asked) -> None:
        options = asked.options
        options["headers"] = {**options.get("headers", {}), n.SENT_MS: asked.request.sent_ms}
        if asked.stream:
            options["headers"] = {**options["headers"], n.STREAM: True}
        await self._client.publish(asked.body, key=asked.key, **options)

    async def _is_seen(self, identity: Identity) -> bool:
        """Whether a worker has it. If not, the gateway that submitted it may have died before it published it."""
        found = await self._store.find(identity)
        return found is not None and (found.running or found.attempts > 0 or found.completion is not None)

    async def _ended(self, identity: Identity, *, within_s: float) -> None:
        """Return when it has ended, or nothing is known of it; at the latest after `within_s`, or when the process
        stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._looking.news(identity, WITHOUT_LIMIT)


def identity_of(id: str, caller: GatewayKey) -> Identity:
    """The request's identity among those of the caller's tenant, as workers make it."""
    return Identity(caller.tenant or "", id)


def is_queued(known: Known, at_ms: int) -> bool:
    """Whether it waits in its lane, as far as is known."""
    found, said = known.found, known.submission
    is_due = said is not None and (found.due_ms or said.due_ms or 0) <= at_ms
    return is_due and found.completion is None and not found.running and not found.attempts


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"request {id[:128]!r} is not known, or is kept no longer")


def _wait_s(text: str | None) -> float:
    """Raises RequestProblem."""
    if text is None:
        return 0.0
    found = _WAIT.fullmatch(text)
    wait_s = float(found["number"]) * _UNITS[found["unit"] or "s"] if found else -1.0
    if not 0 <= wait_s <= WAIT_AT_MOST_S:
        raise RequestProblem(
            "invalid_request", f"parameter wait: found {text[:20]!r}, allowed are 0s to {WAIT_AT_MOST_S:g}s"
        )
    return wait_s
