"""START HERE: this file shows, from top to bottom, the steps in which a worker handles one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from consumers.attempt import Attempts
from consumers.decoding import Decoding
from consumers.failpoints import Failpoints
from consumers.gates.base import Gate
from consumers.job import Decoded, Job
from consumers.outcomes import Deferred, Outcome, ended, ended_by
from consumers.replies.reply import Replies
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from topology.lanes import LaneSpec


@dataclass(slots=True, kw_only=True)
class Handler:
    """Turns a delivery into its outcome (`outcomes.py`): decodes the message, checks the request at the gates
    (deadline, claim, budget, …), and calls a provider. The delivery is acknowledged later, by `settle.py`."""

    gates: Sequence[Gate]
    attempts: Attempts
    replies: Replies
    names: Names
    failpoints: Failpoints
    decoding: Decoding
    needs_user_id: bool = False
    """Whether requests without the property `user_id` are refused, because their tenant is unknown."""

    async def handle(self, job: Job, *, lane: LaneSpec) -> Outcome:
        """Find the outcome of a delivery in these steps: check the delivery → decode its message → enter the gates (the
        checks before a call to a provider) → make one attempt → leave the gates, which give back what they took, such
        as the claim of a request that has not ended. If a check or a gate already decides the outcome (the request is
        refused, for example, or must wait), no attempt is made."""
        if (refused := self._refused(job)) is not None:
            return refused
        try:
            job.decoded = decoded = await self.decoding.decode(job, lane)
        except RequestProblem as problem:
            return ended_by(problem)
        if job.delivery.times_delivered is None:
            # a classic intake (RabbitMQ 3.x) does not count deliveries; the due queue does
            return Deferred(delay_ms=0, reason="redelivered", redelivered=True)
        self.failpoints.reach("before_claim")
        outcome: Outcome | None = None
        passed: list[Gate] = []
        try:
            for gate in self.gates:
                outcome = await gate.enter(job, decoded)
                if outcome is not None:
                    return outcome
                passed.append(gate)
                decoded = job.decoded or decoded  # the body gate replaces it by one with the fetched body
            self.failpoints.reach("after_claim")
            outcome = await self.attempts.make(job, decoded)
            self.failpoints.reach("after_call")
            return outcome
        finally:
            await _leave(passed, job, decoded, outcome)

    def _refused(self, job: Job) -> Outcome | None:
        """The outcome of a delivery that is refused because of its exchange, its user or its reply address; None if the
        delivery is not refused."""
        if not job.trusted and job.message.exchange != self.names.requests:
            return ended(
                "invalid_request",
                f"published to exchange {job.message.exchange[:80]!r}: allowed is {self.names.requests!r}",
            )
        if self.needs_user_id and not job.hop.user_id:
            return ended(
                "invalid_request",
                "user_id: missing; publish with the property user_id, the name of the user that is connected: "
                "without it nobody can tell whose the request is",
            )
        if (forbidden := self.replies.refusal(job)) is not None:
            return ended_by(forbidden)
        return None


async def _leave(passed: list[Gate], job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
    """Call `leave` of each gate in `passed`, the last gate first. If one of these calls raises or is cancelled, `leave`
    of the other gates is still called."""
    try:
        while passed:
            await passed.pop().leave(job, decoded, outcome)
    finally:
        if passed:
            await _leave(passed, job, decoded, outcome)
