"""A reply that its queue refuses (it is full) is told again beside the lane, and never waited for in a slot.

The request goes through a delay and comes back with a header that says: only its reply is left. How it ended is read
from the store then; what is not kept there (it was no request, or its id is another's) goes along. A minute after the
first try it is given up: the result stays under its id.
"""

import heapq
import json
from collections import Counter
from collections.abc import Awaitable, Callable

from consumers.claiming import Claiming
from consumers.job import Job
from consumers.outcomes import Outcome, Replayed
from consumers.state.base import Completion
from lanekeeper.contract import names as n
from lanekeeper.telemetry import logs, signals

PAUSES_S = (1, 2, 4, 8, 16, 30)
"""A minute together: a requester that was slow, or is started again, has made room by then."""
WAITING = 1000
SHARE = 10
"""What one tenant's replies may take of the bound: a tenth, in however many queues. Where nobody knows the tenant
(`user_id` is missing), those of one queue."""
LOUD_EVERY_MS = 1000
Handle = Callable[[Job], Awaitable[Outcome]]
log = logs.logger()


class Retelling:
    """Counts the replies that this process has sent round; when one comes back is known, so nobody need tell."""

    def __init__(self, claiming: Claiming, *, waiting: int = WAITING) -> None:
        self._claiming = claiming
        self._most = waiting
        self._back: list[tuple[int, tuple[str, str]]] = []
        """When each comes back, and whose it is: a heap."""
        self._of: Counter[tuple[str, str]] = Counter()
        self._silent_until_ms = 0
        self.given_up = 0
        """Replies that were never taken."""

    def pause_ms(self, job: Job, *, now_ms: int) -> int | None:
        """How long a reply that was refused just now waits for its next try; None: it is given up."""
        tenant = job.identity.tenant
        whose = ("tenant", tenant) if tenant else ("queue", job.message.reply_to or "")
        while self._back and self._back[0][0] <= now_ms:
            _, back = heapq.heappop(self._back)
            self._of[back] -= 1
            if not self._of[back]:
                del self._of[back]
        is_full = len(self._back) >= self._most or self._of[whose] >= max(1, self._most // SHARE)
        if is_full or job.hop.reply_try >= len(PAUSES_S):
            return None
        pause_ms = 1000 * PAUSES_S[job.hop.reply_try]
        heapq.heappush(self._back, (now_ms + pause_ms, whose))
        self._of[whose] += 1
        return pause_ms

    def give_up(self, job: Job, *, now_ms: int) -> None:
        """Loudly, but not once for each of a flood."""
        self.given_up += 1
        tries = job.hop.reply_try + 1
        if now_ms < self._silent_until_ms:
            log.debug(signals.REPLY_GIVEN_UP, tries=tries, given_up=self.given_up)
            return
        self._silent_until_ms = now_ms + LOUD_EVERY_MS
        log.warning(signals.REPLY_GIVEN_UP, tries=tries, given_up=self.given_up)

    def first(self, handle: Handle) -> Handle:
        """`handle`, but for what only has its reply left."""

        async def told_or_handled(job: Job) -> Outcome:
            if job.hop.reply_try and (completion := await self._completion(job)) is not None:
                return Replayed(completion=completion, retold=True)
            return await handle(job)  # the store has lost it: it is worked again

        return told_or_handled

    async def _completion(self, job: Job) -> Completion | None:
        """Raises StoreUnavailable."""
        if (error := job.hop.reply_error) is None:
            found = await self._claiming.find(job.identity)
            return None if found is None else found.completion
        headers: dict[str, str | int] = {n.ATTEMPT: job.attempts}
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        code = str(json.loads(error)["code"])
        return Completion(status="error", code=code, body=error.encode(), headers=headers, ended_ms=job.taken_ms)
