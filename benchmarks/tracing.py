"""Measures what tracing costs a message: CPU µs for its five spans (wait, process, chat, send, ack).

    ./dev bench tracing [--messages 20000] [--quick]

Each row is the CPU time of the fastest of several interleaved rounds, minus that of the same loop without tracing.
`./dev bench` shows what exported traces cost of a whole request.
"""

import argparse
import time
from collections.abc import Callable

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from lanekeeper.contract.messages import Message
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing, record_answer, record_outcome, record_request

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
            record_answer(chat, model="claude-sonnet-5-5", input_tokens=400, output_tokens=200)
        with tracing.send(reply, exchange="", routing_key="amq.gen-1"):
            pass
        with tracing.settle(signals.ACK, delivered, queue="lane.critical", delivery_tag=1):
            pass
        if span.is_recording():
            tracing.passed("wait lane.critical", start_ns=SENT_NS, end_ns=SENT_NS + 3_000_000, came_by=delivered)
        record_request(span, lane="critical", app="support", attempt=1, wait_ms=3)
        record_outcome(span, "answered")


def cpu_us(work: Callable[[Tracing], None], tracing: Tracing, count: int) -> float:
    """This process's CPU time for each message in µs."""
    began = time.process_time()
    for _ in range(count):
        work(tracing)
    return (time.process_time() - began) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000, help="messages a round")
    parser.add_argument("--quick", action="store_true", help="2,000 messages a round")
    options = parser.parse_args()
    count = 2000 if options.quick else options.messages
    rows = {
        "off: no SDK": Tracing(),
        "on, trace not sampled": Tracing(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)),
        "on, recorded, not exported": Tracing(TracerProvider(shutdown_on_exit=False)),
    }
    best = dict.fromkeys(rows, float("inf"))
    floor = float("inf")
    for _ in range(ROUNDS):
        floor = min(floor, cpu_us(untraced, Tracing(), count))
        for name, tracing in rows.items():
            best[name] = min(best[name], cpu_us(traced, tracing, count))
    print(f"{'five spans a message':<30}{'CPU µs':>8}")
    for name, found in best.items():
        print(f"{name:<30}{found - floor:>8.1f}")


if __name__ == "__main__":
    main()
