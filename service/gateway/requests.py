"""Submits requests, tells their status, and cancels them, for clients of `/v1/requests` and of the WebSocket.

The gateway publishes without `reply_to` and follows the request in the store, so that any gateway can answer for any
request, and nothing is lost if a gateway dies (docs/decisions/0019).
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field

from consumers.background import Background
from consumers.job import moment_text, now_ms
from consumers.state.base import Identity
from consumers.state.following import QUEUED, Entry, FollowedStore, NewEntry, Submission, Submitted
from lanekeeper import Client
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import is_request_id
from lanekeeper.contract.problems import BrokerError, LanekeeperError, RequestProblem
from lanekeeper.errors import ControlRefused, NoReply
from service.config.gateway_section import GatewayKey
from service.gateway.call_reader import CheckedCall
from service.gateway.documents import End, Known, LargeStatus, end_of, status_of, word_of
from service.gateway.polling import LARGEST_NUMBER, Poller
from service.gateway.positions import Positions
from service.gateway.problems import ApiError, refused

KEPT_AFTER_MS = 86_400_000
"""For how many ms after its deadline a submitted request stays known to the gateway if no worker has received it."""


@dataclass(slots=True)
class Requests:
    """Submits requests without waiting for their answers, reports their status and their entries (stored steps and
    events) from the store, and cancels them. A caller can see only requests of its own tenant."""

    client: Client
    store: FollowedStore
    _: KW_ONLY
    poller: Poller
    positions: Positions
    _background: Background = field(default_factory=Background, init=False)

    async def submit(self, call: CheckedCall, caller: GatewayKey) -> None:
        """Publish a request, unless a worker has already seen a request with its id. The request is published even if
        this coroutine is cancelled meanwhile, as happens when the HTTP client disconnects. Raises ApiError,
        LanekeeperError."""
        submitting = self._background.begin(self._submit(call, caller), name=f"submit {call.request.id}")
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            await asyncio.wait((submitting,))  # until then the caller must keep the body and count the call
            raise

    async def known(self, id: str, caller: GatewayKey) -> Known:
        """What the store knows about a request of the caller's tenant. Raises ApiError 404 if it is unknown, and
        StoreUnavailable."""
        if not is_request_id(id):
            raise _unknown(id)
        identity = identity_of(id, caller)
        found, submission = await asyncio.gather(self.store.find(identity), self.store.submission(identity))
        if found is None:
            raise _unknown(id)
        return Known(id, found, submission)

    async def status(self, id: str, caller: GatewayKey, *, wait_s: float) -> bytes | LargeStatus:
        """The status of a request. Waits for up to `wait_s` until the request has ended or is unknown, or the process
        stops. Raises ApiError, StoreUnavailable."""
        known = await self.known(id, caller)
        if wait_s and known.found.completion is None:
            async with self.poller.following():
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self.poller.news(identity_of(id, caller), LARGEST_NUMBER)  # no entries, only the end
            known = await self.known(id, caller)
        place = None
        if known.submission is not None and word_of(known, now_ms()) == "queued":
            place = await self.positions.of(known.submission.lane)
        return status_of(known, now_ms=now_ms(), place=place)

    async def entries(self, id: str, caller: GatewayKey, *, after: int) -> AsyncGenerator[Entry | End, None]:
        """Yield the request's entries (steps and events) with a number above `after`, as soon as workers have stored
        them. The iterator ends after the entry that says how the request ended. This last entry is not stored, but made
        from the request's result; its number is one above that of the last stored entry.

        When the process stops, the iterator ends without the last entry. Raises ApiError if the request is unknown, and
        StoreUnavailable.
        """
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
        """Cancel a request. Returns the outcome of the cancellation, one of the words of `Cancelled`
        (lanekeeper/errors.py), such as `ended`. Raises ApiError, LanekeeperError."""
        known = await self.known(id, caller)
        if known.found.completion is not None:
            return "ended"
        try:
            return await self.client.cancel(id, tenant=caller.tenant)
        except NoReply:  # no worker runs: the broker keeps the cancellation
            return "unseen"
        except ControlRefused as error:
            raise refused(str(error), status=429 if error.is_passing else 503) from error

    async def _submit(self, call: CheckedCall, caller: GatewayKey) -> None:
        request = call.request
        identity = identity_of(request.id, caller)
        first: dict[str, str] = {"lane": request.lane, "submitted_at": moment_text(request.published.ms)}
        if request.due_ms is not None:
            first["due_at"] = moment_text(request.due_ms)
        submitted = await self.store.follow(
            identity,
            Submission.of(request, call.body_hash),
            first_entry=NewEntry(QUEUED, json.dumps(first).encode()),
            keep_until_ms=max(request.deadline_ms, now_ms()) + KEPT_AFTER_MS,
        )
        if submitted is Submitted.CONFLICT:
            raise RequestProblem("idempotency_conflict", "Idempotency-Key: it was used with another body")
        if submitted is Submitted.KNOWN and await self._is_seen(identity):
            return
        try:
            await self._publish(call)
        except LanekeeperError as error:
            maybe_published = isinstance(error, BrokerError) and error.maybe_published
            if submitted is Submitted.NEW and not maybe_published:
                await self.store.unfollow(identity)
            raise

    async def _publish(self, call: CheckedCall) -> None:
        headers = {**call.options.get("headers", {}), n.SENT_MS: call.request.published.ms}
        if call.stream:
            headers[n.STREAM] = True
        call.options["headers"] = headers
        await self.client.publish(call.body, key=call.key, **call.options)

    async def _is_seen(self, identity: Identity) -> bool:
        """Whether a worker has already received the request, according to the store. If not, the request waits in a
        queue, or a gateway has stored its submission, and died before it published the request."""
        found = await self.store.find(identity)
        return found is not None and (found.running or found.attempts > 0 or found.completion is not None)


def identity_of(id: str, caller: GatewayKey) -> Identity:
    """The identity of a caller's request in the workers' store: the caller's tenant and the request's id."""
    return Identity(caller.tenant or "", id)


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"request {id[:128]!r} is not known, or is kept no longer")
