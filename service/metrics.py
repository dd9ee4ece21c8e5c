"""Shows the figures of a process: at `/metrics` to Prometheus, and over OTLP.

Parts of the process count in plain integers and histograms, which `lanekeeper status` reads too. When they are asked
for, `Metrics` takes a sample of all of them in the event loop; what is written of the sample is written in a thread.
docs/metrics.md explains each metric.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import accumulate
from threading import Thread
from time import time_ns
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from consumers.background import background_task, restarted
from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from lanekeeper.telemetry.figures import Histogram, Timings, added

Labels = Mapping[str, str]
Sample = tuple[str, Labels, float | Histogram]
Source = Callable[[], Iterable[Sample]]
GAUGES: Final = {
    "lanekeeper.lane.waiting": "Requests in the lane's queues",
    "lanekeeper.lane.in_hand": "Requests that wait in this worker for a slot",
    "lanekeeper.lane.delayed": "Requests in the delay queues",
    "lanekeeper.lane.running": "Requests that are worked on",
    "lanekeeper.lane.oldest": "How long the oldest request of the intake waits, at most",
    "lanekeeper.lane.target_wait": "The lane's target wait",
    "lanekeeper.lane.max_length": "The most that the lane's intake takes",
    "lanekeeper.lane.consumers": "Consumers of the lane's intake",
    "lanekeeper.lane.slots": "Slots",
    "lanekeeper.lane.slots_used": "Slots that are taken",
    "lanekeeper.lane.slots_lost": "Slots that are taken without a request that runs",
    "lanekeeper.webhooks.running": "Posts to webhooks that run",
    "lanekeeper.schedule.late": "For how long a schedule's due time has passed without its request",
    "lanekeeper.schedule.failed": "Whether a schedule's last request failed",
    "lanekeeper.batches.gathering": "Requests that wait to be gathered for a provider's batch",
    "lanekeeper.batches.waiting": "Requests that this worker gathers, or whose batches it waits for",
    "lanekeeper.dead_letters": "Messages in the queue of dead letters",
    "lanekeeper.account.limit": "What the account allows, a minute or at a time",
    "lanekeeper.account.left": "What is left of a limit",
    "lanekeeper.account.used": "What is taken of a limit",
    "lanekeeper.account.waiting": "Requests that wait for the account's limits",
    "lanekeeper.account.oldest_wait": "How long the first of them waits",
    "lanekeeper.breaker.open": "Whether a circuit breaker is not closed",
    "lanekeeper.provider.paused": "Whether the provider can answer nobody",
    "lanekeeper.cap.limit": "Caps",
    "lanekeeper.cap.used": "What was used of caps",
    "lanekeeper.tenant.running": "Requests of the tenant that run",
    "lanekeeper.tenant.in_hand": "Requests of the tenant that wait in this worker for a slot",
    "lanekeeper.ready": "Whether the process is ready",
    "lanekeeper.broker.connected": "Whether the connection to the broker is open",
    "lanekeeper.broker.blocked": "Whether the broker takes no publishes",
    "lanekeeper.store.available": "Whether the store answers",
}
COUNTERS: Final = {
    "lanekeeper.lane.ended": "Final outcomes",
    "lanekeeper.lane.buried": "Requests that became dead letters",
    "lanekeeper.lane.attempts": "Attempts that called a provider",
    "lanekeeper.lane.retries": "Attempts that failed and are made again",
    "lanekeeper.lane.deferrals": "Requests that were sent back to wait",
    "lanekeeper.lane.tokens": "Tokens that the lane used",
    "lanekeeper.lane.cost_usd": "Dollars that the lane used",
    "lanekeeper.lane.saved_usd": "Dollars that the lane saved by providers' batches",
    "lanekeeper.answers": "Answers of models, by why they ended",
    "lanekeeper.refusals": "Answers that a provider's safety systems ended",
    "lanekeeper.account.waits": "Waits for the account's limits",
    "lanekeeper.account.calls": "Calls",
    "lanekeeper.account.tokens": "Tokens of answered calls",
    "lanekeeper.account.web_searches": "Web searches of answered calls",
    "lanekeeper.account.cost_usd": "Dollars of answered calls",
    "lanekeeper.account.unpriced": "Answered calls that count as $0 because their model has no price",
    "lanekeeper.tenant.begun": "Requests of the tenant that got a slot",
    "lanekeeper.tenant.set_aside": "Requests of the tenant that were moved to a side queue",
    "lanekeeper.tenant.requests": "Requests that the tenant used",
    "lanekeeper.tenant.tokens": "Tokens that the tenant used",
    "lanekeeper.tenant.cost_usd": "Dollars that the tenant used",
    "lanekeeper.tenant.saved_usd": "Dollars that the tenant saved by providers' batches",
    "lanekeeper.broker.reconnects": "Connections to the broker that were opened again",
    "lanekeeper.broker.blocks": "Times when the broker began to take no publishes",
    "lanekeeper.replies.undelivered": "Replies given up because their queue was full",
    "lanekeeper.webhooks": "Posts of outcomes to webhooks",
    "lanekeeper.batches": "What became of providers' batches and of the requests in them",
    "lanekeeper.dead_letters.removed": "Dead letters that were not kept",
    "lanekeeper.control": "Control messages that were not carried out",
    "messaging.client.consumed.messages": "Deliveries",
}
HISTOGRAMS: Final = {
    "lanekeeper.lane.wait": "From publishing, or the due time, to the start of the attempt",
    "lanekeeper.lane.run": "An attempt's own time",
    "lanekeeper.lane.total": "From publishing, or the due time, to the final answer",
    "gen_ai.client.operation.duration": "Calls of providers",
    "gen_ai.client.operation.time_to_first_chunk": "Streamed calls, until the answer's first piece",
    "gen_ai.client.token.usage": "Tokens of a call",
    "db.client.operation.duration": "Operations of the store",
    "messaging.process.duration": "From a delivery's slot to its acknowledgement",
    "messaging.client.operation.duration": "Publishes, until their confirm",
    "http.server.request.duration": "HTTP calls",
}
DESCRIPTIONS: Final = {**GAUGES, **COUNTERS, **HISTOGRAMS}
UNITS: Final = {
    **dict.fromkeys((*HISTOGRAMS, "lanekeeper.lane.oldest", "lanekeeper.lane.target_wait"), "s"),
    "lanekeeper.schedule.late": "s",
    "lanekeeper.account.oldest_wait": "s",
    "gen_ai.client.token.usage": "{token}",
}
SCRAPED_FOR_S: Final = 0.5
"""Scrapes within this time get the same answer, because `/metrics` needs no key."""
SAMPLED_EVERY_S: Final = 10.0
SENT_EVERY: Final = 6
"""Samples; a minute, as OpenTelemetry's SDK does it."""
CLOSED_WITHIN_S: Final = 2.0


