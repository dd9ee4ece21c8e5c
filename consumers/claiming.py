"""This worker's claims: taken before a provider is called, renewed while it runs, given back or completed at the end.

A store that is away is waited for, with the delivery in hand: calling the provider without a claim would turn an
outage of the store into calls paid twice, and acknowledging what is not recorded would break the promise.
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
    Store,
    StoreUnavailable,
)
from lanekeeper.telemetry import logs, signals

RENEW_EVERY_S = 0.5
"""A twentieth of a lease; a cancelled request's provider is told within this time and a round trip."""
RELEASE_WITHIN_S = 1.0
DEFER_WITHIN_S = 1.0
DEFERRED_KEPT_MS = 60_000
"""After its deadline: by then a request that was deferred has ended, and that is kept under its id."""
PAUSE_CAP_S = 1.0
T = TypeVar("T")
log = logs.logger()


class Claiming:
    """Claims of one process. `run` renews them until it is cancelled."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[Held, Job] = {}
        self._taken = asyncio.Event()
        self._background = Background()

    @property
    def is_away(self) -> bool:
        """Whether the store could not answer last."""
        return self._store.trouble is not None

    async def run(self) -> None:
        """Renew what is held, and stop the jobs whose claim is cancelled or was taken over."""
        while True:
            await self._taken.wait()
            await asyncio.sleep(RENEW_EVERY_S)
            await self.renew()

    async def renew(self) -> None:
        """Renew once, now."""
        if not self._held:
            self._taken.clear()
            return
        try:
            stops = await self._store.renew(tuple(self._held))
        except StoreUnavailable as error:  # whoever runs goes on: nobody else can be granted its claim meanwhile
            log.debug(signals.RENEWAL_FAILED, error=str(error))
            return
        for held, why in stops.items():
            if (job := self._held.get(held)) is not None and job.stopped is None:
                with logs.about(job):
                    log.info(signals.REQUEST_STOPPED, reason=why.value)
                job.stop(why)

    async def claim(self, job: Job) -> Granted | Running | Ended | Conflict:
        """Ask for a job's request. Raises StoreUnavailable after `CLAIM_WITHIN_S`.

        Cancelled, what may have been granted is given back: a holder that never lets go counts as dead.
        """
        asking = self._background.begin(self._ask(job), name=f"claim {job.id}")
        try:
            found = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._background.begin(self._unask(job, asking), name=f"give back {job.id}")
            raise
        if isinstance(found, Granted):
            job.claim = Held(job.identity, found.token)
            self._held[job.claim] = job
            self._taken.set()
        return found

    async def release(self, job: Job, *, due_ms: int | None = None) -> None:
        """Give a claim back: the request waits for its next delivery, which comes at `due_ms` where that is known. Its
        lease ends it where that cannot be told.

        Cancelled, it goes on by itself: a holder that never lets go counts as dead.
        """
        if job.claim is None:
            return
        held, job.claim = job.claim, None
        letting_go = self._let_go(held, attempts=job.attempts, due_ms=due_ms)
        await asyncio.shield(self._background.begin(letting_go, name=f"let go {job.id}"))

    async def defer(self, job: Job, *, due_ms: int, deadline_ms: int) -> bool:
        """Keep until when a request waits that nobody has claimed yet; false where it has ended already, and need not
        wait. Only for whoever asks about it, and for a wait that is short: where it cannot be kept in time, nothing is
        lost but that."""
        try:
            async with asyncio.timeout(DEFER_WITHIN_S):
                return await self._defer(job, due_ms, deadline_ms)
        except (StoreUnavailable, TimeoutError) as error:
            log.info(signals.DEFERRAL_UNKEPT, error=str(error))
            return True

    async def defer_for_long(self, job: Job, *, due_ms: int, deadline_ms: int) -> bool:
        """The same, surely: a cancellation that came before is forgotten before a long wait ends. Raises as `claim`."""
        return await _surely(lambda: self._defer(job, due_ms, deadline_ms), within_s=CLAIM_WITHIN_S)

    async def reserve(self, job: Job, *, weight: int, until_ms: int) -> Room:
        """Ask for room for one that waits for long. Raises as `claim`."""
        copy = job.copy()
        return await _surely(
            lambda: self._store.reserve(job.identity, copy, weight=weight, until_ms=until_ms), within_s=CLAIM_WITHIN_S
        )

    async def _defer(self, job: Job, due_ms: int, deadline_ms: int) -> bool:
        may_wait = await self._store.defer(job.identity, due_ms=due_ms, keep_until_ms=deadline_ms + DEFERRED_KEPT_MS)
        return may_wait or job.dead_at is not None  # a dead letter that is published again may run again

    async def _ask(self, job: Job) -> Granted | Running | Ended | Conflict:
        return await _surely(lambda: self._store.claim(job.identity, job.copy()), within_s=CLAIM_WITHIN_S)

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
        """Keep how it ended: the completion that holds, or None where another delivery of it is being worked on.

        Raises StoreUnavailable after `STORE_WITHIN_S`. Cancelled, it goes on by itself: what the provider has answered
        is paid for, and a delivery that was lost meanwhile is answered with it when it comes again.
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
            holds = await _surely(lambda: self._store.complete(job.identity, job.copy(), completion, token=token))
            if holds is None and held is not None:
                await self._let_go(held, attempts=job.attempts)  # it was taken over, and its holder has not died
            return holds
        finally:
            self.forget(job)

    async def finish(self, *, within_s: float) -> None:
        """Wait for what is still being completed; what is not by then is called again elsewhere."""
        await self._background.finish(within_s=within_s)

    async def note(self, job: Job, completion: Completion) -> None:
        """Keep, for whoever asks, how a request ended that could not be claimed. Raises as `complete`."""
        await _surely(lambda: self._store.note(job.identity, completion))

    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        """Record a cancellation; what runs in this process stops at once. Raises as `complete`."""
        came_to = await _surely(lambda: self._store.cancel(identity, completion))
        if came_to is Cancelling.TOLD:
            await self.renew()
        return came_to

    async def find(self, identity: Identity) -> Found | None:
        """What is known of a request. Raises as `complete`."""
        return await _surely(lambda: self._store.find(identity))

    def forget(self, job: Job) -> None:
        """Renew a job's claim no more, whatever became of it."""
        if job.claim is not None:
            self._held.pop(job.claim, None)
            job.claim = None


def _tell_of_loss(completing: "asyncio.Task[Completion | None]") -> None:
    """Of an ending that nobody waits for any more, and that could not be kept: its provider is called again."""
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
