"""Builds and sends replies. The final reply is a persistent message, and the worker waits for its confirm. The parts of
a streamed answer (`parts.py`), which are sent before the final reply, are not persistent. `ReplyRetries` decides when a
reply is sent again that a full queue has refused, and `LargeAnswers` stores answers outside the broker."""

import asyncio
import json
import uuid
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final

from consumers.background import Background
from consumers.job import Job
from consumers.outcomes import Answered, Buried, Outcome
from consumers.replies.sender import ReplyRule, ReplySender
from consumers.state.base import Completion
from lanekeeper.amqp.publisher import SMALL_BYTES, Confirm, Publisher
from lanekeeper.bodies import KEEP_S, OVER_BYTES, BodiesUnavailable, BodyStore
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress, Message
from lanekeeper.contract.problems import (
    PROBLEMS,
    AccessRefused,
    MessageTooLarge,
    PublishRefused,
    RequestProblem,
    Unroutable,
    answer_too_large,
)
from lanekeeper.telemetry import logs, signals
from topology.codec.bounds import ANSWER_BYTES

JSON = "application/json"
PROBLEM = "application/problem+json"
PART_TIMEOUT_S = 5.0
log = logs.logger()


@dataclass(slots=True, eq=False)
class Replies:
    """Publishes replies to the default exchange. `loses_large_parts`: what happens if a part of a stream is too large
    for a message. True: the part is left out, because the whole answer can be stored outside the broker. False: the
    request ends with an error, because the final reply would be too large too."""

    sender: ReplySender
    _: KW_ONLY
    rule: ReplyRule
    loses_large_parts: bool = False

    def refusal(self, job: Job) -> RequestProblem | None:
        address = job.message.reply_to
        if not address:
            return None
        if self.rule.allows(address, user=job.hop.user_id):
            return self.sender.refusal(address)
        return self.rule.refusal(address, user=job.hop.user_id)

    async def final(self, job: Job, completion: Completion, *, replayed: bool = False) -> bool:
        """Send the final reply. Return False if the reply queue is full and refused it.

        If the reply queue does not exist any more, that is logged and is no error. Raises BrokerError if the broker
        does not confirm the reply for another reason.
        """
        if completion.code and not PROBLEMS[completion.code].answered:
            return True
        # the completion of a request that was cancelled before it arrived has no headers about its wait: add them here
        wait = {n.WAIT_MS: job.wait_ms, n.RUN_MS: job.run_ms, n.WAIT_FROM: job.published.by}
        headers: dict[str, Any] = {n.STATUS: completion.status, n.REQUEST_ID: job.id, **wait, **completion.headers}
        if replayed:
            headers[n.REPLAYED] = True
        is_answer = completion.status == "ok"
        try:
            return await self._final(
                job, body=completion.body, content_type=JSON if is_answer else PROBLEM, headers=headers
            )
        except MessageTooLarge as error:  # stored while the broker accepted larger messages: send a short error
            log.error(signals.ANSWER_UNSENT, size=error.size, limit=error.limit)
            problem = answer_too_large(error.size, error.limit).document(request=job.id, attempts=job.attempts)
            return await self._final(job, body=problem, content_type=PROBLEM, headers={**headers, n.STATUS: "error"})

    async def _final(self, job: Job, *, body: bytes, content_type: str, headers: dict[str, Any]) -> bool:
        address = job.message.reply_to
        if not address or not self.rule.allows(address, user=job.hop.user_id):
            return True
        message = Message(
            body=body,
            headers=headers,
            content_type=content_type,
            message_id=uuid.uuid4().hex,
            correlation_id=job.message.correlation_id,
        )
        try:
            await self.sender.send_surely(message, address)
        except Unroutable:
            log.info(signals.REPLY_UNROUTABLE)
        except AccessRefused as error:
            raise RequestProblem("internal", f"the worker's user may not send replies: {error}") from error
        except PublishRefused:
            return False
        return True

    async def part(self, job: Job, address: str, *, part: str, seq: int, body: bytes) -> "asyncio.Future[Confirm]":
        """Publish one part of a stream, and return the broker's confirm as a future.

        Raises BrokerError if the part was not sent, and RequestProblem if the address is forged. If the part is too
        large for a message, raises MessageTooLarge (a BrokerError) if `loses_large_parts` is true, otherwise
        RequestProblem.
        """
        headers: dict[str, Any] = {n.REQUEST_ID: job.id, n.ATTEMPT: job.attempts, n.PART: part, n.SEQ: seq}
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        message = Message(
            body=body, headers=headers, content_type=JSON, correlation_id=job.message.correlation_id, persistent=False
        )
        try:
            return await self.sender.write(message, address, timeout_s=PART_TIMEOUT_S)
        except MessageTooLarge as error:
            if self.loses_large_parts:
                raise
            raise answer_too_large(error.size, error.limit, setting="LANEKEEPER_BODIES__URL") from error


PAUSES_S = (1, 2, 4, 8, 16, 30)
"""The pauses, in seconds, before the second and each later try to send a reply to a full queue. Together they last a
minute, in which a requester that was slow or was restarted has usually emptied its queue."""
MAX_WAITING = 1000
"""How many replies of one process may wait at a time because their reply queue is full."""
MOST_OF_ONE = 10
"""One tenant may have at most `MAX_WAITING` divided by this number of replies that wait because their queue is full.
For requests without a tenant (without `user_id`) the same limit applies to each reply queue."""
WARN_EVERY_MS = 1000


