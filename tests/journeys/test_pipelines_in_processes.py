"""Pipelines in processes of their own: killed between any two steps, and traced."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from consumers.claiming import DEATHS_AT_MOST
from consumers.settle import FAILPOINT_EXIT_CODE
from tests.support.brokers import Vhost
from tests.support.otlp import OtlpReceiver, ReceivedSpan
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.serving import HeldCalls

PIPELINES = """
[handlers.words]
run = "tests.support.functions:words"
kind = "async"

[[pipelines.chain.steps]]
name = "one"
prompt = "one {{ input }}"

[[pipelines.chain.steps]]
name = "two"
prompt = "two {{ input }} {{ one|length }}"
lane = "batch"

[[pipelines.chain.steps]]
name = "three"
prompt = "three {{ input }} {{ two|length }}"

[[pipelines.ingest.steps]]
name = "chunk"
handler = "words"

[[pipelines.ingest.steps]]
name = "summaries"
each = "chunk"
prompt = "about {{ item }}"
lane = "batch"

[[pipelines.ingest.steps]]
name = "combine"
prompt = "all {{ summaries|join(' ') }}"
"""


@asynccontextmanager
async def reborn(environ: dict[str, str], folder: Path) -> AsyncIterator[Counter[str]]:
    """A worker that is started again each time a failpoint has ended it. Yields how often that was.

    After three deaths it stays alive: with four a request may be parked as poison.
    """
    lives: Counter[str] = Counter()
    ready = asyncio.Event()

    async def live() -> None:
        while True:
            dies = lives["killed"] < DEATHS_AT_MOST - 1
            survives = {name: value for name, value in environ.items() if name != "LANEKEEPER_FAILPOINTS"}
            async with lanekeeper("serve", environ=environ if dies else survives, folder=folder) as worker:
                if not ready.is_set():
                    await worker.ready()
                    ready.set()
                code = await worker.ended(within_s=120)
                assert code == FAILPOINT_EXIT_CODE, worker.events
                lives["killed"] += 1

    living = asyncio.create_task(live())
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({living, waiting}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield lives
    finally:
        living.cancel()
        await asyncio.wait({living})
        if not living.cancelled():
            living.result()


@pytest.mark.parametrize(
    ("place", "overlaps"),
    [("after_store", False), ("after_publish", False), ("after_confirm", True), ("after_ack", True)],
)
async def test_no_stored_step_is_paid_twice(vhost: Vhost, tmp_path: Path, place: str, overlaps: bool) -> None:
    """`overlaps`: on a busy machine the next step's call may have begun when the worker dies, which cuts it off."""
    (tmp_path / "lanekeeper.toml").write_text(PIPELINES)
    async with HeldCalls() as api:
        environ = environment(vhost, api, LANEKEEPER_FAILPOINTS=f"{place}:0.1")
        async with reborn(environ, tmp_path) as lives, requester(vhost.amqp_url) as app:
            n = 0
            while n < 3 or not lives["killed"]:  # one pipeline at a time: no other call is cut off by a death
                asked = await app.publish(f"p{n}", headers={"x-lane-pipeline": "chain"}, message_id=f"chain-{n}")
                final = await app.final(asked, within_s=80)
                assert final.text.startswith("echo: three"), final
                n += 1
        prompts = Counter(" ".join(call.prompt.split()[:2]) for call in api.calls)
        assert prompts.keys() == {f"{step} p{k}" for step in ("one", "two", "three") for k in range(n)}
        assert prompts.total() - len(prompts) <= (lives["killed"] if overlaps else 0)


async def test_a_fan_out_survives_deaths_in_all_places(vhost: Vhost, tmp_path: Path) -> None:
    (tmp_path / "lanekeeper.toml").write_text(PIPELINES)
    places = ("after_claim", "after_call", "after_store", "after_publish", "after_confirm", "after_ack")
    async with HeldCalls() as api:
        failpoints = ",".join(f"{place}:0.02" for place in places)
        environ = environment(vhost, api, LANEKEEPER_FAILPOINTS=failpoints, LANEKEEPER_LANES__BATCH__SLOTS="4")
        async with reborn(environ, tmp_path) as lives, requester(vhost.amqp_url) as app:
            n = 0
            while not lives["killed"]:  # by chance, nothing dies in one in forty documents
                words = [f"w{n}-{k}" for k in range(30)]
                asked = await app.publish(" ".join(words), headers={"x-lane-pipeline": "ingest"}, message_id=f"doc-{n}")
                final = await app.final(asked, within_s=85)
                assert final.text == "echo: all " + " ".join(f"echo: about {word}" for word in words)
                n += 1
        counted = Counter(call.prompt for call in api.calls)
        assert len(counted) == 31 * n
        repeated = counted.total() - len(counted)
        # a death cuts off at most what ran: four items and the pipeline's own step
        assert repeated <= 5 * lives["killed"]


async def test_a_pipeline_and_its_items_are_one_trace_that_names_the_steps(vhost: Vhost, tmp_path: Path) -> None:
    (tmp_path / "lanekeeper.toml").write_text(PIPELINES)
    trace_id = "5b0c" * 8
    async with OtlpReceiver() as otlp, HeldCalls() as api:
        exported = {"OTEL_EXPORTER_OTLP_ENDPOINT": otlp.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        environ = environment(vhost, api, **exported)
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker, requester(vhost.amqp_url) as app:
            await worker.ready()
            headers = {"x-lane-pipeline": "ingest", "traceparent": f"00-{trace_id}-00000000000000aa-01"}
            asked = await app.publish("one two three", headers=headers)
            assert (await app.final(asked)).status == "ok"

            def steps(spans: list[ReceivedSpan]) -> Counter[str]:
                ours = (span for span in spans if span.trace_id == trace_id and span.name.startswith("process"))
                return Counter(span.attributes.get("lane.step", "") for span in ours)

            spans = await otlp.wait_for(lambda spans: steps(spans).keys() >= {"chunk", "summaries", "combine"})
            assert steps(spans)["summaries"] >= 4, "three items, and the fan-out itself"
            calls = [span for span in spans if span.trace_id == trace_id and span.name.startswith("chat")]
            assert len(calls) == 4
