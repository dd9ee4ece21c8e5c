"""Sends a reply again if the reply queue was full. Until then the request waits in the broker's delay queues, so that
the worker can work on other requests.

The request is published to the delay exchanges, with a header which says that only its reply remains to be sent. When
the request is delivered again, its completion (how it ended) is read from the store. If the completion is not stored
under the request's id, because the request is invalid or the id belongs to another request, a header of the message
contains it. A minute after the first try the reply is given up, but a stored result can still be fetched.
"""

import json
from collections.abc import Awaitable, Callable

from consumers.claiming import Claiming
from consumers.job import Job
from consumers.outcomes import Outcome, Replayed
from consumers.state.base import Completion
from lanekeeper.contract import names as n
from lanekeeper.telemetry import logs, signals

PAUSES_S = (1, 2, 4, 8, 16, 30)
"""The pauses, in seconds, before the second and each later try to send a reply to a full queue. Together they last a
minute, in which a requester that was slow or was restarted has usually emptied its queue."""
MAX_WAITING = 1000
"""How many replies of one process may wait at a time because their reply queue is full. If there are more, the further
replies are given up at once."""
MOST_OF_ONE = 10
"""One tenant may have at most `MAX_WAITING` divided by this number of replies that wait because their queue is full.
For requests without a tenant (without `user_id`) the same limit applies to each reply queue."""
WARN_EVERY_MS = 1000
"""The shortest time, in ms, between two warnings in the log about replies that are given up."""
Handle = Callable[[Job], Awaitable[Outcome]]
log = logs.logger()


class ReplyRetries:
    """Decides whether a reply that a full queue has refused is sent again later, and when; limits how many replies wait
    in this way; and counts the replies that are given up."""

    def __init__(self, claiming: Claiming, *, max_waiting: int = MAX_WAITING) -> None:
        self._claiming = claiming
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, tuple[str, str]]] = []
        """For each waiting reply: when its request is delivered again, in ms since 1970, and to whom the reply belongs:
        ("tenant", the tenant's name) or, without a tenant, ("queue", the reply queue's name)."""
        self._next_warning_ms = 0
        self.given_up = 0
        """The number of replies that were given up because their queue was full."""

    def pause_ms(self, job: Job, *, now_ms: int) -> int | None:
        """Return after how many ms the job's reply, which a full queue has refused, is sent again. Return None if the
        reply is given up, which is counted and logged."""
        tenant = job.identity.tenant
        whose = ("tenant", tenant) if tenant else ("queue", job.message.reply_to or "")
        self._waiting = [(back_ms, owner) for back_ms, owner in self._waiting if back_ms > now_ms]
        of_one = sum(owner == whose for _, owner in self._waiting)
        is_full = len(self._waiting) >= self._max_waiting or of_one >= max(1, self._max_waiting // MOST_OF_ONE)
        if is_full or job.hop.reply_try >= len(PAUSES_S):
            self._note_given_up(job.hop.reply_try + 1, now_ms=now_ms)
            return None
        pause_ms = 1000 * PAUSES_S[job.hop.reply_try]
        self._waiting.append((now_ms + pause_ms, whose))
        return pause_ms

    def _note_given_up(self, tries: int, *, now_ms: int) -> None:
        """Count a reply that is not sent again, and log that: as a warning at most once a second, else as a debug
        line."""
        self.given_up += 1
        if now_ms < self._next_warning_ms:
            log.debug(signals.REPLY_GIVEN_UP, tries=tries, given_up=self.given_up)
            return
        self._next_warning_ms = now_ms + WARN_EVERY_MS
        log.warning(signals.REPLY_GIVEN_UP, tries=tries, given_up=self.given_up)

    def wrap(self, handle: Handle) -> Handle:
        """Return a function that calls `handle` for each delivery, except if the request has ended and only its reply
        must be sent again: then the function returns the outcome `Replayed`, with how the request ended.
        """

        async def reply_or_handle(job: Job) -> Outcome:
            if job.hop.reply_try and (completion := await self._completion(job)) is not None:
                return Replayed(completion=completion, is_reply_only=True)
            return await handle(job)  # the store has no completion any more: the request is worked on again

        return reply_or_handle

    async def _completion(self, job: Job) -> Completion | None:
        """How the job's request ended, whose reply must be sent again. This is read from a header of the message or, if
        the message has no such header, from the store; None if the store does not have it any more. Raises
        StoreUnavailable."""
        if (error := job.hop.reply_error) is None:
            found = await self._claiming.find(job.identity)
            return None if found is None else found.completion
        headers: dict[str, str | int] = {n.ATTEMPT: job.attempts}
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        code = str(json.loads(error)["code"])
        return Completion(status="error", code=code, body=error.encode(), headers=headers, ended_ms=job.taken_ms)
