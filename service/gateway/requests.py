"""Answers `/v1/requests`: clients submit a request, get its status, wait for its end, or cancel it.

The gateway publishes without `reply_to` and follows the request in the store, so that any gateway can answer for any
request, and nothing is lost if a gateway dies (docs/decisions/0019).
"""

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from aiohttp import web
from multidict import MultiMapping

from consumers.background import Background
from consumers.job import moment_text, now_ms
from consumers.state.base import Found, Identity, StoreUnavailable
from consumers.state.following import QUEUED, FollowedStore, NewEntry, Submission, Submitted
from lanekeeper import Client
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import is_request_id
from lanekeeper.contract.problems import BrokerError, LanekeeperError, RequestProblem, invalid_request
from lanekeeper.errors import ControlRefused, NoReply
from service.config.gateway_section import GatewayKey
from service.gateway.answers import Answers
from service.gateway.asking import CallReader, CheckedCall, submitted_id_of
from service.gateway.bodies import Bodies
from service.gateway.call_limit import CallLimit
from service.gateway.documents import JSON, Status, answer, path_of, refusal, status_of
from service.gateway.looking import Looking
from service.gateway.messages import send_pieces
from service.gateway.positions import Positions
from service.gateway.problems import ApiError, refused

WAIT_AT_MOST_S = 60.0
"""The highest value of `?wait=`, in seconds: proxies and clients seldom keep a call open for longer."""
KEPT_AFTER_MS = 86_400_000
"""For how many ms after its deadline the gateway still knows a submitted request, if no worker runs."""
_WAIT = re.compile(r"(?P<number>\d{1,6}(\.\d{1,3})?)(?P<unit>ms|s|m)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
WITHOUT_LIMIT = 1 << 53
"""An entry number that no request reaches: a caller that asks for the entries after it waits only for the end of the
request."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the workers' store knows about a request: its state (`found`), and how it was submitted."""

    found: Found
    submission: Submission | None
    """How the request was submitted. None: it was not submitted through a gateway."""


@dataclass(slots=True)
class Requests:
    """Answers `/v1/requests`: submits requests without waiting for their answers, reports their status from the store,
    and cancels them. A caller can see only requests of its own tenant."""

    client: Client
    store: FollowedStore
    _: KW_ONLY
    call_reader: CallReader
    limit: CallLimit
    bodies: Bodies
    answers: Answers
    looking: Looking
    positions: Positions
    _background: Background = field(default_factory=Background, init=False)

    async def post(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Answer `POST /v1/requests`: submit a request."""
        id: str | None = None
        try:
            id, chose_id = submitted_id_of(request.headers)
            with self.limit.counted(self.bodies.memory_of(request)):
                read = partial(self._read, request.headers, caller=caller, id=id, chose_id=chose_id)
                async with self.bodies.checked_call(request, read) as asked:
                    await self._submitted(asked, caller)
        except (ApiError, LanekeeperError) as error:
            return refusal(error, id)
        path = path_of(id)
        body = json.dumps({"id": id, "status_url": path, "events_url": f"{path}/events"}).encode()
        return answer(body, status=202, Location=path)

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Answer `GET /v1/requests/{id}` with the request's status, after waiting for its end if `?wait=` asks for
        it."""
        id = request.match_info["id"]
        try:
            wait_s = _wait_s(request.query.get("wait"))
            status = await self.status(id, caller, wait_s=wait_s)
            return answer(status.text) if status.result is None else await self._send_large(request, status)
        except (ApiError, LanekeeperError) as error:
            return refusal(error, id)

    async def _send_large(self, request: web.Request, status: Status) -> web.StreamResponse:
        """Send a status whose result is in the store of large bodies. Raises ApiError."""
        assert status.result is not None
        async with self.answers.fetched(status.result) as result:
            return await send_pieces(
                request,
                result.pieces(begin=status.text, end=status.end),
                size=len(status.text) + result.size + len(status.end),
                headers={"content-type": JSON, "cache-control": "no-store"},
            )

    async def delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        """Answer `DELETE /v1/requests/{id}`: cancel a request."""
        id = request.match_info["id"]
        try:
            outcome = await self.cancel(id, caller)
        except (ApiError, LanekeeperError) as error:
            return refusal(error, id)
        body = json.dumps({"id": id, "outcome": outcome}).encode()
        return answer(body, status=200 if outcome == "ended" else 202)

    async def submit(
        self, headers: MultiMapping[str], body: bytes, caller: GatewayKey, *, id: str, chose_id: bool
    ) -> None:
        """Publish a request, unless a worker has already seen a request with its id. Raises ApiError,
        LanekeeperError."""
        with self.limit.counted(len(body)):
            await self._submitted(self._read(headers, body, caller, id=id, chose_id=chose_id), caller)

    def _read(
        self, headers: MultiMapping[str], body: bytes, caller: GatewayKey, *, id: str, chose_id: bool
    ) -> CheckedCall:
        return self.call_reader.read(headers, body, caller, request_id=id, chose_id=chose_id, task="requests")

    async def _submitted(self, asked: CheckedCall, caller: GatewayKey) -> None:
        """Submit a request, even if the HTTP client disconnects before that is done."""
        submitting = self._background.begin(self._submit(asked, caller), name=f"submit {asked.request.id}")
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # The client has disconnected. The request is published all the same, and until then the caller of this
            # function must keep the body and count the call.
            await asyncio.wait((submitting,))
            raise

    async def known(self, id: str, caller: GatewayKey) -> Known:
        """What the store knows about a request of the caller's tenant. Raises ApiError: 404 if it is unknown, 503 if
        the store cannot be reached."""
        identity = identity_of(id, caller)
        if not is_request_id(id):
            raise _unknown(id)
        try:
            found, submission = await asyncio.gather(self.store.find(identity), self.store.submission(identity))
        except StoreUnavailable as error:
            raise refused(f"the store: {error}") from error
        if found is None:
            raise _unknown(id)
        return Known(found, submission)

    async def status(self, id: str, caller: GatewayKey, *, wait_s: float = 0) -> Status:
        """The status of a request. The answer waits for the request's end, for up to `wait_s`. Raises ApiError."""
        known = await self.known(id, caller)
        if wait_s and known.found.completion is None:
            async with self.looking.following():
                await self._wait_for_end(identity_of(id, caller), within_s=wait_s)
            known = await self.known(id, caller)
        place = None
        if known.submission is not None and is_queued(known, now_ms()):
            place = await self.positions.of(known.submission.lane)
        return status_of(id, known.found, known.submission, now_ms=now_ms(), place=place)

    async def cancel(self, id: str, caller: GatewayKey) -> str:
        """Cancel a request. Returns the outcome, as `Client.cancel` does. Raises ApiError, LanekeeperError."""
        known = await self.known(id, caller)
        if known.found.completion is not None:
            return "ended"
        try:
            return await self.client.cancel(id, tenant=caller.tenant)
        except NoReply:  # no worker runs: the broker keeps the cancellation
            return "unseen"
        except ControlRefused as error:
            raise refused(str(error), status=429 if error.is_passing else 503) from error

    async def _submit(self, asked: CheckedCall, caller: GatewayKey) -> None:
        request = asked.request
        identity = identity_of(request.id, caller)
        first: dict[str, str] = {"lane": request.lane, "submitted_at": moment_text(request.sent_ms)}
        if request.due_ms is not None:
            first["due_at"] = moment_text(request.due_ms)
        try:
            submitted = await self.store.follow(
                identity,
                Submission.of(request, asked.body_hash),
                first_entry=NewEntry(QUEUED, json.dumps(first).encode()),
                keep_until_ms=max(request.deadline_ms, now_ms()) + KEPT_AFTER_MS,
            )
        except StoreUnavailable as error:
            raise refused(f"the store: {error}") from error
        if submitted is Submitted.CONFLICT:
            raise RequestProblem("idempotency_conflict", "Idempotency-Key: it was used with another body")
        if submitted is Submitted.KNOWN and await self._is_seen(identity):
            return
        try:
            await self._publish(asked)
        except LanekeeperError as error:
            maybe_published = isinstance(error, BrokerError) and error.maybe_published
            if submitted is Submitted.NEW and not maybe_published:
                await self.store.unfollow(identity)
            raise

    async def _publish(self, asked: CheckedCall) -> None:
        options = asked.options
        options["headers"] = {**options.get("headers", {}), n.SENT_MS: asked.request.sent_ms}
        if asked.stream:
            options["headers"] = {**options["headers"], n.STREAM: True}
        await self.client.publish(asked.body, key=asked.key, **options)

    async def _is_seen(self, identity: Identity) -> bool:
        """Whether a worker has already received the request, according to the store. If not, the request waits, or a
        gateway has stored its submission and died before it published it."""
        found = await self.store.find(identity)
        return found is not None and (found.running or found.attempts > 0 or found.completion is not None)

    async def _wait_for_end(self, identity: Identity, *, within_s: float) -> None:
        """Wait until the request has ended or is unknown, but for at most `within_s`, and not after the process has
        begun to stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.looking.news(identity, WITHOUT_LIMIT)


def identity_of(id: str, caller: GatewayKey) -> Identity:
    """The identity of a caller's request in the workers' store: the caller's tenant and the request's id."""
    return Identity(caller.tenant or "", id)


def is_queued(known: Known, at_ms: int) -> bool:
    """Whether the request waits in its lane at this time, according to the store."""
    found, submission = known.found, known.submission
    is_due = submission is not None and (found.due_ms or submission.due_ms or 0) <= at_ms
    return is_due and found.completion is None and not found.running and not found.attempts


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"request {id[:128]!r} is not known, or is kept no longer")


def _wait_s(text: str | None) -> float:
    """Read `?wait=`: `20s`, `500ms`, `1m`; without a unit, seconds. Raises RequestProblem."""
    if text is None:
        return 0.0
    found = _WAIT.fullmatch(text)
    wait_s = float(found["number"]) * _UNITS[found["unit"] or "s"] if found else -1.0
    if not 0 <= wait_s <= WAIT_AT_MOST_S:
        raise invalid_request(f"parameter wait: found {text[:20]!r}, allowed are 0s to {WAIT_AT_MOST_S:g}s")
    return wait_s
