"""START HERE: this file shows, from top to bottom, the steps in which a worker handles one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from consumers.attempt import Attempts
from consumers.decoding import Decoding
from consumers.flows.pipelines import Pipelines
from consumers.flows.webhooks import Webhooks
from consumers.gates import Gate, Leave
from consumers.job import Decoded, Job, user_id_missing
from consumers.outcomes import Deferred, Outcome, Refused, end_with, end_with_problem
from consumers.replies import Replies
from consumers.settle import Failpoints
from lanekeeper import __version__
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import TENANT, is_tenant
from lanekeeper.contract.problems import RequestProblem
from topology.lanes import LaneSpec

ANOTHER_VERSION_MS: Final = 5000
"""How long what another version has to read is deferred, each time."""


@dataclass(slots=True, kw_only=True)
class Handler:
    """Turns a delivery into its outcome (`outcomes.py`): decodes the message, checks the request at the gates
    (deadline, claim, budget, …), and calls a provider. The delivery is acknowledged later, by `settle.py`."""

    gates: Sequence[Gate]
    attempts: Attempts
    replies: Replies
    webhooks: Webhooks
    failpoints: Failpoints
    decoding: Decoding
    exchange: str
    """The exchange for requests: what requesters published to another one is refused."""
    pipelines: Pipelines | None = None
    needs_user_id: bool = False

    async def handle(self, job: Job) -> Outcome:
        if (refused := self._refused(job)) is not None:
            return refused
        assert job.lane is not None
        if job.hop.flow_unread or job.hop.batch_unread:
            return of_another_version(job, job.lane)
        try:
            job.decoded = decoded = await self.decoding.decode(job, job.lane)
        except RequestProblem as problem:
            return end_with_problem(problem)
        if job.delivery.times_delivered is None:
            return Deferred(delay_ms=0, reason="redelivered", redelivered=True)
        self.failpoints.reach("before_claim")
        outcome: Outcome | None = None
        passed: list[Leave] = []
        try:
            for gate in self.gates:
                if gate.is_for_models and decoded.request.handler:
                    continue
                outcome = await gate.enter(job, decoded)
                if outcome is not None:
                    outcome = self._of_pipeline(job, outcome)
                    return outcome
                if gate.leave is not None:
                    passed.append(gate.leave)
                decoded = job.decoded or decoded  # the body gate replaces it by one with the fetched body
            self.failpoints.reach("after_claim")
            outcome = self._of_pipeline(job, await self.attempts.make(job, decoded))
            self.failpoints.reach("after_call")
            return outcome
        finally:
            await _leave(passed, job, decoded, outcome)

    def _of_pipeline(self, job: Job, outcome: Outcome) -> Outcome:
        return outcome if self.pipelines is None else self.pipelines.after(job, outcome)

    def _refused(self, job: Job) -> Outcome | None:
        if not job.trusted and job.message.exchange != self.exchange:
            return end_with(
                "invalid_request",
                f"published to exchange {job.message.exchange[:80]!r}: allowed is {self.exchange!r}",
            )
        if (tenant := job.identity.tenant) and job.hop.is_fresh and not is_tenant(tenant):
            which = "user_id" if tenant == job.hop.user_id else n.TENANT
            return end_with("invalid_request", f"{which}: {TENANT}; found {tenant[:80]!r}")
        if self.needs_user_id and not job.hop.user_id:
            return end_with_problem(user_id_missing())
        if (forbidden := self.replies.refusal(job) or self.webhooks.refusal(job)) is not None:
            return end_with_problem(forbidden)
        return None


def of_another_version(job: Job, lane: LaneSpec) -> Outcome:
    """The outcome of a message of which only workers of another version can read where its pipeline stands, or what of
    a provider's batch it has: it waits for one of them, because what they have put into its body is not known here."""
    since_ms = job.hop.first_seen_ms or job.taken_ms
    if job.taken_ms < since_ms + round(1000 * lane.deadline_max_s):
        return Deferred(delay_ms=ANOTHER_VERSION_MS, reason="another version")
    detail = f"version {__version__} cannot read where it stands, and no worker that can has taken it"
    return Refused(RequestProblem("deadline_exceeded", detail))


async def _leave(passed: list[Leave], job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
    try:
        while passed:
            await passed.pop()(job, decoded, outcome)
    finally:
        if passed:
            await _leave(passed, job, decoded, outcome)
