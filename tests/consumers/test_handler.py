"""The pipeline: each step, in order, can end a request, and each gate gives back what it took."""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
from typing_extensions import override

from consumers.dialects.answers import Answer, OnEvent
from consumers.failures import OverloadedError, TransientError
from consumers.gates import ClaimGate, Gate, defer_until_due, refuse_if_late
from consumers.job import Decoded, Job, Route
from consumers.large_bodies import Fetching
from consumers.limits.base import CallInProgress
from consumers.outcomes import DeadLettered, Deferred, Outcome, Refused, Retried
from consumers.providers.breakers import Breakers
from consumers.providers.registry import Registry
from consumers.slots.pausing import Pausing
from consumers.state.base import Identity
from lanekeeper.contract import names as n
from lanekeeper.telemetry.tracing import Tracing
from tests.support.jobs import BODY, NOW_MS, Bench, attempts, handler
from tests.support.waiting import until
from topology.codec.decoding import Request
from topology.lanes import CRITICAL


class FakeProvider:
    """Answers, or raises. `asked`: the requests that it got."""

    name = "fake"
    batches = None

    def __init__(self, error: BaseException | None = None, *, takes_s: float = 0) -> None:
        self.error = error
        self.takes_s = takes_s
        self.asked: list[tuple[Request, float]] = []

    async def stream(
        self,
        request: Request,
        *,
        timeout_s: float,
        parts: OnEvent | None,
        in_progress: CallInProgress | None = None,
        **_: Any,
    ) -> Answer:
        self.asked.append((request, timeout_s))
        for event in (b'{"type":"a"}', b'{"type":"b"}') if parts else ():
            await parts(event)  # type: ignore[misc]
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return Answer(body=b"{}", model="claude-x", provider="fake")

    async def probe(self, model: str, *, by_call: bool) -> None: ...

    async def aclose(self) -> None: ...


class FakeGate:
    def __init__(self, log: list[str], name: str, outcome: Outcome | None = None) -> None:
        self._log, self._name, self._outcome = log, name, outcome

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        self._log.append(f"{self._name} enter")
        return self._outcome

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        self._log.append(f"{self._name} leave {type(outcome).__name__}")


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def handle(
    bench: Bench,
    job: Job,
    provider: FakeProvider | None = None,
    *,
    gates: Sequence[FakeGate | ClaimGate] | None = None,
    pausing: Pausing | None = None,
    breakers: Breakers | None = None,
) -> Outcome:
    bodies = Fetching(None, most_bytes=0)
    steps = handler(
        attempts(
            Registry(provider or FakeProvider(), tracing=Tracing()),
            replies=bench.replies,
            lifecycle=bench.lifecycle,
            breakers=breakers,
            pausing=pausing,
        ),
        gates=(
            Gate(partial(refuse_if_late, breakers=Breakers(), now_ms=lambda: NOW_MS)),
            Gate(partial(defer_until_due, claiming=bench.claiming, bodies=bodies, now_ms=lambda: NOW_MS)),
        )
        if gates is None
        else [Gate(gate.enter, gate.leave) for gate in gates],
        provider="fake",
        replies=bench.replies,
    )
    return await steps.handle(job)


def code(outcome: Outcome) -> str:
    assert isinstance(outcome, DeadLettered | Refused)
    return outcome.problem.code


@pytest.mark.parametrize("exchange", ["lane.requests", "", "lane.delayed", "lane.due2", "my.lane.due", "lane.fallen"])
async def test_internal_headers_are_not_believed_on_other_messages(bench: Bench, exchange: str) -> None:
    job = bench.job(exchange=exchange, headers={n.ATTEMPT: 2, n.USER_ID: "bank"}, user_id="shop")
    await handle(bench, job)
    assert job.attempts <= 1
    assert job.identity.tenant == "shop"


@pytest.mark.parametrize("tenant", ["a\x00b", "a b", "a" * 129, "\ud83d", "a\u202eb"])
@pytest.mark.parametrize("is_user", [False, True])
async def test_a_tenant_is_checked_like_an_id(bench: Bench, tenant: str, is_user: bool) -> None:
    provider = FakeProvider()
    job = bench.job(user_id=tenant if is_user else None)
    job.identity = Identity(tenant, "m-1")
    outcome = await handle(bench, job, provider)
    assert isinstance(outcome, DeadLettered)
    assert outcome.problem.detail.startswith(f"{'user_id' if is_user else n.TENANT}: allowed are 1 to 128 letters")
    assert provider.asked == []


