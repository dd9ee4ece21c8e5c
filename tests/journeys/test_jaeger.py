"""The spans of a request as a real Jaeger returns them: one tree, every wait a span, all time accounted for."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, use_span

from lanekeeper import Client
from lanekeeper.replies import Final
from lanekeeper.telemetry.tracing import Tracing
from service.simulated.app import SimulatedAPI
from tests.support.brokers import Vhost
from tests.support.forks import HOUSE
from tests.support.jaeger import Jaeger, running
from tests.support.otlp import ReceivedSpan, one
from tests.support.parts import PASSED, ms, outline, unaccounted_ms
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from tests.support.waterfall import drawn, names

MS = 1_000_000
BUSY_MS = 300
CHAT = "chat claude-sonnet-5-5"
ADDS_UP_MS = 50
"""Between one part and the next the machine may run something else."""
PICTURE = HOUSE / "docs/pictures/trace.svg"
"""The picture in docs/tracing.md: Jaeger's data of the first test in this file."""


@pytest.fixture(scope="module")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    with running(tmp_path_factory.mktemp("jaeger")) as started:
        yield started


@dataclass
class Scene:
    """A worker process with one slot in its critical lane, and this process; both export to Jaeger."""

    jaeger: Jaeger
    here: TracerProvider
    amqp_url: str

    def ask(self) -> Span:
        """The requester's own span, which begins at a whole millisecond."""
        return self.here.get_tracer("shop").start_span("ask", start_time=time.time_ns() // MS * MS)

    async def trace(self, root: Span, *names: str) -> list[ReceivedSpan]:
        """Jaeger's spans of a trace, once all of them are there."""
        await asyncio.to_thread(self.here.force_flush)
        return await self.told(f"{root.get_span_context().trace_id:032x}", "ask", *names)

    async def told(self, trace_id: str, *names: str) -> list[ReceivedSpan]:
        """Jaeger's spans of a trace, once there is one of each of `names`."""
        return await self.jaeger.trace(trace_id, names=names)


@pytest.fixture
async def scene(vhost: Vhost, tmp_path: Path, jaeger: Jaeger) -> AsyncIterator[Scene]:
    async with SimulatedAPI() as api:
        environ = environment(
            vhost.amqp_url,
            vhost.management_url,
            ANTHROPIC_BASE_URL=api.base_url,
            OTEL_EXPORTER_OTLP_ENDPOINT=jaeger.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="50",
            LANEKEEPER_LANES__CRITICAL__SLOTS="1",
            LANEKEEPER_RETRY__BASE_S="0.3",
            LANEKEEPER_RETRY__CAP_S="0.4",
        )
        here = TracerProvider(resource=Resource({"service.name": "shop"}), shutdown_on_exit=False)
        here.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{jaeger.endpoint}/v1/traces")))
        try:
            async with lanekeeper("serve", "--port", "0", environ=environ, folder=tmp_path) as worker:
                await worker.ready()
                yield Scene(jaeger, here, vhost.amqp_url)
        finally:
            await asyncio.to_thread(here.shutdown)


async def test_a_request_that_is_retried_twice_is_one_tree_whose_spans_cover_all_its_time(
    scene: Scene, tmp_path: Path
) -> None:
    async with requester(scene.amqp_url) as app:
        await app.publish({"prompt": f"keeps the slot [[latency: {BUSY_MS}ms]]"})
        root = scene.ask()
        reply = await app.ask({"prompt": "retried [[fault: overloaded x2]]"}, headers=said_by(root))
        root.end()
    assert reply.headers["x-lane-attempt"] == 3

    spans = await scene.trace(root, "process lane.critical", *["process lane.critical.due"] * 2)
    assert (
        outline(spans)
        == """
        ask
          process lane.critical
            chat claude-sonnet-5-5
            send lane.delay
              process lane.critical.due
                chat claude-sonnet-5-5
                send lane.delay
                  process lane.critical.due
                    chat claude-sonnet-5-5
                    send (reply)
                    ack lane.critical.due
                ack lane.critical.due
            ack lane.critical
    """
    )
    assert ms(one(spans, "wait lane.critical")) > BUSY_MS / 2, "it waited for the slot"
    assert [span.name for span in spans if span.status == "ERROR"] == [
        "process lane.critical", CHAT, "process lane.critical.due", CHAT
    ]  # fmt: skip
    for span in spans:
        if span.attributes.get("lane.outcome") == "retried":
            delay = next(each for each in spans if each.name.startswith("delay") and each.start_ns > span.start_ns)
            assert span.attributes["lane.delay_ms"] <= ms(delay) <= span.attributes["lane.delay_ms"] + 100
    assert abs(unaccounted_ms(spans)) < ADDS_UP_MS

    picture = tmp_path / PICTURE.name
    picture.write_text(drawn(spans))
    told = [kinds_of(names(each.read_text())) for each in (PICTURE, picture)]
    assert told[0] == told[1], f"the picture of docs/tracing.md shows another trace than {picture}"


async def test_a_dead_letter_that_is_published_again_continues_its_trace(scene: Scene) -> None:
    async with requester(scene.amqp_url) as app:
        await app.read_dead()
        root = scene.ask()
        refused = await app.ask({"prompt": "mended [[fault: invalid x1]]"}, message_id="dead-1", headers=said_by(root))
        dead = await app.buried("dead-1")
        reply = await app.ask(dead.body, message_id="dead-1", headers=dead.headers)
        root.end()
    assert (refused.status, reply.status) == ("error", "ok")

    spans = await scene.trace(root, *["process lane.critical"] * 2)
    assert (
        outline(spans)
        == """
        ask
          process lane.critical
            chat claude-sonnet-5-5
            send lane.dead
              process lane.critical
                chat claude-sonnet-5-5
                send (reply)
                ack lane.critical
            send (reply)
            ack lane.critical
    """
    )
    assert one(spans, "wait (dead letter)").parent_id == one(spans, "send lane.dead").span_id
    assert abs(unaccounted_ms(spans)) < ADDS_UP_MS


async def test_a_stream_that_breaks_and_starts_again_is_one_tree_whose_spans_cover_all_its_time(scene: Scene) -> None:
    kinds = []
    async with Client(scene.amqp_url, tracing=Tracing(scene.here)) as client:
        root = scene.ask()
        with use_span(root, end_on_exit=True):
            stream = client.stream({"prompt": "streamed [[fault: cut x1]]"}, key="critical.shop.chat", timeout_s=60)
            async for reply in stream:
                kinds.append("final" if isinstance(reply, Final) else reply.kind)
    assert "restart" in kinds
    assert kinds[-1] == "final"

    spans = await scene.trace(root, "process lane.critical", "process lane.critical.due")
    assert (
        outline(spans)
        == """
        ask
          send lane.requests
            process lane.critical
              chat claude-sonnet-5-5
              send lane.delay
                process lane.critical.due
                  chat claude-sonnet-5-5
                  send (reply)
                  ack lane.critical.due
              ack lane.critical
    """
    )
    assert abs(unaccounted_ms(spans)) < ADDS_UP_MS


async def test_a_request_of_lanekeeper_send_has_its_root_span_in_jaeger_and_prints_its_trace_id(
    scene: Scene, tmp_path: Path
) -> None:
    exporting = environment(
        scene.amqp_url,
        OTEL_EXPORTER_OTLP_ENDPOINT=scene.jaeger.endpoint,
        LANEKEEPER_JAEGER_URL="https://jaeger.example/",
    )
    spans = await scene.told(await sent("sent", environ=exporting, folder=tmp_path), "process lane.critical", "ask")
    assert (
        outline(spans)
        == """
        ask
          send lane.requests
            process lane.critical
              chat claude-sonnet-5-5
              send (reply)
              ack lane.critical
    """
    )
    assert {span.service for span in spans} == {"lanekeeper send", "lanekeeper"}

    refused = await sent("refused [[fault: invalid]]", environ=exporting, folder=tmp_path)
    ask = one(await scene.told(refused, "process lane.critical", "ask"), "ask")
    assert (ask.status, ask.attributes["error.type"]) == ("ERROR", "provider_rejected")

    quiet = await sent("without a span of its own", environ=environment(scene.amqp_url), folder=tmp_path)
    spans = await scene.told(quiet, "process lane.critical")
    assert one(spans, "process lane.critical").parent_id == ""


async def sent(prompt: str, *, environ: dict[str, str], folder: Path) -> str:
    """The trace id that `lanekeeper send` printed."""
    async with lanekeeper("send", prompt, environ=environ, folder=folder) as command:
        await command.ended()
        (line,) = [found["event"] for found in command.events if "trace " in found["event"]]
        id, *link = str(line).partition("trace ")[2].split(" ")
        page = environ.get("LANEKEEPER_JAEGER_URL")
        assert link == ([] if page is None else [f"{page}trace/{id}"])
        return id


def said_by(root: Span) -> dict[str, object]:
    """The headers of a request whose publisher has this span."""
    context = root.get_span_context()
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    return {"traceparent": traceparent, "x-lane-sent-ms": time.time_ns() // MS}


def kinds_of(shown: Sequence[str]) -> list[str]:
    """The spans in a picture, without waits and whatever the delays were."""
    return [name.partition(".delay.")[0] for name in shown if not name.startswith(PASSED)]
