"""Which requests go into a provider's batch, and what they take along."""

import json
from dataclasses import replace
from typing import Any

from consumers.gates import BatchGate
from consumers.job import Chain, Job, Route
from consumers.limits.base import Amounts
from consumers.outcomes import Batched, Outcome
from consumers.providers.breakers import Breakers
from lanekeeper.contract import names as n
from tests.support.jobs import NOW_MS, Bench, decoded, read
from topology.codec.headers import BatchHop, HopHeaders, hop_headers
from topology.lanes import BATCH, BatchSpec, LaneSpec

ROUTE = Route(provider="one", model=BATCH.model, name="haiku-by-its-own-name", account="one/haiku")
BODY = {"model": BATCH.model, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def gate(*, has_batches: bool = True) -> BatchGate:
    return BatchGate(
        Breakers(),
        estimate=lambda _, __, ___: Amounts(1, 50.4, 20.2),
        has_batches=lambda provider: has_batches and provider == "one",
        now_ms=lambda: NOW_MS,
    )


def a_job(lane: LaneSpec = BATCH, **properties: Any) -> Job:
    given = {"routing_key": "batch.crm.enrich", "user_id": "crm", **properties}
    return read(Bench().job(lane=lane, body=json.dumps(BODY).encode(), **given), Chain((ROUTE,)))


async def enter(job: Job, **given: Any) -> Outcome | None:
    return await gate(**given).enter(job, decoded(job))


async def test_the_nearest_deadline_that_is_gathered_is_a_setting() -> None:
    assert isinstance(await enter(a_job(headers={"x-lane-deadline-ms": 7_200_000})), Batched)
    patient = replace(BATCH, batches=BatchSpec(enabled=True, least_s=86_401))
    assert await enter(a_job(patient)) is None


async def test_other_lanes_and_providers_without_batches_run_live() -> None:
    assert await enter(a_job(replace(BATCH, batches=BatchSpec()))) is None
    assert await enter(a_job(), has_batches=False) is None


async def test_a_body_that_lies_elsewhere_runs_live() -> None:
    headers = {n.BODY: "https://crm.example/body", n.BODY_SHA256: "0" * 64}
    job = read(Bench().job(lane=BATCH, body=b"", routing_key="batch.crm.x", headers=headers), Chain((ROUTE,)))
    job.decoded = replace(decoded(job), request=replace(decoded(job).request, body=b"{}", kept=None))
    assert await enter(job) is None


def back(**batch: Any) -> Job:
    """A request that a batch, or its gathering, has sent back."""
    headers = hop_headers(HopHeaders(batch=BatchHop(**batch), user_id="crm", first_seen_ms=NOW_MS))
    return a_job(exchange="lane.due", headers=headers)


async def test_what_another_ticket_had_is_gathered_again_and_remembers_how_often() -> None:
    job = back(tries=3, ticket="a1")
    assert isinstance(await enter(job), Batched)
    assert job.batch is not None
    assert (job.batch.tries, job.batch.ticket) == (3, "a1")


async def test_a_requester_cannot_say_that_a_batch_had_it() -> None:
    forged = hop_headers(HopHeaders(batch=BatchHop(live=True, result_bytes=5)))
    job = a_job(headers=forged)
    assert job.batch is None
    assert job.batch_result is None
    assert isinstance(await enter(job), Batched)
