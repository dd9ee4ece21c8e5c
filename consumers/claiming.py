"""Takes a claim before a provider is called, renews it during the call, and then completes or releases it.

A claim is the store's record that one worker is working on a request; it ends with its lease (10 s by default) if it is
not renewed. While the store is unavailable, deliveries are held until the store answers or a time limit is over,
because a call without a claim could be made and paid for twice, and a request whose outcome is sent but not stored
could get a second, different outcome.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog

from consumers.background import Background, end_within
from consumers.clock import now_ms
from consumers.job import ASK_WITHIN_S, CLAIM_WITHIN_S, KEPT_AFTER_MS, STORE_WITHIN_S, Job
from consumers.log_subject import about
from consumers.progress import Progress, ProgressWriter
from consumers.state.base import (
    Cancelling,
    ClaimAnswer,
    Completion,
    Ending,
    Found,
    Granted,
    Held,
    Identity,
    StoredFile,
    StoreUnavailable,
    Submission,
    WaitingLimit,
)
from consumers.state.store import Store
from lanekeeper.contract.identity import shown
from lanekeeper.contract.problems import PROBLEMS
from lanekeeper.telemetry import signals

RENEW_EVERY_S = 0.5
"""The seconds between two renewals of a process's claims. The store's answer to a renewal also says which requests were
cancelled, so the call to a provider for a cancelled request ends within this time and one round trip to the store."""
WAITS_FROM = 2
"""At this renewal of its claim a request whose call has not begun counts as waiting. Most calls begin at once, and cost
no write to the store for it."""
NOTE_WITHIN_S = 1.0
RELEASE_AWAITED_S = 1.0
RELEASE_WITHIN_S = 60.0
RELEASES_AT_MOST = 1000
SHELTER_WITHIN_S = 1.0
DEFER_WITHIN_S = 1.0
KEEP_FILE_WITHIN_S = 3.0
PAUSE_CAP_S = 1.0
DEATHS_AT_MOST = 4
"""After this many workers have died while they worked on a request (had its claim in the store), the request goes to
the queue `lane.dead` at its next delivery. The broker's delivery count is not used, because it also counts deliveries
that ended because the connection was lost while the worker lived on."""
T = TypeVar("T")
log = structlog.get_logger()


class Claiming:
    """Takes, renews and releases the claims of one process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[Held, Job] = {}
        self._claim_tasks: dict[asyncio.Task[ClaimAnswer], Identity] = {}
        self._has_claims = asyncio.Event()
        self._background = Background()
        self._releasing = 0
        self._writer = ProgressWriter(store, self._background)

    @property
    def is_away(self) -> bool:
        return self._store.trouble is not None

    async def run(self) -> None:
        while True:
            await self._has_claims.wait()
            await asyncio.sleep(RENEW_EVERY_S)
            await self.renew()

    async def renew(self) -> None:
        if not self._held:
            self._has_claims.clear()
            return
        try:
            stops = await self._store.renew(tuple(self._held))
        except StoreUnavailable as error:  # jobs continue: without the store, no other worker can get their claims
            log.debug(signals.RENEWAL_FAILED, error=str(error))
            return
        for held, waiting in self._held.items():
            waiting.renewals += 1
            if waiting.renewals >= WAITS_FROM and waiting.attempted is None and waiting.noting is None:
                waiting.noting = self._background.begin(self._note_waiting(held), name=f"waits {waiting.id}")
        for held, why in stops.items():
            if (job := self._held.get(held)) is not None and job.stopped is None:
                with about(job):
                    log.info(signals.REQUEST_STOPPED, reason=why.value)
                job.stop(why)

    async def call_begins(self, job: Job) -> None:
        """Call it before a request's first call: from now on the request may be at fault if this process dies. Awaits
        the store only if the request has waited for its call."""
        if job.noting is None or job.claim is None:
            return
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(NOTE_WITHIN_S):
                await asyncio.wait({job.noting})
                await self._store.note_waiting(job.claim, is_waiting=False)
        job.noting = None

    async def _note_waiting(self, held: Held) -> None:
        with suppress(StoreUnavailable):
            await self._store.note_waiting(held, is_waiting=True)

    async def claim(self, job: Job) -> ClaimAnswer:
        """Ask the store for the claim of a job's request. Raises StoreUnavailable after `CLAIM_WITHIN_S`.

        If the caller is cancelled and the store then grants the claim, the claim is released in the background, because
        the store counts a worker as dead if its claim ends without a release.
        """
        claiming = self._background.begin(self._request_claim(job), name=f"claim {job.id}")
        self._claim_tasks[claiming] = job.identity
        claiming.add_done_callback(self._claim_tasks.pop)
        try:
            has_answer = await end_within(claiming, within_s=CLAIM_WITHIN_S)
        except asyncio.CancelledError:
            self._background.detached(self._release_if_granted(job, claiming), name=f"give back {job.id}")
            raise
        if not has_answer:
            self._background.detached(self._release_if_granted(job, claiming), name=f"give back {job.id}")
            raise StoreUnavailable(self._store.trouble or f"the store has not answered within {CLAIM_WITHIN_S:g} s")
        found = claiming.result()
        if isinstance(found, Granted):
            job.claim = _held(job, found)
            self._follow(job, job.claim, found)
        return found

    def _follow(self, job: Job, held: Held, granted: Granted) -> None:
        decoded = job.decoded
        if decoded is None or not (granted.followed or (decoded.request.stream and not job.message.reply_to)):
            return
        submission = Submission.of(decoded.request, job.fingerprint.body_hash)
        job.progress = Progress(self._writer, held, submission, is_takeover=granted.deaths > 0)

    async def release(self, job: Job, *, due_ms: int | None = None, step: str = "") -> None:
        """Release the claim of a request that has not ended and will be delivered again. If that takes long, or the
        caller is cancelled, it goes on in the background."""
        if job.claim is None:
            return
        held, job.claim = job.claim, None
        releasing = self._begin_release(job, held, due_ms, step)
        await end_within(releasing, within_s=RELEASE_AWAITED_S)
        if self._releasing > RELEASES_AT_MOST:
            releasing.cancel()

    def _begin_release(self, job: Job, held: Held, due_ms: int | None = None, step: str = "") -> "asyncio.Task[None]":
        return self._background.detached(self._release(job, held, due_ms, step), name=f"let go {job.id}")

    async def _release(self, job: Job, held: Held, due_ms: int | None, step: str = "") -> None:
        self._releasing += 1
        is_survived = job.attempted is not None or step != ""
        try:
            if job.progress is not None:
                await job.progress.flushed()  # only the holder of the claim may write it
            self._held.pop(held, None)
            await in_time(
                lambda: self._store.release(
                    held, attempts=job.attempts, due_ms=due_ms, is_survived=is_survived, step=step
                ),
                within_s=RELEASE_WITHIN_S,
            )
        except StoreUnavailable as error:
            log.warning(signals.CLAIM_UNRELEASED, error=str(error))
        finally:
            self._held.pop(held, None)
            self._releasing -= 1

    async def defer(self, job: Job, *, due_ms: int, deadline_ms: int) -> bool:
        """Store the due time of a request that will wait in the broker without a claim, so that clients that ask for
        its result get this time. Return False if the request need not wait, because it has ended already.

        This method is for short waits: if the store does not answer within a second, True is returned, and clients do
        not get the due time."""
        try:
            async with asyncio.timeout(DEFER_WITHIN_S):
                return await self._defer(job, due_ms, deadline_ms)
        except (StoreUnavailable, TimeoutError) as error:
            log.info(signals.DEFERRAL_UNKEPT, error=str(error))
            return True

    async def defer_for_long(self, job: Job, *, due_ms: int, deadline_ms: int) -> bool:
        """Like `defer`, but for long waits: repeat the call until the store answers. The answer is needed because it
        says whether the request was cancelled before it arrived, and the store forgets such a cancellation before a
        long wait ends. Raises StoreUnavailable after `ASK_WITHIN_S`."""
        return await in_time(lambda: self._defer(job, due_ms, deadline_ms))

    async def reserve(self, job: Job, *, weight: int, until_ms: int) -> WaitingLimit:
        fingerprint = job.fingerprint
        return await in_time(lambda: self._store.reserve(job.identity, fingerprint, weight=weight, until_ms=until_ms))

    async def debounce(self, job: Job, key: str, *, until_ms: int) -> bool:
        sent_ms = job.published.ms
        return await in_time(lambda: self._store.debounce(job.identity, key, published_ms=sent_ms, until_ms=until_ms))

    async def is_known(self, job: Job) -> bool:
        """Whether another message of the request runs or waits. Raises StoreUnavailable."""
        found = await self.find(job.identity)
        return found is not None and found.completion is None

    async def has_ended(self, job: Job) -> bool:
        found = await self.find(job.identity)
        completion = None if found is None else found.completion
        return completion is not None and (not completion.code or PROBLEMS[completion.code].kept)

    async def _defer(self, job: Job, due_ms: int, deadline_ms: int) -> bool:
        keep_until_ms = deadline_ms + KEPT_AFTER_MS
        may_wait = await self._store.defer(
            job.identity, due_ms=due_ms, keep_until_ms=keep_until_ms, group=job.group, labels=job.labels
        )
        return may_wait or job.hop.dead_at is not None  # a dead letter that is published again may run again

    async def _request_claim(self, job: Job) -> ClaimAnswer:
        found = await _until_stored(lambda: self._store.claim(job.identity, job.fingerprint), within_s=CLAIM_WITHIN_S)
        if isinstance(found, Granted):
            self._held[_held(job, found)] = job
            self._has_claims.set()
        return found

    async def _release_if_granted(self, job: Job, claiming: "asyncio.Task[ClaimAnswer]") -> None:
        with suppress(StoreUnavailable):
            if isinstance(found := await claiming, Granted):
                await self._release(job, _held(job, found), None)

    async def sheltered(self, job: Job, storing: Coroutine[Any, Any, T]) -> T:
        """Await `storing`, which brings a paid answer into a form that can be sent, and completes the job's claim. If
        the caller is cancelled because the delivery was lost, this goes on in the background with the claim held, and
        the redelivery waits until it has ended (`Store.shelter`)."""
        return await self._background.sheltered(
            self._shelter(job, storing), name=f"keep {job.id}", if_left=_log_lost_completion
        )

    async def _shelter(self, job: Job, storing: Coroutine[Any, Any, T]) -> T:
        held = job.claim
        try:
            if held is not None:
                with suppress(StoreUnavailable, TimeoutError):
                    async with asyncio.timeout(SHELTER_WITHIN_S):
                        await self._store.shelter(held)
            return await storing
        finally:
            storing.close()
            if job.claim is not None and held is not None:  # it was not completed
                job.claim = None
                self._begin_release(job, held)

    async def complete(self, job: Job, completion: Completion) -> Completion | None:
        """Store how the request ended (its completion). Return the completion that is valid: this one, or an earlier
        one that was stored first. Return None if another worker holds the claim.

        Raises StoreUnavailable after `STORE_WITHIN_S`. If the caller is cancelled, storing continues in the background,
        because the provider's answer was paid for.
        """
        return await self._background.sheltered(
            self._complete(job, completion, job.claim), name=f"complete {job.id}", if_left=_log_lost_completion
        )

    async def _complete(self, job: Job, completion: Completion, held: Held | None) -> Completion | None:
        token = None if held is None else held.token
        try:
            if job.progress is not None:
                await job.progress.flushed()  # only the holder of the claim may write it
            valid = await _until_stored(
                lambda: self._store.complete(job.identity, job.fingerprint, completion, token=token)
            )
            if valid is None and held is not None:
                # the claim was taken over; releasing it says that this holder has not died
                await self._release(job, held, None)
            return valid
        except StoreUnavailable:
            if held is not None:
                job.claim = None
                self._begin_release(job, held)
            raise
        finally:
            self.forget(job)

    async def finish(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)

    async def step_ended(self, job: Job, completion: Completion, *, step: str) -> Completion | None:
        """Store how a step of the job's pipeline ended, under the step's own id, and release the pipeline's claim; see
        `complete`. `step`: what is told about it."""
        return await self._background.sheltered(
            self._end_step(job, completion, step), name=f"step {job.id}", if_left=_log_lost_completion
        )

    async def _end_step(self, job: Job, completion: Completion, step: str) -> Completion | None:
        assert job.standing is not None
        identity, fingerprint = job.standing.identity(job.identity), replace(job.fingerprint, group=None)
        try:
            return await _until_stored(lambda: self._store.complete(identity, fingerprint, completion, token=None))
        finally:  # also if the delivery was lost: else the claim would be renewed as long as this process runs
            await self.release(job, step=step)

    async def expect(self, identity: Identity, *, deadline_ms: int) -> None:
        keep_until_ms = deadline_ms + KEPT_AFTER_MS
        await in_time(lambda: self._store.defer(identity, due_ms=now_ms(), keep_until_ms=keep_until_ms))

    async def keep_state(self, identity: Identity, state: bytes, *, deadline_ms: int) -> None:
        """Store the state of a pipeline (`state_identity`); empty: it is needed no longer."""
        completion = Completion(status="ok", body=state, ended_ms=now_ms())
        keep_until_ms = deadline_ms + KEPT_AFTER_MS
        await in_time(lambda: self._store.note(identity, completion, keep_until_ms=keep_until_ms))

    async def state(self, identity: Identity) -> bytes:
        """The state of a pipeline; empty if the store has lost it, until the message that keeps it brings it back."""
        found = await self.find(identity)
        return b"" if found is None or found.completion is None else found.completion.body

    async def note(self, job: Job, completion: Completion) -> None:
        await _until_stored(lambda: self._store.note(job.identity, completion, group=job.group, labels=job.labels))

    async def cancel(self, identity: Identity, completion: Completion) -> Cancelling:
        result = await _until_stored(lambda: self._store.cancel(identity, completion))
        if result is Cancelling.TOLD:
            if claims := [task for task, claimed in self._claim_tasks.items() if claimed == identity]:
                await asyncio.wait(claims)
            await self.renew()
        return result

    async def find(self, identity: Identity) -> Found | None:
        return await in_time(lambda: self._store.find(identity))

    async def endings(self, requests: Sequence[Identity]) -> Sequence[Ending | None]:
        return await in_time(lambda: self._store.endings(requests))

    async def find_files(self, ids: Sequence[str]) -> Mapping[str, StoredFile]:
        return await in_time(lambda: self._store.find_files(ids))

    async def keep_files(self, job: Job, ids: Sequence[str], *, provider: str) -> None:
        """Note that the files which a provider's tools have made for an answer are the tenant's. If that fails, it
        cannot fetch them; the answer is sent all the same."""
        for id in ids:
            file = StoredFile(id=id, tenant=job.identity.tenant, provider=provider, created_ms=now_ms())
            try:
                if not await in_time(partial(self._store.keep_file, file), within_s=KEEP_FILE_WITHIN_S):
                    log.warning(signals.FILE_UNKEPT, file=shown(id), error="its tenant has as many as it may")
            except StoreUnavailable as error:
                log.warning(signals.FILE_UNKEPT, file=shown(id), error=str(error))

    def forget(self, job: Job) -> None:
        if job.claim is not None:
            self._held.pop(job.claim, None)
            job.claim = None


def _held(job: Job, granted: Granted) -> Held:
    return Held(job.identity, granted.token, "" if job.hop.flow is None else job.hop.flow.item_of)


def _log_lost_completion(completing: "asyncio.Task[Any]") -> None:
    if completing.cancelled() or completing.exception() is not None:
        why = "" if completing.cancelled() else str(completing.exception())
        log.warning(signals.COMPLETION_LOST, error=why)


async def in_time(call: Callable[[], Awaitable[T]], *, within_s: float = ASK_WITHIN_S) -> T:
    """What the store answers, asked again while it is away. Raises StoreUnavailable after `within_s`."""
    try:
        async with asyncio.timeout(within_s):
            return await _until_stored(call, within_s=within_s)
    except TimeoutError as error:
        raise StoreUnavailable(f"the store has not answered within {within_s:g} s") from error


async def _until_stored(call: Callable[[], Awaitable[T]], *, within_s: float | None = None) -> T:
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
