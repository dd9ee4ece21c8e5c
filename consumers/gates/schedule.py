"""The schedule gate: a request that is not due yet is published to wait queues on the broker (the delay cascade), so
that no worker holds it."""

from consumers.claiming import Claiming
from consumers.job import Decoded, Job, NowMs
from consumers.outcomes import Deferred, Outcome, ended
from consumers.state.base import WaitingLimit

UNCOUNTED_MS = 60_000
"""A request that waits for at most this many ms does not count towards the limits of how many requests may wait,
because no tenant can publish very many requests in that time."""
UNIT_BYTES = 16 * 1024
"""There are limits of how many requests may wait for their due time. A request counts towards them as one, plus one for
each full 16 KiB of its body."""
WHICH_LIMIT = {
    WaitingLimit.TENANT: "its tenant has as many requests waiting as one may (each 16 KiB of a body count as one)",
    WaitingLimit.TOTAL: "as many requests wait as may in all",
}


class ScheduleGate:
    """Defers a request until its due time (`x-lane-delay-ms`, `x-lane-at`).

    The wait is noted in the store before the request is published to the broker's delay queues, because once it is
    published, another worker may take it at any time. Requests that wait for long take space on the broker's disks, so
    they are counted, and refused above a limit. A request that has ended already, or was cancelled before it arrived,
    does not wait: the claim gate answers it.
    """

    def __init__(self, claiming: Claiming, *, now_ms: NowMs) -> None:
        self._claiming = claiming
        self._now_ms = now_ms

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        """Return None if the request is due or has ended; otherwise the outcome that defers or refuses it. Raises
        StoreUnavailable if a long wait cannot be stored and counted."""
        due_ms = decoded.request.due_ms
        if due_ms is None:
            return None
        left_ms = due_ms - self._now_ms()
        if left_ms <= 0:
            return None
        # a request that a worker has deferred before was counted then, and is not refused now
        is_counted = job.hop.due_ms is None and left_ms > UNCOUNTED_MS
        defer = self._claiming.defer_for_long if is_counted else self._claiming.defer
        if not await defer(job, due_ms=due_ms, deadline_ms=decoded.request.deadline_ms):
            return None
        if is_counted and (refused := await self._count(job, due_ms)) is not None:
            return refused
        # the clock is read again, because the store may have needed some time
        return Deferred(delay_ms=max(0, due_ms - self._now_ms()), reason="scheduled", due_ms=due_ms)

    async def _count(self, job: Job, due_ms: int) -> Outcome | None:
        """Count a request that waits long towards the limits of how many requests its tenant, and all tenants together,
        may have waiting. Return the refusal if a limit is exceeded; otherwise None."""
        limit = await self._claiming.reserve(job, weight=1 + len(job.message.body) // UNIT_BYTES, until_ms=due_ms)
        if limit is WaitingLimit.WITHIN:
            return None
        return ended(
            "too_many_waiting",
            f"x-lane-delay-ms or x-lane-at is {UNCOUNTED_MS // 1000} s ahead or more, and {WHICH_LIMIT[limit]}: "
            "wait until some are due, or ask for a shorter delay",
        )

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Does nothing, because `enter` takes nothing that must be given back."""
