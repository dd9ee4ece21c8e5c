"""START HERE: the pipeline of one request, read from top to bottom."""

from collections.abc import Sequence
from functools import partial

from consumers.attempt import Attempts
from consumers.failpoints import Failpoints
from consumers.gates.base import Gate
from consumers.job import Asked, Job
from consumers.outcomes import Deferred, Outcome, ended_by
from consumers.providers.routes import Routes
from consumers.reading import Reading
from consumers.replies.reply import Replies
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from topology.codec import bounds, decoding
from topology.codec.request import Request
from topology.lanes import LaneSpec, urgency


class Handler:
    """Turns a delivery into its outcome. It does not settle it (`settle.py` does)."""

    def __init__(
        self,
        *,
        gates: Sequence[Gate],
        attempts: Attempts,
        routes: Routes,
        replies: Replies,
        names: Names,
        failpoints: Failpoints,
        reading: Reading,
        values: int = bounds.VALUES,
        needs_user_id: bool = False,
    ) -> None:
        """`needs_user_id`: refuse requests without `user_id`, whose owner is unknown."""
        self._gates = gates
        self._reading = reading
        self._values = values
        self._attempts = attempts
        self._routes = routes
        self._replies = replies
        self._failpoints = failpoints
        self._names = names
        self._needs_user_id = needs_user_id

    async def handle(self, job: Job, *, lane: LaneSpec) -> Outcome:
        """Check the delivery → decode it → enter the gates → make one attempt."""
        if (unfit := self._unfit(job)) is not None:
            return unfit
        try:
            request = await self._decode(job, lane)
        except RequestProblem as problem:
            return ended_by(problem)
        job.asked = asked = Asked(request, lane, self._routes.of(lane.name, job.identity.tenant, request.model))
        if job.delivery.times_delivered is None:
            # a classic intake (RabbitMQ 3.x) does not count deliveries; the due queue does
            return Deferred(delay_ms=0, reason="redelivered", redelivered=True)
        self._failpoints.reach("before_claim")
        outcome: Outcome | None = None
        passed: list[Gate] = []
        try:
            for gate in self._gates:
                outcome = await gate.enter(job, asked)
                if outcome is not None:
                    return outcome
                passed.append(gate)
            self._failpoints.reach("after_claim")
            outcome = await self._attempts.make(job, asked)
            self._failpoints.reach("after_call")
            return outcome
        finally:
            await _leave(passed, job, asked, outcome)

    def _unfit(self, job: Job) -> Outcome | None:
        """The outcome of a delivery that need not be decoded; None: it may go on."""
        if not job.trusted and job.message.exchange != self._names.requests:
            return ended_by(
                RequestProblem(
                    "invalid_request",
                    f"published to exchange {job.message.exchange[:80]!r}: allowed is {self._names.requests!r}",
                )
            )
        if self._needs_user_id and not job.user_id:
            return ended_by(
                RequestProblem(
                    "invalid_request",
                    "user_id: missing; publish with the property user_id, the name of the user that is connected: "
                    "without it nobody can tell whose the request is",
                )
            )
        if (forbidden := self._replies.refusal(job)) is not None:
            return ended_by(forbidden)
        return None

    async def _decode(self, job: Job, lane: LaneSpec) -> Request:
        """Decode a small body in one step, a larger one in several, so that the event loop can go on between them."""
        message = job.message
        rank = (urgency(lane.name), decoding.weight(message))
        decode = partial(
            decoding.decode,
            message,
            lane=lane,
            request_id=job.id,
            hop=job.hop if job.trusted else None,
            now_ms=job.taken_ms,
            values=self._values,
        )
        if decoding.weight(message) <= bounds.SMALL_BYTES:
            return await self._reading.turn(decode, rank=rank)
        raw = await self._reading.turn(partial(decoding.unpacked, message), rank=rank)
        if (excess := await self._reading.excess(raw, values=self._values, rank=rank)) is not None:
            raise decoding.too_large(excess)
        return await self._reading.turn(partial(decode, raw=raw), rank=rank)


async def _leave(passed: list[Gate], job: Job, asked: Asked, outcome: Outcome | None) -> None:
    """Leave all gates, the last one first, even if one of them raises or is cancelled."""
    try:
        while passed:
            await passed.pop().leave(job, asked, outcome)
    finally:
        if passed:
            await _leave(passed, job, asked, outcome)
