"""What a pipeline makes of a delivery: the request of its step, and its step's output."""

from dataclasses import replace

import pytest

from consumers.decoding import Parsing
from consumers.flows.pipelines import AT_ONCE, Pipelines, PipelineSpec, StepSpec, output_of
from consumers.job import Chain, Decoded, Job, Route
from consumers.outcomes import Stepped
from tests.support.jobs import NAMES, NOW_MS, Bench, decoded, read
from topology.lanes import DEFAULT_LANES

ROUTES = Chain((Route(provider="one", model="m", name="m", account="one/m"),))


def pipelines(bench: Bench, *steps: StepSpec) -> Pipelines:
    return Pipelines(
        specs=[PipelineSpec("p", steps)],
        lanes={lane.name: lane for lane in DEFAULT_LANES},
        claiming=bench.claiming,
        publisher=bench.publisher,
        names=NAMES,
        parsing=Parsing(),
        chain_of=lambda lane, tenant, model: ROUTES,
        seen=lambda lane, number: None,
        reach_soon=lambda name: None,
        now_ms=lambda: NOW_MS,
    )


def given(bench: Bench, body: bytes) -> tuple[Job, Decoded]:
    job = read(bench.job())
    found = decoded(job)
    job.decoded = replace(found, request=replace(found.request, pipeline="p", body=body))
    return job, job.decoded


@pytest.mark.parametrize(
    ("step", "chain"), [(StepSpec(name="s", handler="h"), Chain()), (StepSpec(name="s", prompt="hi"), ROUTES)]
)
async def test_a_step_with_a_handler_needs_no_provider(step: StepSpec, chain: Chain) -> None:
    bench = Bench()
    job, found = given(bench, b"{}")

    assert await pipelines(bench, step).enter(job, found) is None
    assert decoded(job).request.handler == step.handler
    assert decoded(job).chain == chain


async def test_one_delivery_publishes_many_items() -> None:
    bench = Bench()
    job, found = given(bench, b"[" + b",".join([b"1"] * (3 * AT_ONCE)) + b"]")

    outcome = await pipelines(bench, StepSpec(name="s", handler="h", each="input")).enter(job, found)

    assert isinstance(outcome, Stepped)
    assert outcome.flow.items == len(bench.publisher.sent) == 3 * AT_ONCE


def test_the_output_of_a_model_is_its_text_and_that_of_a_handler_is_what_it_returned() -> None:
    body = b'{"content":[{"type":"text","text":"a \\u00fc"},{"type":"text","text":"b"}]}'

    assert output_of(body, None) == output_of(body, StepSpec(name="s", prompt="x")) == '"a üb"'.encode()
    assert output_of(body, None, is_handler=True) == output_of(body, StepSpec(name="s", handler="h")) == body
