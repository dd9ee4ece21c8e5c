"""The whole way of a request as a real Jaeger tells it: one trace, no orphan, every wait a span, no time unaccounted."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span

from service.client import Client
from service.replies import Final
from service.simulated.app import SimulatedAPI
from tests.support.jaeger import Jaeger, running
from tests.support.otlp import ReceivedSpan, tree
from tests.support.processes import environment, lanekeeper
from tests.support.requester import Requester, requester
from topology.tracing import Tracing

MS = 1_000_000
BUSY_MS = 300
CHAT = "chat claude-sonnet-5-5"


@pytest.fixture(scope="module")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    with running(tmp_path_factory.mktemp("jaeger")) as started:
        yield started


@dataclass
class Scene:
    """A worker process with one slot in its critical lane, and this process: both export to Jaeger."""

    jaeger: Jaeger
    here: TracerProvider
    amqp_url: str

    def ask(self) -> Span:
        """The requester's own span, begun at a whole millisecond."""
        return self.here.get_tracer("shop").start_span("ask", start_time=time.time_ns() // MS * MS)

    async def trace(self, root: Span, *names: str) -> list[ReceivedSpan]:
        """What Jaeger has of a trace, once all of it is there."""
        await asyncio.to_thread(self.here.force_flush)
        return await self.jaeger.trace(f"{root.get_span_context().trace_id:032x}", names=("ask", *names))


@pytest.fixture
async def scene(vhost, tmp_path, jaeger) -> AsyncIterator[Scene]:
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


async def test_a_request_that_is_retried_twice_is_one_tree_whose_parts_add_up(scene) -> None:
    async with requester(scene.amqp_url) as app:
        await app.publish({"prompt": f"keeps the slot [[latency: {BUSY_MS}ms]]"})
        root = scene.ask()
        reply = await app.ask({"prompt": "retried [[fault: overloaded x2]]"}, headers=headers(root))
        root.end()
    assert reply.headers["x-lane-attempt"] == 3

    due = ["delay lane.critical.due", "process lane.critical.due", "ack lane.critical.due"]
    spans = await scene.trace(
        root, "wait lane.critical", "process lane.critical", "ack lane.critical", *due * 2, *[CHAT] * 3, "send (reply)"
    )
    attempt = ("ack", CHAT, "send lane.delay", [*due[:1], "process lane.critical.due"])
    assert shape(spans) == {
        "ask": ["process lane.critical", "wait lane.critical"],
    }
    story(spans)


def headers(root: Span) -> dict[str, object]:
    context = root.get_span_context()
    return {
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-01",
        "x-lane-sent-ms": time.time_ns() // MS,
    }


def shape(spans: Sequence[ReceivedSpan]) -> object:
    print(tree(spans))
    for s in spans:
        print(f"{(s.start_ns-spans[0].start_ns)/MS:8.2f} {(s.end_ns-spans[0].start_ns)/MS:8.2f} {s.name}")
    return {}


def story(spans: Sequence[ReceivedSpan]) -> None: ...