class ReplyRetries:
    """Decides whether a reply that a full queue has refused is sent again later, and when; limits how many replies wait
    in this way; and counts the replies that are given up."""

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, tuple[str, str]]] = []
        self._next_warning_ms = 0
        self.given_up = 0

    def pause_ms(self, job: Job, *, now_ms: int) -> int | None:
        """After how many ms the job's reply, which a full queue has refused, is sent again; None: it is given up."""
        tenant = job.identity.tenant
        whose = ("tenant", tenant) if tenant else ("queue", job.message.reply_to or "")
        self._waiting = [(back_ms, owner) for back_ms, owner in self._waiting if back_ms > now_ms]
        of_one = sum(owner == whose for _, owner in self._waiting)
        is_full = len(self._waiting) >= self._max_waiting or of_one >= max(1, self._max_waiting // MOST_OF_ONE)
        if is_full or job.hop.reply_try >= len(PAUSES_S):
            self.given_up += 1
            is_due = now_ms >= self._next_warning_ms
            if is_due:
                self._next_warning_ms = now_ms + WARN_EVERY_MS
            tell = log.warning if is_due else log.debug
            tell(signals.REPLY_GIVEN_UP, tries=job.hop.reply_try + 1, given_up=self.given_up)
            return None
        pause_ms = 1000 * PAUSES_S[job.hop.reply_try]
        self._waiting.append((now_ms + pause_ms, whose))
        return pause_ms


SOON_S: Final = 5.0
"""For how many seconds a worker at first tries to store a large answer outside the broker. If that fails, and the
broker accepts a message of this size, the answer is sent in a message."""
KEEP_WITHIN_S: Final = 60.0
"""If an answer could not be stored outside the broker within `SOON_S`, and the broker does not accept a message of its
size, a worker tries again for this many seconds to store it, because the call to the provider was paid for."""
MARGIN_S: Final = 3600.0
"""A large answer that is stored outside the broker is kept for this many seconds longer than the result that contains
its address, because a client may read the answer some time after it has read the result."""
PAUSE_S: Final = 0.5


class LargeAnswers:
    """Brings outcomes into a form that can be sent."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        answer_bytes: int = ANSWER_BYTES,
        bodies: BodyStore | None = None,
        over_bytes: int = OVER_BYTES,
        keep_s: float = KEEP_S,
    ) -> None:
        self._publisher = publisher
        self._answer_bytes = answer_bytes
        self._bodies = bodies
        self._over_bytes = over_bytes
        self._keep_s = keep_s
        self._background = Background()

    def is_slow(self, outcome: Outcome) -> bool:
        at_once = SMALL_BYTES if self._bodies is None else self._over_bytes
        return isinstance(outcome, Answered) and at_once < len(outcome.body) <= self._answer_bytes

    async def sendable(self, outcome: Outcome, *, tenant: str = "") -> Outcome:
        """Return the outcome in a form that can be sent: unchanged, or with the address of its stored answer instead of
        the answer, or replaced by an error."""
        if not isinstance(outcome, Answered):
            return outcome
        if (size := len(outcome.body)) > self._answer_bytes:
            return Buried(answer_too_large(size, self._answer_bytes, setting="LANEKEEPER_RESULTS__ANSWER_BYTES"))
        bodies = self._bodies
        if bodies is not None and size <= self._over_bytes:
            return outcome
        if bodies is None:
            limit = await self._publisher.exceeded_limit(size)
            return outcome if limit is None else Buried(answer_too_large(size, limit, setting="LANEKEEPER_BODIES__URL"))
        kept = await self._keep(bodies, outcome.body, tenant=tenant, within_s=SOON_S)
        if kept is None:
            # the broker is asked only now, because it is asked by sending it a message of that size
            if (limit := await self._publisher.exceeded_limit(size)) is None:
                return outcome
            if (kept := await self._keep(bodies, outcome.body, tenant=tenant, within_s=KEEP_WITHIN_S)) is None:
                return Buried(answer_too_large(size, limit, is_away=True))
        return replace(outcome, body=place_of(kept, size), kept=kept)

    def forget(self, outcome: Outcome) -> None:
        """Begin to delete the answer of this outcome from the store of bodies, because the outcome is not used: the
        store of results already had another outcome of the request."""
        if self._bodies is not None and isinstance(outcome, Answered) and outcome.kept is not None:
            self._background.begin(_drop(self._bodies, outcome.kept), name="drop an answer")

    async def aclose(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)

    async def _keep(self, bodies: BodyStore, body: bytes, *, tenant: str, within_s: float) -> BodyAddress | None:
        cause = "no answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return await bodies.keep_answer(body, for_s=self._keep_s + MARGIN_S, tenant=tenant)
                    except BodiesUnavailable as error:
                        cause = error.cause
                    await asyncio.sleep(PAUSE_S)
        log.warning(signals.ANSWER_UNKEPT, error=cause, within_s=within_s)
        return None


async def _drop(bodies: BodyStore, kept: BodyAddress) -> None:
    with suppress(BodiesUnavailable):
        await bodies.drop_answer(kept)


def place_of(kept: BodyAddress, size: int) -> bytes:
    """The body of the reply if the answer, of `size` bytes, is stored outside the broker: a JSON object with the
    answer's address (`kept`), as docs/contract.md describes it."""
    place = {"type": "urn:lanekeeper:body", "address": kept.address, "sha256": kept.sha256, "bytes": size}
    return json.dumps(place).encode()
