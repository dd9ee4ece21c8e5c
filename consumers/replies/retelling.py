"""Sends a reply again if its queue was full. No slot waits for that.

The request goes through a delay and comes back with a header that says that only its reply is left. Its outcome is then
read from the store. An outcome that is not stored there (it was no valid request, or the id belongs to another) travels
in a header. A minute after the first try the reply is given up; the result stays in the store.
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
"""A minute in total: by then a requester that was slow, or was restarted, has usually made room."""
WAITING = 1000
SHARE = 10
"""One tenant's replies may use a tenth of the limit, whatever the number of their queues. Without a tenant (no
`user_id`), the replies of one queue may."""
LOUD_EVERY_MS = 1000
Handle = Callable[[Job], Awaitable[Outcome]]
log = logs.logger()


class Retelling:
    """Counts the replies that this process has sent through a delay. It knows when each comes back."""

    def __init__(self, claiming: Claiming, *, waiting: int = WAITING) -> None:
        self._claiming = claiming
        self._most = waiting
        self._back: list[tuple[int, tuple[str, str]]] = []
        """A heap of when each comes back, and whose it is."""
        self._of: Counter[tuple[str, str]] = Counter()
        self._silent_until_ms = 0
        self.given_up = 0
        """How many replies were given up."""

    def pause_ms(self, job: Job, *, now_ms: int) -> int | None:
        """How long a refused reply waits for its next try; None: it is given up."""
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
        """Count a reply that is given up, and log a warning at most once a second."""
        self.given_up += 1
        tries = job.hop.reply_try + 1
        if now_ms < self._silent_until_ms:
            log.debug(signals.REPLY_GIVEN_UP, tries=tries, given_up=self.given_up)
            return
        self._silent_until_ms = now_ms + LOUD_EVERY_MS
        log.warning(signals.REPLY_GIVEN_UP, tries=tries, given_up=self.given_up)

    def first(self, handle: Handle) -> Handle:
        """Wraps `handle`: a request that only has its reply left is answered from the store."""

        async def told_or_handled(job: Job) -> Outcome:
            if job.hop.reply_try and (completion := await self._completion(job)) is not None:
                return Replayed(completion=completion, retold=True)
            return await handle(job)  # the store has lost it: the request is worked on again

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
