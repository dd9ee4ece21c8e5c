"""A private Jaeger for tests: on free loopback ports, traces in memory, ended when its starter ends."""

import asyncio
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import GUARD
from tests.support.jaeger_build import BuildFailed, NotToBeHad, jaeger
from tests.support.otlp import ReceivedSpan, tree
from tests.support.private_broker import LOOPBACK, free_ports
from tests.support.waiting import PATIENCE_S, STARTED_S

START_S = STARTED_S
KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")


class Jaeger:
    """A running Jaeger: it receives spans at `endpoint` (for OTEL_EXPORTER_OTLP_ENDPOINT), and returns traces."""

    def __init__(self, *, otlp_port: int, query_port: int) -> None:
        self.endpoint = f"http://{LOOPBACK}:{otlp_port}"
        self.query = f"http://{LOOPBACK}:{query_port}"

    async def trace(self, trace_id: str, *, names: Iterable[str], within_s: float = PATIENCE_S) -> list[ReceivedSpan]:
        """The spans of a trace by start, once there is one for each of `names` (a name given twice: two)."""
        wanted = sorted(names)
        end = time.monotonic() + within_s
        while True:
            spans = await asyncio.to_thread(asked, self.query, trace_id)
            there = [span.name for span in spans]
            if all(there.count(name) >= wanted.count(name) for name in wanted):
                return spans
            assert time.monotonic() < end, f"not in {within_s:g} s: {wanted}; Jaeger has:\n{tree(spans)}"
            await asyncio.sleep(0.1)


def asked(query: str, trace_id: str) -> list[ReceivedSpan]:
    """The spans of a trace by start, from Jaeger's query API; none if it does not know the trace."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{query}/api/v3/traces/{trace_id}", timeout=5) as answer:
            return spans_of(json.load(answer)["result"])
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return []


def spans_of(traces: Mapping[str, Any]) -> list[ReceivedSpan]:
    """The spans in traces in OTLP's JSON form, by start."""
    found = [
        _span(span, _values(of_resource["resource"].get("attributes", ())), of_scope.get("scope", {}).get("name", ""))
        for of_resource in traces["resourceSpans"]
        for of_scope in of_resource["scopeSpans"]
        for span in of_scope["spans"]
    ]
    return sorted(found, key=lambda span: span.start_ns)


def _span(span: Mapping[str, Any], resource: dict[str, Any], scope: str) -> ReceivedSpan:
    status = span.get("status", {})
    return ReceivedSpan(
        service=str(resource.get("service.name", "")),
        scope=scope,
        name=span["name"],
        kind=KINDS[span.get("kind", 0)],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        links=tuple((link["traceId"], link["spanId"]) for link in span.get("links", ())),
        attributes=_values(span.get("attributes", ())),
        status=("UNSET", "OK", "ERROR")[status.get("code", 0)],
        status_message=status.get("message", ""),
        events=tuple(event["name"] for event in span.get("events", ())),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        resource=resource,
    )


def _values(pairs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in pairs}


def _value(value: Mapping[str, Any]) -> Any:
    kind: str
    found: Any
    kind, found = next(iter(value.items()), ("", None))
    match kind:
        case "intValue":
            return int(found)
        case "arrayValue":
            return [_value(each) for each in found.get("values", ())]
        case _:
            return found


@contextmanager
def running(folder: Path) -> Iterator[Jaeger]:
    """A running Jaeger. If none can be had, the test is skipped; in CI it fails."""
    try:
        program = jaeger()
    except NotToBeHad as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    except BuildFailed as error:
        pytest.fail(f"Jaeger could not be built: {error}")
    otlp, query, grpc = free_ports(3)
    config = folder / "jaeger.yaml"
    config.write_text(json.dumps(_config(otlp=otlp, query=query, grpc=grpc)))  # JSON is YAML
    found = Jaeger(otlp_port=otlp, query_port=query)
    log = folder / "jaeger.log"
    with log.open("w") as told:
        guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", str(program), "--config", str(config)],
            env={**os.environ, "OTEL_TRACES_SAMPLER": "always_off"},  # else it would trace itself
            stdin=subprocess.PIPE,
            stdout=told,
            stderr=told,
            start_new_session=True,
        )
        try:
            _await_answer(found, log)
            yield found
        finally:
            guard.communicate()


def _await_answer(jaeger: Jaeger, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            asked(jaeger.query, "1" * 32)
            return
        except OSError:
            assert time.monotonic() < end, f"Jaeger does not answer within {START_S} s:\n{log.read_text()}"
            time.sleep(0.05)


def _config(*, otlp: int, query: int, grpc: int) -> dict[str, Any]:
    """The configuration, in the form of the OpenTelemetry Collector's."""
    return {
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
            "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "warn"}},
        },
        "extensions": {
            "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": 10_000}}}},
            "jaeger_query": {
                "storage": {"traces": "memory"},
                "http": {"endpoint": f"{LOOPBACK}:{query}"},
                "grpc": {"endpoint": f"{LOOPBACK}:{grpc}"},
            },
        },
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": f"{LOOPBACK}:{otlp}"}}}},
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
    }
