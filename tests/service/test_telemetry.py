import io
import json
import socket
import time

import pytest

from lanekeeper.contract.messages import Message
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from service.telemetry import exporters as telemetry
from service.telemetry import logs
from tests.support.otlp import OtlpReceiver

CANARY = "canary-91c2"


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def traces_url(otlp: OtlpReceiver) -> str:
    return f"{otlp.endpoint}/v1/traces"


def publish(otlp: OtlpReceiver, message: Message, *, service: str, exchange: str, key: str) -> None:
    with (
        logs.configured(service=service, level="info", stream=io.StringIO()),
        telemetry.exporting(traces_url(otlp), service_name=service) as provider,
        Tracing(provider).send(message, exchange=exchange, routing_key=key),
    ):
        pass


async def test_the_sdk_reads_its_own_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named-by-operator")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=night")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    async with OtlpReceiver() as otlp:
        publish(otlp, Message(body=b""), service="app", exchange="lane.requests", key="k")
        (sent,) = await otlp.wait_for(lambda spans: spans)

    assert sent.service == "named-by-operator"
    assert sent.resource["deployment.environment.name"] == "night"
    assert otlp.requests[0][0]["x-collector-key"] == "abc"
    assert otlp.requests[0][0]["content-encoding"] == "gzip"


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("endpoint", ["refuses", "never answers"])
def test_an_unreachable_endpoint_neither_delays_the_exit_nor_fills_the_log(endpoint: str) -> None:
    out = io.StringIO()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if endpoint == "never answers":
            listener.listen()
        url = f"http://user:{CANARY}@127.0.0.1:{listener.getsockname()[1]}"
        with (
            logs.configured(service="worker", level="info", format="json", stream=out),
            telemetry.exporting(f"{url}/v1/traces", service_name="worker") as provider,
        ):
            tracing = Tracing(provider)
            for _ in range(5000):
                with tracing.send(Message(body=b""), exchange="e", routing_key="k"):
                    pass
            began = time.monotonic()
        took_s = time.monotonic() - began

    events = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert took_s < telemetry.FLUSH_S + 5, "OpenTelemetry's own exporter would try for longer"
    assert set(events) == {signals.TRACES_EXPORTED_TO, signals.TRACES_LOST}
    assert len(events) <= 4
    assert CANARY not in out.getvalue()
