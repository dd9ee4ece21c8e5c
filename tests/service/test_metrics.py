"""Metrics: what Prometheus reads, what is known of queues, and sketches that can be merged."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ddsketch import DDSketch
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource
from prometheus_client.parser import text_string_to_metric_families

from consumers.background import background_task
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused
from lanekeeper.telemetry.figures import Histogram
from service.config.settings import GatewayKey
from service.gateway.operators import visible_to
from service.metrics import COUNTERS, GAUGES, HISTOGRAMS, UNITS, Metrics, Sample
from service.status import SKETCH_BYTES, merge, merged_sketch, packed_sketch, quantiles
from service.worker import lengths as lengths_module
from service.worker.lengths import QueueLengths
from tests.support.waiting import until
from topology.lanes import BATCH, CRITICAL

NAMES = Names()


async def scraped(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text, content_type = await metrics.scrape()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def waits(*seconds: float) -> Histogram:
    histogram = Histogram()
    for each in seconds:
        histogram.add(each)
    return histogram


async def test_what_parts_have_counted_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.metrics.SCRAPED_FOR_S", 0)
    metrics, counted = Metrics(Resource({"service.name": "x"})), waits(0.003, 0.2, 7200)
    batch = {"lane": "batch"}

    def source() -> Iterator[Sample]:
        yield "lanekeeper.lane.running", batch, 2
        yield "lanekeeper.lane.ended", {**batch, "code": "ok"}, sum(counted.counts)
        yield "lanekeeper.lane.wait", batch, counted

    metrics.add(source)
    first = await scraped(metrics)
    counted.add(0.2)
    second = await scraped(metrics)

    lane = frozenset(batch.items())
    assert first["lanekeeper_lane_running", lane] == 2
    assert [each["lanekeeper_lane_ended_total", lane | {("code", "ok")}] for each in (first, second)] == [3, 4]
    name = "lanekeeper_lane_wait_seconds"
    assert [first[f"{name}_bucket", lane | {("le", le)}] for le in ("0.005", "0.25", "3600", "+Inf")] == [1, 2, 2, 3]
    assert (first[f"{name}_sum", lane], second[f"{name}_count", lane]) == (7200.203, 4)
    assert ("lanekeeper_dead_letters", frozenset()) not in first, "what is not known is missing"
    metrics.close()


async def test_the_same_figures_are_sent_over_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[MetricsData] = []
    monkeypatch.setattr(OTLPMetricExporter, "export", lambda _, data, **__: sent.append(data))
    metrics = Metrics(Resource({}), otlp_url="http://127.0.0.1:1/v1/metrics")
    metrics.add(lambda: [("lanekeeper.ready", {}, 1), ("lanekeeper.lane.run", {"lane": "batch"}, waits(0.1))])
    async with background_task(metrics.run(), name="metrics"):
        await until(lambda: metrics._samples)
    await asyncio.to_thread(metrics.close)

    told = {metric.name: metric.data for metric in sent[-1].resource_metrics[0].scope_metrics[0].metrics}
    assert told.keys() == {"lanekeeper.ready", "lanekeeper.lane.run"}, "what was counted last is sent at the end"
    assert json.loads(told["lanekeeper.lane.run"].to_json())["data_points"][0]["count"] == 1


def test_each_metric_is_in_the_documentation() -> None:
    page = Path("docs/metrics.md").read_text()
    names = {name: f"{name.replace('.', '_')}_total" for name in COUNTERS}
    for name in (*GAUGES, *HISTOGRAMS):
        names[name] = name.replace(".", "_") + ("_seconds" if UNITS.get(name) == "s" else "")
    assert not [name for name in names.values() if f"`{name}" not in page]


class Broker:
    """Tells the lengths of queues in place of `depths`."""

    def __init__(self) -> None:
        self.ready: dict[str, int] = {}
        self.is_refused = False
        self.asked = 0

    async def depths(self, connection: object, queues: list[str]) -> dict[str, Depth]:
        self.asked += 1
        if self.is_refused and NAMES.dead not in queues:
            raise AccessRefused("no")
        return {queue: Depth(self.ready.get(queue, 0), 1) for queue in queues}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    found = Broker()
    monkeypatch.setattr(lengths_module, "depths", found.depths)
    monkeypatch.setattr(lengths_module, "READ_EVERY_S", 0.001)
    monkeypatch.setattr(lengths_module, "REFUSED_FOR_S", 0.001)
    return found


async def read(lengths: QueueLengths, broker: Broker) -> None:
    before = broker.asked
    async with background_task(lengths.run(), name="lengths"):
        await until(lambda: broker.asked >= before + 3)


async def test_what_the_broker_does_not_tell_is_missing_and_the_rest_is_told(broker: Broker) -> None:
    lengths = QueueLengths(None, [BATCH], names=NAMES)  # type: ignore[arg-type]

    def told() -> list[float | None]:
        return [lengths.waiting("batch"), lengths.oldest_s("batch", delivered_ms={}), lengths.dead]

    assert told() == [None, None, None]
    broker.ready = {"lane.batch": 2, "lane.batch.due": 3, "lane.batch.side.07": 4, "lane.dead": 5}
    await read(lengths, broker)
    assert told() == [9, None, 5]
    broker.is_refused = True
    await read(lengths, broker)
    assert told() == [None, None, 5]


async def test_the_oldest_is_younger_than_what_was_delivered_last_and_than_an_empty_queue(broker: Broker) -> None:
    lengths = QueueLengths(None, [CRITICAL], names=NAMES)  # type: ignore[arg-type]
    broker.ready = {"lane.critical": 2}
    await read(lengths, broker)
    hour_ago, minute_ago = (round(1000 * (time.time() - ago_s)) for ago_s in (3600, 60))

    assert lengths.oldest_s("critical", delivered_ms={}) is None, "nothing is known"
    assert lengths.oldest_s("critical", delivered_ms={"lane.critical": minute_ago}) == pytest.approx(60, abs=5)
    broker.ready = {}
    await read(lengths, broker)
    assert lengths.oldest_s("critical", delivered_ms={"lane.critical": hour_ago}) == 0
    broker.ready = {"lane.critical": 1}
    await read(lengths, broker)
    oldest_s = lengths.oldest_s("critical", delivered_ms={"lane.critical": hour_ago})
    assert oldest_s is not None
    assert oldest_s < 60, "the intake was seen empty just now"
    broker.ready = {"lane.critical": 1, "lane.critical.side.03": 1}
    await read(lengths, broker)
    delivered_ms = {"lane.critical": minute_ago, "lane.critical.side": hour_ago}
    assert lengths.oldest_s("critical", delivered_ms=delivered_ms) == pytest.approx(oldest_s, abs=5)


@pytest.mark.parametrize("text", [None, 7, "", "?", "AAAA", packed_sketch(DDSketch(0.3)), "A" * SKETCH_BYTES])
def test_what_is_no_sketch_of_ours_is_left_out(text: object) -> None:
    assert quantiles(merged_sketch([text]))["count"] == 0


def test_a_key_sees_its_lanes_and_its_tenant_and_an_operator_sees_all() -> None:
    of_tenant = {"running": 1, "in_hand": 0, "begun": 1, "set_aside": 0}
    answers = [
        {
            "worker": "a",
            "lanes": {},
            "tenants": {"critical": {"crm": of_tenant, "web": of_tenant}},
            "spent": {"lane": {"critical": {"usd": 1}}, "tenant": {"web": {"usd": 1}}},
            "waiting": {"anthropic/x": {"critical": {"count": 1, "reason": "rpm", "oldest_s": 1}}},
        }
    ]
    status = merge(answers, {}, lanes=(CRITICAL, BATCH), names=NAMES)

    crm = visible_to(status, GatewayKey(tenant="crm", lanes=("critical",)))
    ops = visible_to(status, GatewayKey(tenant="ops", lanes=("batch",), operator="look"))

    assert [lane["lane"] for lane in crm["lanes"]] == ["critical"]
    assert crm["lanes"][0]["tenants"] == {"crm": of_tenant}
    assert crm["lanes"][0]["waits_for"] == ["1 wait for rpm of anthropic/x; the first for 1.0 s"]
    assert "web" not in str(crm)
    assert [lane["lane"] for lane in ops["lanes"]] == ["critical", "batch"]
    assert ops["spent"]["tenant"] == {"web": {"usd": 1}}
    assert ops["lanes"][0]["tenants"].keys() == {"crm", "web"}
