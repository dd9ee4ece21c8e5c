"""This worker's claims: taken before a provider is called, renewed while it runs, given back or completed at the end.

If the store is away, the delivery is held until it answers. To call the provider without a claim would turn an outage
of the store into calls paid twice; to acknowledge an outcome that is not stored would break the promise of one outcome.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from consumers.background import Background
from consumers.job import CLAIM_WITHIN_S, STORE_WITHIN_S, Job
from consumers.state.base import (
    Cancelling,
    Completion,
    Conflict,
    Ended,
    Found,
    Granted,
    Held,
    Identity,
    Room,
    Running,
    StoreUnavailable,
)
from consumers.state.following import FollowedStore, Submission
from consumers.trail import Trails
from lanekeeper.telemetry import logs, signals

RENEW_EVERY_S = 0.5
"""A twentieth of a lease. A cancelled request's call is ended within this time and a round trip."""
RELEASE_WITHIN_S = 1.0
DEFER_WITHIN_S = 1.0
DEFERRED_KEPT_MS = 60_000
"""How long a deferral is kept after the deadline: by then the request has ended, and its outcome is stored."""
PAUSE_CAP_S = 1.0
T = TypeVar("T")
log = logs.logger()


class Claiming:
    """Claims of one process. `run` renews them until it is cancelled."""

    def __init__(self, store: FollowedStore) -> None:
        self._store = store
        self._held: dict[Held, Job] = {}
        self._asking: dict[asyncio.Task[Granted | Running | Ended | Conflict], Identity] = {}
        self._taken = asyncio.Event()
        self._background = Background()
        self._trails = Trails(store, self._background)

    @property
    def is_away(self) -> bool:
        """Whether the last call to the store failed."""
        return self._store.trouble is not None

    async def run(self) -> None:
        """Renew the held claims, and stop jobs that were cancelled or whose claim was taken over."""
        while True:
            await self._taken.wait()
            await asyncio.sleep(RENEW_EVERY_S)
            await self.renew()

    async def renew(self) -> None:
        """Renew all held claims once, now."""
        if not self._held:
            self._taken.clear()
            return
        try:
            stops = await self._store.renew(tuple(self._held))
        except StoreUnavailable as error:  # jobs continue: without the store, no other worker can get their claims
            log.debug(signals.RENEWAL_FAILED, error=str(error))
            return
        for held, why in stops.items():
            if (job := self._held.get(held)) is not None and job.stopped is None:
                with logs.about(job):
                    log.info(signals.REQUEST_STOPPED, reason=why.value)
                job.stop(why)

    async def claim(self, job: Job) -> Granted | Running | Ended | Conflict:
        """Ask for the claim of a job's request. Raises StoreUnavailable after `CLAIM_WITHIN_S`.

        If this is cancelled, a granted claim is given back: a holder that never releases its claim counts as dead.
        """
        asking = self._background.begin(self._ask(job), name=f"claim {job.id}")
        self._asking[asking] = job.identity
        asking.add_done_callback(self._asking.pop)
        try:
            found = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._background.begin(self._unask(job, asking), name=f"give back {job.id}")
            raise
        if isinstance(found, Granted):
            job.claim = Held(job.identity, found.token)
            self._follow(job, job.claim, is_followed=found.followed)
        return found

    def _follow(self, job: Job, held: Held, *, is_followed: bool) -> None:
        """Begin a trail for a request that somebody may follow. The parts of a stream with `reply_to` go there."""
        asked = job.asked
        if asked is None or not (is_followed or (asked.request.stream and not job.message.reply_to)):
            return
        request = asked.request
        submission = Submission(
            body_hash=job.copy().body_hash,
            lane=request.lane,
            streams=request.stream,
            submitted_ms=request.sent_ms,
            due_ms=request.due_ms,
            deadline_ms=request.deadline_ms,
        )
        job.trail = self._trails.begin(held, submission)

    async def release(self, job: Job, *, due_ms: int | None = None) -> None:
        """Give a claim back: the request waits for its next delivery, at `due_ms` if that is known. If the store is
        unavailable, the claim ends with its lease.

        If this is cancelled, it continues in the background: a holder that never releases its claim counts as dead.
        """
        if job.claim is None:
            return
        held, job.claim = job.claim, None
        await asyncio.shield(self._background.begin(self._release(job, held, due_ms), name=f"let go {job.id}"))

    async def _release(self, job: Job, held: Held, due_ms: int | None) -> None:
        await _trail_written(job)
        await self._let_go(held, attempts=job.attempts, due_ms=due_ms)

    async def defer(self, job: Job, *, due_ms: int, deadline_ms: int) -> bool:
        """Store until when an unclaimed request waits, for status questions about it. False if it has ended already and
        need not wait. For short waits: if the store does not answer in time, only this information is lost."""
        try:
            async with asyncio.timeout(DEFER_WITHIN_S):
                return await self._defer(job, due_ms, deadline_ms)
        except (StoreUnavailable, TimeoutError) as error:
            log.info(signals.DEFERRAL_UNKEPT, error=str(error))
            return True

    async def defer_for_long(self, job: Job, *, due_ms: int, deadline_ms: int) -> bool:
        """Store a long wait, and try until the store answers: an earlier cancellation must be found now, because
        the store forgets it before the wait ends. Raises as `claim`."""
        return await _surely(lambda: self._defer(job, due_ms, deadline_ms), within_s=CLAIM_WITHIN_S)

    async def reserve(self, job: Job, *, weight: int, until_ms: int) -> Room:
        """Ask for room for a request that waits long in the broker. Raises as `claim`."""
        copy = job.copy()
        return await _surely(
            lambda: self._store.reserve(job.identity, copy, weight=weight, until_ms=until_ms), within_s=CLAIM_WITHIN_S
        )

    async def _defer(self, job: Job, due_ms: int, deadline_ms: int) -> bool:
        may_wait = await self._store.defer(job.identity, due_ms=due_ms, keep_until_ms=deadline_ms + DEFERRED_KEPT_MS)
        return may_wait or job.dead_at is not None  # a dead letter that is published again may run again

    async def _ask(self, job: Job) -> Granted | Running | Ended | Conflict:
        found = await _surely(lambda: self._store.claim(job.identity, job.copy()), within_s=CLAIM_WITHIN_S)
        if isinstance(found, Granted):
            self._held[Held(job.identity, found.token)] = job
            self._taken.set()
        return found

    async def _unask(self, job: Job, asking: "asyncio.Task[Granted | Running | Ended | Conflict]") -> None:
        with suppress(StoreUnavailable):
            if isinstance(found := await asking, Granted):
                await self._let_go(Held(job.identity, found.token), attempts=job.attempts)

    async def _let_go(self, held: Held, *, attempts: int, due_ms: int | None = None) -> None:
        self._held.pop(held, None)
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(RELEASE_WITHIN_S):
                await self._store.release(held, attempts=attempts, due_ms=due_ms)

    async def complete(self, job: Job, completion: Completion) -> Completion | None:
        """Store how the request ended. Return the completion that is valid; None if another delivery of it is being
        worked on.

        Raises StoreUnavailable after `STORE_WITHIN_S`. If this is cancelled, it goes on in the background: the answer
        is paid for, and if the delivery was lost, its redelivery gets this answer.
        """
        completing = self._background.begin(self._complete(job, completion, job.claim), name=f"complete {job.id}")
        try:
            return await asyncio.shield(completing)
        except asyncio.CancelledError:
            completing.add_done_callback(_tell_of_loss)
            raise

    async def _complete(self, job: Job, completion: Completion, held: Held | None) -> Completion | None:
        token = None if held is None else held.token
        try:
            await _trail_written(job)
            holds = await _surely(lambda: self._store.complete(job.identity, job.copy(), completion, token=token))
            if holds is None and held is not None:
                await self._let_go(held, attempts=job.attempts)  # taken over, but this holder is alive
            return holds
        finally:
            self.forget(job)

    async def finish(self, *, within_s: float) -> None:
        """Wait for the completions in progress. A provider is called again for those not stored in time."""
        await self._background.finish(within_s=within_s)

    async def note(self, job: Job, completion: Completion) -> None:
        """Store how a request ended that could not be claimed, so that its result can be fetched. Raises as
        `complete`."""
        await _surely(lambda: self._store.note(job.identity, completion))

    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        """Record a cancellation. A request that runs in this process stops at once, also if the answer to its claim is
        still on its way. Raises as `complete`."""
        came_to = await _surely(lambda: self._store.cancel(identity, completion))
        if came_to is Cancelling.TOLD:
            if asking := [task for task, of in self._asking.items() if of == identity]:
                await asyncio.wait(asking)
            await self.renew()
        return came_to

    async def find(self, identity: Identity) -> Found | None:
        """What the store knows about a request. Raises as `complete`."""
        return await _surely(lambda: self._store.find(identity))

    def forget(self, job: Job) -> None:
        if job.claim is not None:
            self._held.pop(job.claim, None)
            job.claim = None


async def _trail_written(job: Job) -> None:
    """Only the holder of a claim may write entries, so they are written before the claim ends."""
    if job.trail is not None:
        await job.trail.flushed()


def _tell_of_loss(completing: "asyncio.Task[Completion | None]") -> None:
    """Log that an outcome could not be stored after its waiter had gone: the provider is called again for the
    request."""
    if completing.cancelled() or completing.exception() is not None:
        why = "" if completing.cancelled() else str(completing.exception())
        log.warning(signals.COMPLETION_LOST, error=why)


async def _surely(call: Callable[[], Awaitable[T]], *, within_s: float | None = None) -> T:
    loop = asyncio.get_running_loop()
    end = loop.time() + (STORE_WITHIN_S if within_s is None else within_s)
    pause_s = 0.05
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if loop.time() + pause_s > end:
                raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(PAUSE_CAP_S, 2 * pause_s)
