"""Measures what tracing costs a message: CPU µs for its five spans (wait, process, chat, send, ack).

    python -m benchmarks.tracing [--messages 20000]

Each row is the CPU time of the fastest of several interleaved rounds, minus that of the same loop without tracing. CPU
is that of the whole process, including the exporter's thread; "exported" sends the spans to a collector in another
process, over loopback.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import Queue, get_context

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from lanekeeper.contract.messages import Message
from lanekeeper.telemetry import recording, signals
from lanekeeper.telemetry.tracing import Tracing

ROUNDS = 5
HEADERS = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "x-lane-sent-ms": 1_700_000_000_000,
}
SENT_NS = 1_700_000_000_000_000_000
BODY = b"x" * 1024


def messages() -> tuple[Message, Message]:
    delivered = Message(
        body=BODY,
        exchange="lane.requests",
        routing_key="critical.support.chat",
        headers=HEADERS,
        message_id="5b0c6f5e-4d0f-4c4e-9c1e-0d1f5f0f5b0c",
        correlation_id="7",
        reply_to="amq.gen-1",
    )
    reply = Message(body=BODY, headers={"x-lane-status": "ok", "x-lane-attempt": 1, "x-lane-wait-ms": 3})
    return delivered, reply


def untraced(_: Tracing) -> None:
    messages()


def traced(tracing: Tracing) -> None:
    delivered, reply = messages()
    with tracing.process(delivered, queue="lane.critical", delivery_tag=1) as span:
        with tracing.chat(model="claude-sonnet-5-5", provider="anthropic", stream=False, max_tokens=1024) as chat:
            recording.answer(chat, model="claude-sonnet-5-5", input_tokens=400, output_tokens=200)
        with tracing.send(reply, exchange="", routing_key="amq.gen-1"):
            pass
        with tracing.settle(signals.ACK, delivered, queue="lane.critical", delivery_tag=1):
            pass
        if span.is_recording():
            tracing.passed("wait lane.critical", start_ns=SENT_NS, end_ns=SENT_NS + 3_000_000, came_by=delivered)
        recording.request(span, lane="critical", app="support", attempt=1, wait_ms=3)
        recording.outcome(span, "answered")


def cpu_us(work: Callable[[Tracing], None], tracing: Tracing, count: int, flush: Callable[[], object]) -> float:
    """This process's CPU time for each message in µs, including the export."""
    began = time.process_time()
    for number in range(count):
        work(tracing)
        if number % 400 == 399:  # 2,000 spans, below the exporter's queue: none is dropped, all are counted
            flush()
    flush()
    return (time.process_time() - began) / count * 1e6


def _collect(port: "Queue[int]") -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    port.put(server.server_port)
    server.serve_forever()


@contextmanager
def collector() -> Iterator[str]:
    """A collector in its own process that reads spans and drops them; yields its URL."""
    spawn = get_context("spawn")
    port = spawn.Queue()
    process = spawn.Process(target=_collect, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=20)}/v1/traces"
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000, help="messages a round (exported: a tenth)")
    count = parser.parse_args().messages
    with collector() as url:
        off = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
        recorded = TracerProvider(shutdown_on_exit=False)
        exported = TracerProvider(shutdown_on_exit=False)
        exported.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        rows: list[tuple[str, Tracing, int, Callable[[], object]]] = [
            ("off: no SDK", Tracing(), count, int),
            ("on, trace not sampled", Tracing(off), count, int),
            ("on, recorded, not exported", Tracing(recorded), count // 4, int),
            ("on, exported by OTLP/HTTP", Tracing(exported), count // 10, exported.force_flush),
        ]
        best = dict.fromkeys((row[0] for row in rows), float("inf"))
        floor = float("inf")
        for _ in range(ROUNDS):
            floor = min(floor, cpu_us(untraced, rows[0][1], count, int))
            for name, tracing, number, flush in rows:
                best[name] = min(best[name], cpu_us(traced, tracing, number, flush))
        exported.shutdown()
    print(f"{'five spans a message':<30}{'CPU µs':>8}")
    for name, found in best.items():
        print(f"{name:<30}{found - floor:>8.1f}")


if __name__ == "__main__":
    main()