class Metrics(Collector):
    """The figures of one process, from all sources that were added."""

    def __init__(self, resource: Resource, *, otlp_url: str | None = None) -> None:
        self._sources: list[Source] = []
        self._samples: dict[str, list[tuple[Labels, float | Histogram]]] = {}
        self._began_ns = time_ns()
        self._resource = resource
        self._exporter = None if otlp_url is None else OTLPMetricExporter(endpoint=otlp_url)
        about_us = {_prometheus_name(name): str(value) for name, value in resource.attributes.items()}
        self._registry = CollectorRegistry(target_info=about_us)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)
        self._scraping = asyncio.Lock()
        self._scraped: tuple[float, bytes] = (float("-inf"), b"")

    def add(self, *sources: Source) -> None:
        self._sources += sources

    async def run(self) -> None:
        """Send the figures over OTLP, if there is a URL."""
        while self._exporter is not None:
            for _ in range(SENT_EVERY):
                await self._sample()
                await asyncio.sleep(SAMPLED_EVERY_S)
            self._send()

    async def scrape(self) -> tuple[bytes, str]:
        now_s = asyncio.get_running_loop().time
        async with self._scraping:
            at_s, text = self._scraped
            if now_s() - at_s >= SCRAPED_FOR_S:
                await self._sample()
                text = await asyncio.to_thread(generate_latest, self._registry)
                self._scraped = now_s(), text
        return text, CONTENT_TYPE_LATEST

    def close(self) -> None:
        """Send the last sample over OTLP, if there is a URL."""
        if self._exporter is not None:
            self._send().join(CLOSED_WITHIN_S)
            self._exporter.shutdown()

    def collect(self) -> Iterator[Metric]:
        """What Prometheus reads: the last sample."""
        for name, samples in self._samples.items():
            labels = sorted({label for each, _ in samples for label in each})
            kind: Any = HistogramMetricFamily
            if name not in HISTOGRAMS:
                kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            family = kind(
                _prometheus_name(name),
                DESCRIPTIONS[name],
                labels=[_prometheus_name(label) for label in labels],
                unit="seconds" if UNITS.get(name) == "s" else "",
            )
            for each, value in samples:
                found = (_cumulated(value), value.sum) if isinstance(value, Histogram) else (value,)
                family.add_metric([each.get(label, "") for label in labels], *found)
            yield family

    def _send(self) -> Thread:
        """In a thread that delays no exit, because a collector that is away is waited for."""
        assert self._exporter is not None
        sending = Thread(target=self._exporter.export, args=(self._data(),), name="metrics", daemon=True)
        sending.start()
        return sending

    def _data(self) -> export.MetricsData:
        """The last sample for OTLP."""
        period: dict[str, Any] = {"start_time_unix_nano": self._began_ns, "time_unix_nano": time_ns()}
        metrics = []
        for name, samples in self._samples.items():
            points: list[Any] = [
                export.HistogramDataPoint(
                    attributes=labels, count=sum(value.counts), sum=value.sum, bucket_counts=value.counts,
                    explicit_bounds=value.bounds, min=0, max=0, **period,
                )
                if isinstance(value, Histogram)
                else export.NumberDataPoint(attributes=labels, value=value, **period)
                for labels, value in samples
            ]  # fmt: skip
            data: Any
            if name in HISTOGRAMS:
                data = export.Histogram(points, export.AggregationTemporality.CUMULATIVE)
            elif name in COUNTERS:
                data = export.Sum(points, export.AggregationTemporality.CUMULATIVE, is_monotonic=True)
            else:
                data = export.Gauge(points)
            metrics.append(export.Metric(name, DESCRIPTIONS[name], UNITS.get(name, ""), data))
        scope = export.ScopeMetrics(InstrumentationScope("lanekeeper"), metrics, "")
        return export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])

    async def _sample(self) -> None:
        samples: dict[str, list[tuple[Labels, float | Histogram]]] = {}
        for source in self._sources:
            await asyncio.sleep(0)  # all of them together may take milliseconds
            for name, labels, value in source():
                samples.setdefault(name, []).append((labels, added([value]) if isinstance(value, Histogram) else value))
        self._samples = samples


