"""`/metrics`, `GET /v1/lanes`, `lanekeeper status`, `top` and the summary in the log tell the same of a few
requests."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from service.status import Status
from service.worker.running import summarise_once
from tests.journeys.test_providers import status
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.processes import COMMAND, environment, lanekeeper, run
from tests.support.requester import requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import STARTED_S, until


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


async def test_names_that_requests_invent_are_no_labels_and_no_rows(vhost: Vhost, tmp_path: Path) -> None:
    async with FaultyAPI() as api, aiohttp.ClientSession() as session:
        environ = environment(vhost, api, LANEKEEPER_SPEAKERS=vhost.user)
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker, requester(vhost) as app:
            url = await worker.ready()
            for n in range(30):
                name = f"invented-{n}" if n % 2 else f"invented-sonnet-{n}"
                body = {"prompt": "a", "model": name} if n % 3 else {"prompt": "[[fault: server_error]]", "model": name}
                headers = {"x-lane-tenant": name}
                how: dict[str, Any] = {"key": f"normal.{name}.{name}", "headers": headers, "user_id": vhost.user}
                await app.publish({**body, "max_tokens": 10}, **how)
            await until(lambda: len({call.model for call in api.calls}) == 30, within_s=20)

            async with session.get(f"{url}/metrics") as got:
                text = await got.text()
            assert "invented" not in text
            samples = [
                (sample.name, frozenset(sample.labels.items()))
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            ]
            assert len(samples) == len(set(samples)), "no sample twice"
            async with session.get(f"{url}/v1/lanes") as got:
                lanes = await got.json()
            assert set(lanes["accounts"]) <= {"anthropic/other", "anthropic/sonnet", "anthropic/sonnet-5-5"}
            assert "invented" not in json.dumps([lanes["accounts"], lanes["breakers"], lanes["waiting"]])


async def test_a_few_requests_are_told_alike_by_metrics_lanes_and_status(vhost: Vhost, tmp_path: Path) -> None:
    async with FaultyAPI() as api, aiohttp.ClientSession() as session:
        environ = environment(vhost, api, LANEKEEPER_LANES__BATCH__SLOTS="2", LANEKEEPER_METRICS__TENANTS=vhost.user)
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker, requester(vhost) as app:
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
            assert told("lanekeeper_account_calls_total", account="anthropic/sonnet-5-5", outcome="answered") == 4
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


async def test_status_adds_up_the_figures_of_all_workers_and_each_logs_its_own_once_a_minute(vhost: Vhost) -> None:
    async with (
        serving(vhost, lanes={"batch": {"slots": 2}}) as own,
        serving(vhost, works=("critical",)) as other,
        requester(vhost) as app,
    ):
        began_s = time.monotonic()
        sent = {"x-lane-sent-ms": time.time_ns() // 1_000_000}
        for n in range(20):
            assert (await app.ask({"prompt": f"chat {n}"}, headers=sent)).status == "ok"
        assert (await app.ask({"prompt": "[[fault: invalid]]"}, headers=sent)).code == "provider_rejected"
        assert (await app.ask({"prompt": "[[fault: overloaded x1]]"}, key="normal.tests.x")).status == "ok"
        for n in range(7):
            await app.publish({"prompt": f"job {n} [[held]]"}, key="batch.tests.x")
        await until(lambda: own.api.running == 2)
        assert (await app.control({"cancel": 1}, key="cancel")).code == "invalid_request"

        async def told_once_nothing_moves() -> Status | None:
            """Workers answer before queues are counted, so a moving request may be missed or counted twice."""
            found = await status(own)
            return found if found.lanes[2].depth == 5 and len(found.workers) == 2 else None

        told: Status = await until(told_once_nothing_moves)
        assert told.control["refused"] == 1
        assert told.dead_letters == {"exported": 0, "dropped": 0, "unparked": 0}
        critical, normal, batch = told.lanes
        assert (batch.running, batch.workers, batch.slots, batch.due_slots, batch.answered) == (2, 1, 2, 1, 0)
        assert batch.consumers in (1, 2), "a scout looks ahead where a lane is full"
        assert batch.wait_ms is not None
        assert batch.wait_ms["1h"]["count"] == 0, "nothing has ended there yet"
        assert (critical.depth, critical.running, critical.answered, critical.failed) == (0, 0, 20, 1)
        assert (critical.consumers, critical.workers, critical.slots) == (2, 2, 32)
        assert critical.wait_ms is not None
        assert critical.wait_ms["1h"]["count"] == 21
        for times in critical.wait_ms.values():
            assert 0 <= (times["p50"] or 0) <= (times["p95"] or 0) <= (times["p99"] or 0) < 60_000
        assert (normal.answered, normal.retried) == (1, 1)

        def summaries(worker: RunningWorker) -> dict[str, Any]:
            with capture_logs() as logs:
                summarise_once(worker.parts)
            return {each["lane"]: each for each in logs if each["event"] == "lane.summary"}

        await until(lambda: summaries(own)["batch"]["depth"] == 5)
        logged = summaries(own)
        assert list(logged) == ["critical", "normal", "batch"]
        assert (logged["batch"]["running"], logged["batch"]["wait_p50_ms"]) == (2, None)
        assert logged["normal"]["wait_p95_ms"] >= logged["normal"]["wait_p50_ms"] >= 0
        if time.monotonic() - began_s < 60:  # on a busy machine the first may be more than a minute ago
            assert (critical.throughput_per_min, normal.throughput_per_min) == (21, 1)
            assert logged["critical"]["per_min"] + summaries(other)["critical"]["per_min"] == 21


async def test_top_shows_the_lanes_until_it_is_told_to_end(vhost: Vhost, tmp_path: Path) -> None:
    environ = environment(vhost)
    async with serving(vhost), requester(vhost) as app:
        assert (await app.ask({"prompt": "x"})).status == "ok"
        top = await asyncio.create_subprocess_exec(
            sys.executable, "-m", COMMAND, "top", cwd=tmp_path, env=environ, stdout=asyncio.subprocess.PIPE
        )
        assert top.stdout is not None
        shown = b""
        async with asyncio.timeout(STARTED_S):
            while b"wait p50" not in shown or b"answered by" not in shown:
                more = await top.stdout.read(4096)
                assert more, shown
                shown += more
        top.send_signal(signal.SIGINT)
        async with asyncio.timeout(STARTED_S):
            await top.wait()
        assert b"critical" in shown
        assert top.returncode in (0, 130)