async def test_a_redelivery_from_a_queue_without_a_counter_is_moved_to_the_due_queue(bench: Bench) -> None:
    delivery = bench.delivery()
    delivery.redelivered, delivery.times_delivered = True, None
    provider = FakeProvider()
    outcome = await handle(bench, bench.job(delivery=delivery), provider)
    assert outcome == Deferred(delay_ms=0, reason="redelivered", redelivered=True)
    assert provider.asked == []


@pytest.mark.parametrize("wrong", [{"exchange": ""}, {"routing_key": "batch.a.b"}, {"headers": {"CC": ["x"]}}])
async def test_an_invalid_redelivery_from_a_queue_without_a_counter_is_refused(
    bench: Bench, wrong: dict[str, Any]
) -> None:
    delivery = bench.delivery(**wrong)
    delivery.redelivered, delivery.times_delivered = True, None
    assert code(await handle(bench, bench.job(delivery=delivery))) == "invalid_request"


async def test_what_another_version_wrote_of_a_batch_waits_for_it_as_it_is(bench: Bench) -> None:
    written = '{"result_bytes": 3, "of_the_future": 1}'
    job = bench.job(exchange="lane.due", body=BODY + b"{1}", headers={n.BATCH: written, n.FIRST_SEEN_MS: NOW_MS})

    outcome = await handle(bench, job)

    assert outcome == Deferred(delay_ms=5000, reason="another version")
    await bench.settler.settle(job, outcome)
    (sent,) = bench.publisher.sent
    assert (sent.message.headers[n.BATCH], sent.message.body) == (written, BODY + b"{1}")


class Down(Breakers):
    """Breakers that allow every call, and are all open after it failed."""

    @override
    def least_wait_s(self, routes: Iterable[Route]) -> float:
        return 2.0


async def test_an_attempt_that_sent_parts_counts_so_that_the_next_sends_a_restart(bench: Bench) -> None:
    job = bench.job(headers={n.STREAM: True})

    outcome = await handle(bench, job, FakeProvider(OverloadedError("529")), breakers=Down())

    assert isinstance(outcome, Retried)
    assert job.attempts == 1


@pytest.mark.parametrize("error", [TransientError("cut", type="cut"), TransientError("hangs", type="timeout")])
async def test_a_failure_that_may_have_been_paid_counts_although_the_provider_is_down(
    bench: Bench, error: Exception
) -> None:
    job = bench.job(exchange="lane.due", headers={n.ATTEMPT: CRITICAL.max_attempts - 1, n.FIRST_SEEN_MS: NOW_MS})

    assert code(await handle(bench, job, FakeProvider(error), breakers=Down())) == "attempts_exhausted"


async def test_a_timeout_error_that_is_not_the_deadlines_is_an_internal_error(bench: Bench) -> None:
    with pytest.raises(TimeoutError):
        await handle(bench, bench.job(), FakeProvider(TimeoutError()))


async def test_all_gates_are_left_although_one_is_cancelled_while_it_gives_back(bench: Bench) -> None:
    log: list[str] = []

    class Slow(FakeGate):
        @override
        async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
            await super().leave(job, decoded, outcome)
            await asyncio.sleep(30)

    working = asyncio.create_task(handle(bench, bench.job(), gates=(FakeGate(log, "a"), Slow(log, "b"))))
    await until(lambda: "b leave Answered" in log)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert log[-1] == "a leave Answered"


async def test_a_request_that_waits_during_a_pause_counts_no_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.attempt.ATTEMPT_WITHIN_S", 0.02)
    paused = Pausing({"store": lambda: "locked"})
    job, provider = bench.job(), FakeProvider()
    outcome = await handle(bench, job, provider, pausing=paused)
    assert outcome == Deferred(delay_ms=1000, reason="paused")
    assert (job.attempts, provider.asked) == (0, [])
