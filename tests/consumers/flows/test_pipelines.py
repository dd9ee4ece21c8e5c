"""What a pipeline makes of a delivery: the request of its step, and its step's output."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from consumers.claiming import Claiming
from consumers.flows.pipelines import (
    KEEPER_MS,
    SPLIT_BYTES,
    Pipelines,
    PipelineSpec,
    StepSpec,
    _side_of,
    with_output,
)
from consumers.flows.pool_worker import unpacked
from consumers.flows.rendering import Rendering
from consumers.flows.templates import fill_in
from consumers.job import Chain, Decoded, Job, Route, Source, state_identity
from consumers.outcomes import DeadLettered, Deferred, Outcome, PipelineAdvanced, Refused
from consumers.providers.registry import Registry
from consumers.state.base import UNIT_BYTES, Completion, Ending, Granted, Identity, StoreSpec
from consumers.strays import Strays
from lanekeeper import __version__
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry.tracing import Tracing
from tests.consumers.test_handler import FakeProvider
from tests.support.completions import answered, failed, fingerprint
from tests.support.jobs import BODY, NAMES, NOW_MS, Bench, attempts, decoded, handler, read
from tests.support.memory_store import MemoryStore
from topology.codec.decoding import state_of
from topology.codec.headers import LOOKS, FlowHop, read_hop
from topology.lanes import DEFAULT_LANES

pytestmark = pytest.mark.usefixtures("returned_at_once")
FAILED = replace(failed(), body=b'{"detail":"broke","status":418}')
ROUTES = Chain((Route(provider="one", model="m", name="m", account="one/m"),))


class InThisProcess(Rendering):
    """Fills in without a process."""

    @override
    async def _once(self, call: bytes, *, rank: int, tenant: str) -> list[tuple[bytes, bytes]]:
        return unpacked(fill_in(call))


def pipelines(bench: Bench, *steps: StepSpec) -> Pipelines:
    return Pipelines(
        specs=[PipelineSpec("p", steps)],
        lanes={lane.name: lane for lane in DEFAULT_LANES},
        claiming=bench.claiming,
        publisher=bench.publisher,
        names=NAMES,
        rendering=InThisProcess(),
        chain_of=lambda lane, tenant, model: ROUTES,
        reach_soon=lambda name: None,
        now_ms=lambda: NOW_MS,
    )


def given(bench: Bench, body: bytes) -> tuple[Job, Decoded]:
    job = read(bench.job())
    found = decoded(job)
    job.decoded = replace(found, request=replace(found.request, pipeline="p", body=body, states_stream=True))
    return job, job.decoded


async def test_the_first_item_that_failed_ends_the_pipeline_and_what_ended_is_done_without_gaps() -> None:
    bench = Bench()
    bench.store.now_ms = 0
    steps = pipelines(bench, StepSpec(name="s", handler="h", each="input"))
    job, found = given(bench, b"[1,2,3,4]")
    outcome = await steps.enter(job, found)
    items = [Identity(job.identity.tenant, each.message.message_id or "") for each in bench.publisher.sent]
    for ends, done in (({2: answered()}, (0, 1)), ({0: answered()}, (1, 2)), ({1: FAILED, 3: FAILED}, None)):
        for k, end in ends.items():
            claim = await bench.store.claim(items[k], fingerprint())
            assert isinstance(claim, Granted)
            await bench.store.complete(items[k], fingerprint(), end, token=claim.token)
        assert isinstance(outcome, PipelineAdvanced)
        job.hop = replace(job.hop, flow=outcome.flow)
        job.decoded = replace(found, request=replace(found.request, body=outcome.state))
        outcome = await steps.enter(job, job.decoded)
        if done is not None:
            assert isinstance(outcome, PipelineAdvanced)
            assert (outcome.flow.done, outcome.done) == done
    assert isinstance(outcome, (Refused, DeadLettered))
    assert "item 2: broke" in outcome.problem.detail
    assert outcome.problem.status == 418


async def test_what_another_version_wrote_is_never_run_as_input_and_waits_as_it_is() -> None:
    bench = Bench()
    text = '{"step": "s", "deadline_ms": 1, "of_a_later_version": 1}'
    job = bench.job(headers={n.FLOW: text}, exchange="lane.due")
    calls = attempts(Registry(FakeProvider(), tracing=Tracing()), replies=bench.replies, lifecycle=bench.lifecycle)
    steps = handler(calls, gates=[], provider="fake", replies=bench.replies)

    outcome = await steps.handle(job)

    assert isinstance(outcome, Deferred)
    assert await bench.settler.settle(job, outcome)
    assert bench.publisher.sent[0].message.headers[n.FLOW] == text
    assert bench.publisher.sent[0].message.body == job.message.body
    job = bench.job(headers={n.FLOW: text, n.FIRST_SEEN_MS: 5}, exchange="lane.due")
    ended = await steps.handle(job)
    assert isinstance(ended, Refused)
    assert f"version {__version__} cannot read" in ended.problem.detail


def at_step(job: Job, step: str, state: bytes) -> Decoded:
    """The delivery of a pipeline that stands at `step`."""
    job.hop = replace(job.hop, flow=FlowHop(step=step, deadline_ms=NOW_MS, input_bytes=2, routing_key="critical.a.b"))
    found = decoded(job)
    job.decoded = replace(found, request=replace(found.request, body=state))
    return job.decoded


async def test_a_step_that_the_settings_no_longer_have_ends_the_request() -> None:
    bench = Bench()
    job, _ = given(bench, b"{}")
    found = at_step(job, "gone", b'{"input":{},"outputs":{}}')
    outcome = await pipelines(bench, StepSpec(name="s", handler="h")).enter(job, found)
    assert isinstance(outcome, (Refused, DeadLettered))
    assert outcome.problem.code == "internal"
    assert "has no step 'gone' any more" in outcome.problem.detail


async def end(bench: Bench, item: Identity, completion: Completion) -> None:
    bench.store.now_ms = 0
    claim = await bench.store.claim(item, fingerprint())
    assert isinstance(claim, Granted)
    await bench.store.complete(item, fingerprint(), completion, token=claim.token)


async def again(steps: Pipelines, job: Job, found: Decoded, outcome: Outcome | None) -> Outcome | None:
    """What becomes of the delivery that this outcome publishes."""
    assert isinstance(outcome, PipelineAdvanced)
    job.hop = replace(job.hop, flow=outcome.flow)
    job.decoded = replace(found, request=replace(found.request, body=outcome.state))
    return await steps.enter(job, job.decoded)


EACH = StepSpec(name="s", handler="h", each="input")


@pytest.mark.parametrize("is_known", [False, True])
async def test_if_the_store_loses_an_item_before_all_are_joined_the_fan_out_looks_again_from_the_first(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    steps = pipelines(bench, EACH)
    job, found = given(bench, b"[1]")
    outcome = await steps.enter(job, found)
    (item,) = (Identity(job.identity.tenant, each.message.message_id or "") for each in bench.publisher.sent)
    await end(bench, item, answered("1"))
    endings, looks = bench.store.endings, 0

    async def lost(requests: Sequence[Identity]) -> Any:
        nonlocal looks
        looks += 1
        return await endings(requests) if looks < 2 else [Ending() if is_known else None]

    monkeypatch.setattr(bench.store, "endings", lost)
    outcome = await again(steps, job, found, outcome)
    assert isinstance(outcome, PipelineAdvanced)
    assert (outcome.flow.step, outcome.flow.done, outcome.delay_ms, outcome.of) == ("s", 0, 100, 1)


@pytest.mark.parametrize(("user", "tenant", "told"), [(None, "", False), ("a", "a", False), (None, "a", True)])
async def test_an_item_belongs_to_the_tenant_of_its_pipeline(user: str | None, tenant: str, told: bool) -> None:
    bench = Bench()
    job, found = given(bench, b"[1]")
    job.hop, job.identity = replace(job.hop, user_id=user), Identity(tenant, job.id)
    await pipelines(bench, EACH).enter(job, found)
    (item,) = bench.publisher.sent
    assert item.message.headers.get(n.TENANT) == (tenant if told else None)


@pytest.mark.parametrize("step", [{"handler": "h"}, {"prompt": "x"}])
async def test_an_item_is_a_fresh_request_of_its_pipelines_app_with_its_trace_its_key_and_what_the_provider_gets(
    step: dict[str, str],
) -> None:
    bench = Bench()
    steps = pipelines(bench, StepSpec(name="s", each="input", **step))  # type: ignore[arg-type]
    steps.reach_soon = bench.log.append
    job, found = given(bench, b"[1]")
    carried = {n.TRACEPARENT: f"00-{'1' * 32}-{'2' * 16}-01", n.ANTHROPIC_BETA: "b", n.KEY: "k"}
    carried |= {n.ANTHROPIC_VERSION: "2024-01-01", "Anthropic-Workspace-Id": "w"}
    job.delivery.message.headers = {**carried, "x-own": 7}
    await steps.enter(job, found)
    (sent,) = bench.publisher.sent
    assert sent.routing_key == "critical.shop.chat"
    assert sent.message.type == step.get("handler")
    assert {name: sent.message.headers.get(name) for name in (*carried, "x-own")} == {**carried, "x-own": None}
    assert read_hop(sent.message.headers).is_fresh
    assert sent.message.message_id == "m-1#s~ef6555d1.1", "the same in workers of all versions"
    assert bench.log[:2] == ["after_publish", f"confirmed: {sent.exchange}"]


def test_workers_of_all_versions_look_for_a_tenant_in_the_same_side_queue_first() -> None:
    lane = replace(DEFAULT_LANES[0], side_queues=8)
    assert [_side_of(tenant, lane) for tenant in ("", "a", "b", "crm", "shop", "search")] == [6, 6, 7, 1, 6, 0]


LARGE = json.dumps(["x" * SPLIT_BYTES]).encode()


async def round_of(bench: Bench, steps: Pipelines) -> tuple[Job, Message, Message]:
    """A fan-out that was published, and the two messages that go round then: that which keeps its state, and that which
    looks."""
    job, found = given(bench, LARGE)
    job.message.body = LARGE
    outcome = await steps.enter(job, found)
    assert isinstance(outcome, PipelineAdvanced)
    await bench.settler.settle(job, outcome)
    keeper, looker = (each.message for each in bench.publisher.sent[-2:])
    return job, keeper, looker


def back(bench: Bench, message: Message) -> tuple[Job, Decoded]:
    """The delivery of a message that went round."""
    job = bench.job(body=message.body, headers=message.headers, exchange="lane.due", message_id=message.message_id)
    found = decoded(read(bench.job()))
    job.decoded = replace(found, request=replace(found.request, pipeline="p", body=message.body))
    return job, job.decoded


async def test_a_large_state_goes_round_once_and_the_message_that_looks_is_small() -> None:
    bench = Bench()
    bench.store.now_ms = 0
    steps = pipelines(bench, EACH, StepSpec(name="t", handler="h"))
    job, keeper, looker = await round_of(bench, steps)

    assert keeper.body == state_of(LARGE)
    assert (keeper.headers[n.BACK_MS] - keeper.headers[n.HOP_MS]) == KEEPER_MS
    assert looker.body == b""
    (item,) = bench.publisher.sent[:1]
    for ended in (False, True):
        if ended:
            await end(bench, Identity(job.identity.tenant, item.message.message_id or ""), answered("1"))
        looks, found = back(bench, looker)
        outcome = await steps.enter(looks, found)
        assert isinstance(outcome, PipelineAdvanced)
        assert outcome.flow.role == ("" if ended else LOOKS)
        assert outcome.state == (with_output(state_of(LARGE), "s", b"[1]") if ended else b"")


async def test_a_state_that_the_store_has_lost_is_awaited_and_comes_back_with_the_message_that_keeps_it() -> None:
    bench, other = Bench(), Bench()
    bench.store.now_ms = other.store.now_ms = 0
    _, keeper, looker = await round_of(bench, pipelines(bench, EACH))
    steps = pipelines(other, EACH)
    looks, found = back(other, looker)

    waits = await steps.enter(looks, found)

    assert isinstance(waits, PipelineAdvanced)
    assert (waits.state, waits.flow.role, waits.delay_ms) == (b"", LOOKS, KEEPER_MS)
    assert other.publisher.sent == [], "the item cannot be made yet"

    keeps = await steps.arrive(*back(other, keeper))
    assert isinstance(keeps, Deferred)
    assert keeps.delay_ms == KEEPER_MS
    again_found = await steps.enter(*back(other, looker))
    assert isinstance(again_found, PipelineAdvanced)
    assert len(other.publisher.sent) == 1, "the item is published again"


async def test_a_request_whose_state_the_store_has_lost_is_buried_when_it_is_back() -> None:
    bench, other = Bench(), Bench()
    bench.store.now_ms = other.store.now_ms = 0
    _, keeper, looker = await round_of(bench, pipelines(bench, EACH))
    killed = DeadLettered(RequestProblem("poison", "it kills"))

    assert await other.settler.settle(back(other, looker)[0], killed) is None, "it is delivered again"

    assert isinstance(await pipelines(other, EACH).arrive(*back(other, keeper)), Refused)
    await other.settler.settle(back(other, looker)[0], killed)
    (letter,) = (each.message for each in other.publisher.sent if each.exchange == NAMES.dead)
    assert letter.body == LARGE


@pytest.mark.parametrize(
    ("end", "kept"),
    [("cancelled", b""), ("ok", b""), ("attempts_exhausted", state_of(LARGE)), ("deadline", state_of(LARGE))],
)
async def test_the_message_that_keeps_a_state_ends_in_silence_with_its_pipeline(end: str, kept: bytes) -> None:
    bench = Bench()
    bench.store.now_ms = 0
    steps = pipelines(bench, EACH)
    job, keeper, _ = await round_of(bench, steps)
    if end == "deadline":
        assert job.decoded is not None
        deadline_ms = job.decoded.request.deadline_ms
        steps.now_ms = lambda: deadline_ms
    else:
        completion = answered() if end == "ok" else failed(end)
        await bench.store.complete(job.identity, job.fingerprint, completion, token=None)
    sent = len(bench.publisher.sent)

    keeps, found = back(bench, keeper)
    outcome = await steps.arrive(keeps, found)
    assert isinstance(outcome, Refused)
    assert outcome.is_silent
    await bench.settler.settle(keeps, outcome)

    assert len(bench.publisher.sent) == sent
    assert (
        await bench.claiming.state(state_identity(job.identity, keeps.hop.flow or FlowHop(step="", deadline_ms=0)))
        == kept
    )


async def test_a_second_message_that_keeps_a_state_ends_although_the_store_has_forgotten_the_request() -> None:
    bench, other = Bench(), Bench()
    bench.store.now_ms = other.store.now_ms = 0
    job, keeper, _ = await round_of(bench, pipelines(bench, EACH))
    kept = state_identity(job.identity, read_hop(keeper.headers).flow or FlowHop(step="", deadline_ms=0))
    await other.claiming.keep_state(kept, b"", deadline_ms=NOW_MS + 1000)

    assert isinstance(await pipelines(other, EACH).arrive(*back(other, keeper)), Refused)
    assert await other.claiming.state(kept) == b""


async def test_a_message_that_keeps_a_state_and_fell_out_of_its_lane_is_no_request() -> None:
    bench = Bench()
    bench.store.now_ms = 0
    _, keeper, looker = await round_of(bench, pipelines(bench, EACH))
    fallen = Strays([], names=NAMES)
    outcomes = [
        await fallen.handle(
            Job(
                bench.delivery(body=each.body, headers=each.headers, exchange="lane.due"),
                lane=None,
                source=Source.DELAY,
                taken_ms=NOW_MS,
            )
        )
        for each in (keeper, looker)
    ]
    assert [type(each) for each in outcomes] == [Refused, DeadLettered]
    assert isinstance(outcomes[0], Refused)
    assert outcomes[0].is_silent


async def test_a_store_that_loses_items_again_and_again_ends_the_fan_out() -> None:
    bench = Bench()
    job, found = given(bench, b"[1,2]")
    outcome = await pipelines(bench, EACH).enter(job, found)
    for _ in range(2):
        outcome = await again(pipelines(Bench(), EACH), job, found, outcome)
    outcome = await again(pipelines(Bench(), EACH), job, found, outcome)

    assert isinstance(outcome, DeadLettered)
    assert "the store loses" in outcome.problem.detail


ELSEWHERE = StepSpec(name="s", prompt="hi", lane="batch")


def begun(bench: Bench, *, user: str | None) -> tuple[Job, Decoded]:
    job = read(bench.job(body=BODY, user_id=user))
    found = decoded(job)
    job.decoded = replace(found, request=replace(found.request, pipeline="p", body=b"[1]"))
    return job, job.decoded


@pytest.mark.parametrize(
    ("user", "granted", "needs", "runs"),
    [
        ("crm", (), True, False),
        ("crm", ("erp",), True, False),
        ("crm", ("erp", "crm"), True, True),
        ("crm", ("*",), True, True),
        ("crm", (), False, True),
        ("gateway", (), True, True),
    ],
)
async def test_a_step_in_another_lane_needs_a_right(user: str, granted: Any, needs: bool, runs: bool) -> None:
    bench = Bench()
    steps = pipelines(bench, StepSpec(name="r", prompt="hi"), ELSEWHERE)
    steps.specs = [replace(spec, tenants=granted) for spec in steps.specs]
    steps.needs_rights, steps.trusted = needs, {"gateway"}

    outcome = await steps.arrive(*begun(bench, user=user))

    if runs:
        assert outcome is None
    else:
        assert isinstance(outcome, DeadLettered)
        assert "tenant 'crm' may run it only if pipelines.p.tenants lists it" in outcome.problem.detail
    own = pipelines(bench, StepSpec(name="s", prompt="hi"), StepSpec(name="t", handler="h", lane="critical"))
    own.needs_rights = True
    assert await own.arrive(*begun(bench, user=user)) is None, "in the lane of its request it may"


@pytest.mark.parametrize(("words", "runs"), [(245, True), (246, True), (247, False)])
async def test_a_routing_key_that_is_too_long_in_the_lane_of_a_step_is_refused_before_any_is_paid(
    words: int, runs: bool
) -> None:
    bench = Bench()
    steps = pipelines(bench, StepSpec(name="r", prompt="hi"), replace(ELSEWHERE, lane="critical"))
    job, found = begun(bench, user=None)
    job.routing_key = f"batch.{'é' * (words // 2)}{'e' * (words % 2)}"
    outcome = await steps.arrive(job, replace(found, lane=steps.lanes["batch"]))

    assert (outcome is None) == runs
    if not runs:
        assert isinstance(outcome, DeadLettered)
        assert outcome.problem.code == "invalid_request"
        assert "in lane critical" in outcome.problem.detail


@pytest.mark.parametrize("step", [{"model": "large"}, {"model": "large", "lane": "batch"}, {}, {"each": "input"}])
async def test_the_models_of_steps_are_those_of_their_lanes(step: dict[str, str]) -> None:
    bench = Bench()
    steps = pipelines(bench, StepSpec(name="h", handler="h"), StepSpec(name="s", prompt="hi", **step))  # type: ignore[arg-type]
    assert await steps.arrive(*begun(bench, user=None)) is None

    steps.lanes = {name: replace(lane, models=frozenset({"small"})) for name, lane in steps.lanes.items()}
    job, found = begun(bench, user=None)
    outcome = await steps.arrive(job, replace(found, lane=steps.lanes["critical"]))

    assert isinstance(outcome, DeadLettered)
    assert outcome.problem.code == "forbidden_model"


async def test_pipelines_that_wait_for_items_are_bounded_by_tenant() -> None:
    bench = Bench()
    bench.store = MemoryStore(spec=StoreSpec(waiting_per_tenant=3))
    bench.claiming = Claiming(bench.store)
    bench.store.now_ms = 0
    steps = pipelines(bench, EACH)
    outcomes = []
    for k in range(5):
        job, found = begun(bench, user=None)
        job.identity = Identity("", f"p-{k}")
        outcomes.append(await steps.arrive(job, found))

    assert outcomes[:3] == [None] * 3
    for refused in outcomes[3:]:
        assert isinstance(refused, Refused)
        assert refused.problem.code == "too_many_waiting"
    without = pipelines(bench, StepSpec(name="s", prompt="hi"))
    assert await without.arrive(*begun(bench, user=None)) is None, "it waits for no items"


async def test_a_fan_out_that_waits_long_is_counted_with_its_bytes() -> None:
    bench = Bench()
    bench.store = MemoryStore(spec=StoreSpec(waiting_per_tenant=10))
    bench.claiming = Claiming(bench.store)
    bench.store.now_ms = 0
    steps = pipelines(bench, EACH)
    job, found = given(bench, b"[1" + b" " * 9 * UNIT_BYTES + b"]")
    published = await steps.enter(job, found)
    assert isinstance(published, PipelineAdvanced)
    outcome = replace(published, flow=replace(published.flow, since_ms=NOW_MS - 60_000))

    waits = await again(steps, job, found, outcome)

    assert isinstance(waits, PipelineAdvanced)
    other, asked = begun(bench, user=None)
    other.identity = Identity("", "p-2")
    assert isinstance(await steps.arrive(other, asked), Refused)
