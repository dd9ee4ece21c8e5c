"""The spans of a request as a real Jaeger returns them: one tree, over two failed attempts to the answer."""

import asyncio
import time
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from lanekeeper import Client
from lanekeeper.telemetry.tracing import Tracing
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.jaeger import running
from tests.support.processes import environment, lanekeeper

CHAT = "chat claude-sonnet-5-5"
DUE = "process lane.critical.due"


async def test_a_request_that_is_retried_twice_is_one_tree_in_jaeger(vhost: Vhost, tmp_path: Path) -> None:
    with running(tmp_path) as jaeger:
        async with FaultyAPI() as api:
            environ = environment(
                vhost,
                api,
                OTEL_EXPORTER_OTLP_ENDPOINT=jaeger.endpoint,
                OTEL_BSP_SCHEDULE_DELAY="50",
                LANEKEEPER_RETRY__BASE_S="0.3",
                LANEKEEPER_RETRY__CAP_S="0.4",
            )
            here = TracerProvider(resource=Resource({"service.name": "shop"}), shutdown_on_exit=False)
            here.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{jaeger.endpoint}/v1/traces")))
            async with lanekeeper("serve", "--port", "0", environ=environ, folder=tmp_path) as worker:
                await worker.ready()
                async with Client(vhost.amqp_url, tracing=Tracing(here)) as client:
                    with here.get_tracer("shop").start_as_current_span("ask", start_time=time.time_ns()) as root:
                        body = {"prompt": "retried [[fault: overloaded x2]]"}
                        final = await client.request(body, key="critical.shop.chat", timeout_s=60)
                await asyncio.to_thread(here.shutdown)
                assert final.attempt == 3
                trace_id = f"{root.get_span_context().trace_id:032x}"
                spans = await jaeger.trace(trace_id, names=["ask", "process lane.critical", DUE, DUE, "send (reply)"])

    known = {span.span_id for span in spans}
    assert [span.name for span in spans if span.parent_id not in known] == ["ask"], "one root, and no parent is missing"
    assert [span.name for span in spans if span.kind == "CONSUMER"] == ["process lane.critical", DUE, DUE]
    assert [span.status == "ERROR" for span in spans if span.name == CHAT] == [True, True, False]
    assert len([span for span in spans if span.name.startswith("delay ")]) == 2
    assert {span.service for span in spans} == {"shop", "lanekeeper"}