def _prometheus_name(name: str) -> str:
    return name.replace(".", "_")


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    return list(zip((*map(str, histogram.bounds), "+Inf"), accumulate(histogram.counts), strict=True))


@asynccontextmanager
async def measuring(resource: Resource, *, otlp_url: str | None) -> AsyncIterator[Metrics]:
    """The metrics of a process, which are sent over OTLP if there is a URL, inside the block."""
    metrics = Metrics(resource, otlp_url=otlp_url)
    try:
        async with background_task(restarted(metrics.run, name="metrics"), name="metrics"):
            yield metrics
    finally:
        await asyncio.to_thread(metrics.close)


# ---- what parts of any process tell of themselves --------------------------------------------------------------------


def of_connection(name: str, connection: Connection) -> Iterator[Sample]:
    """The samples of a connection to the broker."""
    labels = {"connection": name}
    yield "lanekeeper.broker.connected", labels, int(connection.is_open)
    yield "lanekeeper.broker.reconnects", labels, max(0, connection.openings - 1)
    yield "lanekeeper.broker.blocked", labels, int(connection.blocked is not None)
    yield "lanekeeper.broker.blocks", labels, connection.blocks


def of_http(times: Mapping[tuple[str, str, int], Histogram], *, is_ready: bool) -> Iterator[Sample]:
    """The samples of an HTTP server: its times by method, path and status."""
    yield "lanekeeper.ready", {}, int(is_ready)
    for (method, path, status), histogram in times.items():
        labels = {"http.request.method": method, "http.route": path, "http.response.status_code": str(status)}
        yield "http.server.request.duration", labels, histogram


def of_client(client: Client) -> Iterator[Sample]:
    """The samples of a gateway's client."""
    if client.amqp is not None:
        yield from of_connection("gateway", client.amqp.connection)
        yield from of_publishes(client.amqp.publisher.times)


def of_publishes(times: Timings) -> Iterator[Sample]:
    """The samples of a publisher."""
    for error_type, histogram in times.items():
        labels = {"messaging.system": "rabbitmq", "messaging.operation.name": "send"}
        failed = {"error.type": error_type} if error_type else {}
        yield "messaging.client.operation.duration", {**labels, **failed}, histogram


def of_store(times: Timings, *, url: str, trouble: str | None) -> Iterator[Sample]:
    """The samples of a store."""
    system = "sqlite" if url.startswith("sqlite") else "redis"
    yield "lanekeeper.store.available", {}, int(trouble is None)
    for operation, histogram in times.items():
        labels = {"db.system.name": system, "db.operation.name": operation}
        yield "db.client.operation.duration", labels, histogram
