"""`/metrics`, `GET /v1/lanes` and `lanekeeper status` tell the same of a few requests."""

import json
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from service.simulated.app import SimulatedAPI
from tests.support.brokers import Vhost
from tests.support.processes import environment, lanekeeper, run
from tests.support.requester import requester
from tests.support.waiting import until


class Scraped:
    """What `/metrics` answered."""

    def __init__(self, text: str) -> None:
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))


async def test_a_few_requests_are_told_alike_by_metrics_lanes_and_status(vhost: Vhost, tmp_path: Path) -> None:
    async with SimulatedAPI() as api, aiohttp.ClientSession() as session:
        environ = environment(
            vhost.amqp_url,
            vhost.management_url,
            ANTHROPIC_BASE_URL=api.base_url,
            LANEKEEPER_GATEWAY__PORT="0",
            LANEKEEPER_LANES__BATCH__SLOTS="2",
            LANEKEEPER_METRICS__TENANTS=vhost.user,
        )
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker, requester(vhost.amqp_url) as app:
            url = await worker.ready()

            async def scraped() -> Scraped:
                async with session.get(f"{url}/metrics") as got:
                    assert got.status == 200
                    return Scraped(await got.text())

            for n in range(3):
                assert (await app.ask({"prompt": f"chat {n}"}, user_id=vhost.user)).status == "ok"
            assert (await app.ask({"prompt": "[[fault: overloaded x1]]"})).status == "ok"
            assert (await app.ask({"prompt": "[[fault: invalid]]"})).code == "provider_rejected"
            await app.publish({"prompt": "later"}, headers={"x-lane-delay-ms": 3_600_000})
            for n in range(5):
                await app.publish({"prompt": f"job {n} [[latency: 120s]]"}, key="batch.tests.x")
            await until(lambda: api.running == 2)

            async def all_told() -> Scraped | None:
                told = await scraped()
                in_hand = told("lanekeeper_lane_in_hand", lane="batch") or 0
                waits = (told("lanekeeper_lane_waiting", lane="batch") or 0) + in_hand
                return told if waits == 3 and told("lanekeeper_dead_letters") == 1 else None

            told = await until(all_told)
            critical = {"lane": "critical"}
            assert told("lanekeeper_lane_ended_total", **critical, code="ok") == 4
            assert told("lanekeeper_lane_ended_total", **critical, code="provider_rejected") == 1
            assert told("lanekeeper_lane_buried_total", **critical, code="provider_rejected") == 1
            assert told("lanekeeper_lane_retries_total", **critical, cause="overloaded") == 1
            assert told("lanekeeper_lane_attempts_total", **critical) == 6
            assert told("lanekeeper_lane_delayed", **critical, reason="scheduled") == 1
            for name, count in (("wait", 6), ("run", 6), ("total", 5)):
                assert told(f"lanekeeper_lane_{name}_seconds_count", **critical) == count
                assert told(f"lanekeeper_lane_{name}_seconds_bucket", **critical, le="3600") == count
            batch = {"lane": "batch"}
            assert (told("lanekeeper_lane_running", **batch), told("lanekeeper_lane_slots_used", **batch)) == (2, 2)
            assert told("lanekeeper_lane_slots", **batch) == 3
            oldest_s = told("lanekeeper_lane_oldest_seconds", **batch)
            assert oldest_s is not None
            assert 0 < oldest_s < 60
            assert told("lanekeeper_lane_oldest_seconds", **critical) == 0
            assert told("lanekeeper_account_calls_total", account="anthropic/sonnet", outcome="answered") == 4
            assert told("lanekeeper_tenant_begun_total", **critical, tenant=vhost.user) == 3
            assert told("lanekeeper_ready") == told("lanekeeper_store_available") == 1
            assert told("lanekeeper_broker_connected", connection="publish") == 1
            names = {name for name, _ in told.samples}
            assert {"gen_ai_client_operation_duration_seconds_bucket", "process_open_fds", "target_info"} <= names
            assert "http_server_request_duration_seconds_bucket" in names

            async with session.get(f"{url}/v1/lanes") as got:
                lanes = {lane["lane"]: lane for lane in (await got.json())["lanes"]}
            assert (lanes["batch"]["running"], lanes["batch"]["depth"]) == (2, 3)
            assert lanes["critical"]["wait_ms"]["5m"]["count"] == 6
            assert lanes["critical"]["delayed_for"]["scheduled"]["count"] == 1

            code, lines = await run("status", "--json", environ=environ, folder=tmp_path)
            assert code == 0
            shown: Any = json.loads("\n".join(lines))
            of_critical = next(lane for lane in shown["lanes"] if lane["lane"] == "critical")
            del of_critical["delayed_for"]  # its seconds pass
            assert {name: lanes["critical"][name] for name in of_critical} == of_critical
            assert of_critical["buried"] == 1

            async with session.get(f"{url}/metrics", data=b"x") as got:
                assert got.status == 413
