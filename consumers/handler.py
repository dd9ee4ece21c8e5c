"""START HERE: the pipeline of one request, read from top to bottom."""

from collections.abc import Sequence

from consumers.attempt import Attempts
from consumers.decoding import Decoding
from consumers.failpoints import Failpoints
from consumers.gates.base import Gate
from consumers.job import Asked, Job
from consumers.outcomes import Deferred, Outcome, ended_by
from consumers.providers.routes import Routes
from consumers.replies.reply import Replies
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from topology.lanes import LaneSpec


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
        decoding: Decoding,
        needs_user_id: bool = False,
    ) -> None:
        """`needs_user_id`: refuse requests without `user_id`, whose owner is unknown."""
        self._gates = gates
        self._decoding = decoding
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
            request = await self._decoding.request(job, lane)
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
                asked = job.asked or asked  # the body gate has fetched the rest of it
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


async def _leave(passed: list[Gate], job: Job, asked: Asked, outcome: Outcome | None) -> None:
    """Leave all gates, the last one first, even if one of them raises or is cancelled."""
    try:
        while passed:
            await passed.pop().leave(job, asked, outcome)
    finally:
        if passed:
            await _leave(passed, job, asked, outcome)
