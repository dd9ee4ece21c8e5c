"""One trace over two processes, the publisher and `lanekeeper serve`, read from the bytes that they exported: one tree,
every wait a span, all time accounted for."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, use_span

from lanekeeper import Client
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.replies import Final
from lanekeeper.telemetry.tracing import Tracing
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.otlp import OtlpReceiver, ReceivedSpan, one, tree
from tests.support.processes import environment, lanekeeper
from tests.support.requester import requester
from topology.delays import hop

SECRET = "marzipan"
"""Text in every prompt here that must not be exported."""
MS = 1_000_000
BUSY_MS = 300
CHAT = "chat claude-sonnet-5-5"
ADDS_UP_MS = 200
"""Between one part and the next a busy machine may run something else; each wait and delay is longer."""
STATE, BAGGAGE = "vendor=opaque", "customer=42"


@dataclass
class Scene:
    """A worker process that exports its spans, and this process, which exports its own."""

    otlp: OtlpReceiver
    api: FaultyAPI
    here: TracerProvider
    amqp_url: str

    def ask(self) -> Span:
        """The requester's own span, which begins at a whole millisecond."""
        return self.here.get_tracer("shop").start_span("ask", start_time=time.time_ns() // MS * MS)

    async def tree(self, trace_id: str, wanted: str) -> list[ReceivedSpan]:
        """The spans of a trace by start, once they are this tree. Waits and delays stand beside the attempt that ended
        them, and are not in the tree: their number depends on how busy the machine is."""

        def of_it(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
            return sorted((span for span in spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

        await asyncio.to_thread(self.here.force_flush)
        found = of_it(await self.otlp.wait_for(lambda spans: outline(of_it(spans)) == wanted))
        known, attempted = (
            {span.span_id for span in found},
            {span.parent_id for span in found if span.kind == "CONSUMER"},
        )
        assert {span.parent_id for span in found if span.parent_id} <= known, tree(found)
        assert {span.parent_id for span in found if is_wait(span) and "turn" not in span.name} <= attempted, tree(found)
        return found

    async def spans(self, trace_id: str, *names: str) -> list[ReceivedSpan]:
        await asyncio.to_thread(self.here.force_flush)
        return await self.otlp.trace(trace_id, names=names)


@pytest.fixture
async def scene(vhost: Vhost, tmp_path: Path) -> AsyncIterator[Scene]:
    async with OtlpReceiver() as otlp, FaultyAPI() as api:
        environ = environment(
            vhost,
            api,
            OTEL_EXPORTER_OTLP_ENDPOINT=otlp.endpoint,
            OTEL_SERVICE_NAME="the-worker",
            OTEL_BSP_SCHEDULE_DELAY="50",
            LANEKEEPER_LANES__CRITICAL__SLOTS="1",
            LANEKEEPER_RETRY__BASE_S="0.3",
            LANEKEEPER_RETRY__CAP_S="1",
        )
        here = TracerProvider(resource=Resource({"service.name": "the-application"}), shutdown_on_exit=False)
        here.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{otlp.endpoint}/v1/traces")))
        try:
            async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
                await worker.ready()
                yield Scene(otlp, api, here, vhost.amqp_url)
            assert otlp.requests
            for _, body in otlp.requests:
                assert SECRET.encode() not in body, "what is asked and answered is in no exported byte"
                assert b"sk-ant-simulated" not in body
        finally:
            await asyncio.to_thread(here.shutdown)


async def test_publishing_two_failed_attempts_their_delays_and_the_answer_are_one_trace(scene: Scene) -> None:
    async with Client(scene.amqp_url, tracing=Tracing(scene.here)) as client:
        with scene.here.get_tracer("the application").start_as_current_span("sell") as sell:
            final = await client.request(
                {"prompt": f"{SECRET} [[fault: overloaded x2]]"},
                key="critical.shop.chat",
                message_id="traced-1",
                timeout_s=60,
                headers={"baggage": BAGGAGE},
            )
    assert final.attempt == 3
    trace_id = f"{sell.get_span_context().trace_id:032x}"
    spans = await scene.spans(
        trace_id,
        "sell",
        "send lane.requests",
        "process lane.critical",
        "ack lane.critical",
        *["process lane.critical.due", "ack lane.critical.due"] * 2,
        *["chat claude-sonnet-5-5"] * 3,
        "send (reply)",
    )

    # the tree of spans, from first to last
    app = one(spans, "sell")
    published = one(spans, "send lane.requests")
    assert (app.parent_id, published.parent_id) == ("", app.span_id)
    first = one(spans, "process lane.critical")
    second, third = (span for span in spans if span.name == "process lane.critical.due")
    attempts = [first, second, third]
    delays = [child(spans, of=span, name="send lane.delay.") for span in (first, second)]
    for publisher, process in zip([published, *delays], attempts, strict=True):
        assert process.parent_id == publisher.span_id
        assert process.links == ((trace_id, publisher.span_id),)
        # the publisher's span ends with the confirm, possibly after the delivery
        assert publisher.start_ns <= process.start_ns
    chats = [child(spans, of=span, name="chat ") for span in attempts]
    acks = [child(spans, of=span, name="ack ") for span in attempts]
    reply = child(spans, of=third, name="send (reply)")
    passed = [span for span in spans if span.kind == "INTERNAL" and span is not app]
    assert len(spans) - len(passed) == 1 + 1 + 3 * 3 + 2 + 1, tree(spans)
    assert not [span for span in spans if span.links and span not in attempts]

    # the process of each span
    assert {span.service for span in (app, published)} == {"the-application"}
    assert {span.service for span in spans if span not in (app, published)} == {"the-worker"}
    assert {span.kind for span in attempts} == {"CONSUMER"}
    assert {span.kind for span in (published, *delays, reply)} == {"PRODUCER"}
    assert {span.kind for span in (*chats, *acks)} == {"CLIENT"}

    # attributes
    for number, (process, chat, ack) in enumerate(zip(attempts, chats, acks, strict=True), start=1):
        queue = "lane.critical" if number == 1 else "lane.critical.due"
        assert has(
            process,
            {
                "messaging.system": "rabbitmq",
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.rabbitmq.destination.routing_key": "critical.shop.chat",
                "messaging.message.id": "traced-1",
                "lane.name": "critical",
                "lane.app": "shop",
                "lane.attempt": number,
                "lane.outcome": "answered" if number == 3 else "retried",
            },
        )
        assert process.attributes["messaging.destination.name"].endswith(f":critical.shop.chat:{queue}")
        assert has(
            ack,
            {
                "messaging.system": "rabbitmq",
                "messaging.operation.name": "ack",
                "messaging.operation.type": "settle",
                "messaging.message.id": "traced-1",
                "messaging.rabbitmq.message.delivery_tag": process.attributes[
                    "messaging.rabbitmq.message.delivery_tag"
                ],
            },
        )
        assert has(
            chat,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "anthropic",
                "gen_ai.request.model": "claude-sonnet-5-5",
                "gen_ai.request.max_tokens": 1024,
            },
        )
    for chat, process in zip(chats[:2], attempts[:2], strict=True):
        assert (chat.status, chat.attributes["error.type"]) == ("ERROR", "overloaded_error")
        assert (process.status, process.attributes["error.type"]) == ("ERROR", "attempt_failed")
        assert not chat.status_message, "an error's text may hold content"
        assert not chat.events
    assert chats[2].status == third.status == "UNSET"
    assert chats[2].attributes["gen_ai.response.model"] == "claude-sonnet-5-5"
    assert list(chats[2].attributes["gen_ai.response.finish_reasons"]) == ["end_turn"]
    assert chats[2].attributes["gen_ai.usage.input_tokens"] > 0
    assert chats[2].attributes["gen_ai.usage.output_tokens"] > 0
    for process, delay, after in zip(attempts[:2], delays, attempts[1:], strict=True):
        delay_ms = process.attributes["lane.delay_ms"]
        assert delay.name == f"send {hop(delay_ms, Names()).exchange}"
        waited = child(passed, of=delay, name="delay lane.critical.due")
        assert delay_ms <= (waited.end_ns - waited.start_ns) / 1_000_000 <= delay_ms + 100
        assert waited.start_ns <= delay.end_ns
        assert waited.end_ns <= after.start_ns
    assert reply.attributes["messaging.destination.template"] == "(reply)"

    # bytes that were exported
    seen = [call.headers for call in scene.api.calls]
    assert [named(headers) for headers in seen] == [(trace_id, chat.span_id) for chat in chats]
    assert not [headers for headers in seen if "tracestate" in headers or "baggage" in headers]
    assert named(final.headers) == (trace_id, reply.span_id)
    assert final.headers["baggage"] == BAGGAGE


async def test_the_dead_letter_of_a_request_is_in_its_trace_and_names_the_publisher_span(scene: Scene) -> None:
    publisher = f"00-{'1f' * 16}-{'2a' * 8}-01"
    async with requester(scene.amqp_url) as app:
        await app.read_dead()
        reply = await app.ask(
            {"prompt": f"{SECRET} [[fault: invalid]]"},
            message_id="dead-1",
            headers={"traceparent": publisher, "tracestate": STATE, "baggage": BAGGAGE},
        )
        dead = await app.buried("dead-1")
    spans = await scene.spans("1f" * 16, "ack lane.critical", "process lane.critical", "send lane.dead", "send (reply)")
    process = one(spans, "process lane.critical", error_type="provider_rejected", lane_outcome="buried")
    assert process.parent_id == "2a" * 8
    assert process.links == (("1f" * 16, "2a" * 8),)
    parked = child(spans, of=process, name="send lane.dead")
    replied = child(spans, of=process, name="send (reply)")
    assert named(dead.headers) == ("1f" * 16, parked.span_id)
    assert named(reply.headers) == ("1f" * 16, replied.span_id)
    assert (dead.headers["tracestate"], dead.headers["baggage"]) == (STATE, BAGGAGE), "carried to where it is replayed"
    (call,) = scene.api.calls
    assert "tracestate" not in call.headers
    assert "baggage" not in call.headers


async def test_an_unsampled_trace_is_passed_on_and_makes_no_span(scene: Scene) -> None:
    async with requester(scene.amqp_url) as app:
        unsampled = {"traceparent": f"00-{'3c' * 16}-{'4d' * 8}-00"}
        quiet = await app.ask({"prompt": f"{SECRET} [[fault: server_error x1]]"}, headers=unsampled)
        await app.ask({"prompt": "and another"}, headers={"traceparent": f"00-{'5e' * 16}-{'4d' * 8}-01"})
    await scene.spans("5e" * 16, "ack lane.critical")
    assert quiet.headers["traceparent"].startswith(f"00-{'3c' * 16}-")
    assert quiet.headers["traceparent"].endswith("-00")
    assert not [span for span in scene.otlp.spans if span.trace_id == "3c" * 16]


async def test_a_refused_request_is_visible_in_its_clients_own_trace(scene: Scene) -> None:
    async with Client(scene.amqp_url, tracing=Tracing(scene.here)) as client:
        sell = scene.here.get_tracer("the application").start_as_current_span("sell")
        with pytest.raises(RequestProblem), sell as span:
            await client.request({"prompt": SECRET, "max_tokens": -1}, key="normal.shop.chat", timeout_s=60)
    spans = await scene.spans(f"{span.get_span_context().trace_id:032x}", "process lane.normal", "send lane.dead")
    refused = one(spans, "process lane.normal")
    assert refused.attributes["error.type"] == "invalid_request"
    assert refused.parent_id == one(spans, "send lane.requests").span_id
    assert not [span for span in spans if span.name.startswith("chat")]


async def test_all_time_of_a_request_that_waits_and_is_retried_is_in_its_spans(scene: Scene) -> None:
    async with requester(scene.amqp_url) as app:
        await app.publish({"prompt": f"keeps the slot [[latency: {BUSY_MS}ms]]"})
        root = scene.ask()
        reply = await app.ask({"prompt": "retried [[fault: overloaded x2]]"}, headers=said_by(root))
        root.end()
    assert reply.headers["x-lane-attempt"] == 3

    spans = await scene.tree(
        id_of(root),
        """
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
            ack lane.critical""",
    )
    assert ms(one(spans, "wait lane.critical")) > BUSY_MS / 2, "it waited for the slot"
    failed = [span.name for span in spans if span.status == "ERROR"]
    assert failed == ["process lane.critical", CHAT, "process lane.critical.due", CHAT]
    assert abs(unaccounted_ms(spans)) < ADDS_UP_MS


async def test_a_dead_letter_that_is_published_again_continues_its_trace(scene: Scene) -> None:
    async with requester(scene.amqp_url) as app:
        await app.read_dead()
        root = scene.ask()
        refused = await app.ask({"prompt": "mended [[fault: invalid x1]]"}, message_id="dead-1", headers=said_by(root))
        dead = await app.buried("dead-1")
        reply = await app.ask(dead.body, message_id="dead-1", headers=dead.headers)
        root.end()
    assert (refused.status, reply.status) == ("error", "ok")

    spans = await scene.tree(
        id_of(root),
        """
        ask
          process lane.critical
            chat claude-sonnet-5-5
            send lane.dead
              process lane.critical
                chat claude-sonnet-5-5
                send (reply)
                ack lane.critical
            send (reply)
            ack lane.critical""",
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

    spans = await scene.tree(
        id_of(root),
        """
        ask
          send lane.requests
            process lane.critical
              chat claude-sonnet-5-5
              send lane.delay
                process lane.critical.due
                  chat claude-sonnet-5-5
                  send (reply)
                  ack lane.critical.due
              ack lane.critical""",
    )
    assert abs(unaccounted_ms(spans)) < ADDS_UP_MS


async def test_a_request_of_lanekeeper_send_has_a_root_span_and_prints_its_trace_id(
    scene: Scene, tmp_path: Path
) -> None:
    exporting = environment(
        scene.amqp_url,
        OTEL_EXPORTER_OTLP_ENDPOINT=scene.otlp.endpoint,
        LANEKEEPER_JAEGER_URL="https://jaeger.example/",
    )
    spans = await scene.tree(
        await sent("sent", environ=exporting, folder=tmp_path),
        """
        ask
          send lane.requests
            process lane.critical
              chat claude-sonnet-5-5
              send (reply)
              ack lane.critical""",
    )
    assert {span.service for span in spans} == {"lanekeeper send", "the-worker"}

    refused = await sent("refused [[fault: invalid]]", environ=exporting, folder=tmp_path)
    ask = one(await scene.spans(refused, "process lane.critical", "ask"), "ask")
    assert (ask.status, ask.attributes["error.type"]) == ("ERROR", "provider_rejected")

    quiet = await sent("without a span of its own", environ=environment(scene.amqp_url), folder=tmp_path)
    assert one(await scene.spans(quiet, "process lane.critical"), "process lane.critical").parent_id == ""


async def sent(prompt: str, *, environ: dict[str, str], folder: Path) -> str:
    """The trace id that `lanekeeper send` printed."""
    async with lanekeeper("send", prompt, environ=environ, folder=folder) as command:
        await command.ended()
        (line,) = [found["event"] for found in command.events if "trace " in found["event"]]
        id, *link = str(line).partition("trace ")[2].split(" ")
        page = environ.get("LANEKEEPER_JAEGER_URL")
        assert link == ([] if page is None else [f"{page}trace/{id}"])
        return id


def id_of(root: Span) -> str:
    return f"{root.get_span_context().trace_id:032x}"


def said_by(root: Span) -> dict[str, object]:
    """The headers of a request whose publisher has this span."""
    traceparent = f"00-{id_of(root)}-{root.get_span_context().span_id:016x}-01"
    return {"traceparent": traceparent, "x-lane-sent-ms": time.time_ns() // MS}


def is_wait(span: ReceivedSpan) -> bool:
    return span.name.startswith(("wait ", "delay "))


def outline(spans: Sequence[ReceivedSpan]) -> str:
    """The tree as text, each span under its parent, without waits and delays."""

    def below(parent_id: str, indent: str) -> Iterator[str]:
        for span in spans:
            if span.parent_id == parent_id:
                if not is_wait(span):
                    yield f"\n{indent}{span.name.partition('.delay.')[0]}{'.delay' * ('.delay.' in span.name)}"
                yield from below(span.span_id, indent + "  ")

    return "".join(below("", " " * 8))


def unaccounted_ms(spans: Sequence[ReceivedSpan]) -> float:
    """The time from the start of `ask` to the end of the last attempt, minus all waits, delays and attempts. An attempt
    counts only until the next part begins."""
    parts = [span for span in spans if span.name.startswith(("wait lane", "wait (dead", "delay ", "process "))]
    begun = [*(span.start_ns for span in parts[1:]), parts[-1].end_ns]
    sum_ns = 0
    for span, after_ns in zip(parts, begun, strict=True):
        assert span.start_ns <= after_ns
        sum_ns += (after_ns if span.kind == "CONSUMER" and after_ns < span.end_ns else span.end_ns) - span.start_ns
    return (parts[-1].end_ns - one(spans, "ask").start_ns - sum_ns) / MS


def ms(span: ReceivedSpan) -> float:
    return (span.end_ns - span.start_ns) / MS


def child(spans: list[ReceivedSpan], *, of: ReceivedSpan, name: str) -> ReceivedSpan:
    (found,) = [span for span in spans if span.parent_id == of.span_id and span.name.startswith(name)]
    assert found.trace_id == of.trace_id
    return found


def has(span: ReceivedSpan, wanted: dict[str, object]) -> bool:
    assert {key: span.attributes.get(key) for key in wanted} == wanted
    return True


def named(headers: Mapping[str, str]) -> tuple[str, str]:
    """Trace id and span id of a sampled `traceparent`."""
    version, trace_id, span_id, flags = headers["traceparent"].split("-")
    assert (version, int(flags, 16) & 1) == ("00", 1)
    return trace_id, span_id
