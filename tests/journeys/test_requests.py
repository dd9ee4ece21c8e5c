"""Requests that are submitted by HTTP and asked for later: polled, waited for, cancelled, and nobody else's."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from consumers.slots import activity
from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.http_calls import call, submit
from tests.support.serving import serving
from tests.support.waiting import until

SLOW = "[[latency: 60s]] slow"
CRM, SHOP = "lane-crm", "lane-shop"


async def status(url: str, id: str, **headers: str) -> str:
    found = await call("GET", f"{url}/v1/requests/{id}", **headers)
    return str(found["status"])


async def comes_to(url: str, id: str, word: str) -> None:
    while await status(url, id) != word:  # noqa: ASYNC110  an application polls
        await asyncio.sleep(0.02)


async def test_a_request_is_submitted_polled_and_its_result_fetched(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        submitted = await submit(url, "[[held]] polled", x_lane_name="normal")
        assert submitted.status == 202
        assert submitted.headers["location"] == submitted["status_url"] == f"/v1/requests/{submitted['id']}"

        await comes_to(url, submitted["id"], "running")
        worker.api.release("polled")
        await comes_to(url, submitted["id"], "completed")
        found = await call("GET", url + submitted["status_url"])
        assert found["lane"] == "normal"
        assert found["attempts"] == 1
        assert found["model"] == "claude-sonnet-5-5"
        assert found["result"]["content"][0]["text"] == "echo: [[held]] polled"
        assert "problem" not in found.body


async def test_a_call_can_wait_for_the_end_and_is_answered_without_it_when_its_time_is_over(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        slow = await submit(url, SLOW)
        assert (await call("GET", f"{url}{slow['status_url']}?wait=300ms"))["status"] in ("queued", "running")
        quick = await submit(url, "[[latency: 500ms]] waited")
        found = await call("GET", f"{url}{quick['status_url']}?wait=30s")

        assert found["status"] == "completed"
        for wrong in ("61s", "soon", "-1s", "1h", ""):
            refused = await call("GET", f"{url}{quick['status_url']}?wait={wrong}")
            assert (refused.status, refused["code"]) == (400, "invalid_request")
            assert refused.headers["content-type"] == "application/problem+json"
        await call("DELETE", url + slow["status_url"])


async def test_a_queued_request_tells_its_position_and_when_it_may_start(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "NOTE_EVERY_S", 0.1)
    monkeypatch.setattr(activity, "SEEN_AT_LEAST_S", 0.5)
    lanes = {"batch": {"slots": 1, "side_queues": 0}}
    async with serving(vhost.amqp_url, lanes=lanes) as worker, gate(worker.settings) as url:
        for number in range(40):
            last = await submit(url, f"[[latency: 3s]] number {number}", x_lane_name="batch")

        async def queued() -> Any:
            found = await call("GET", url + last["status_url"])
            assert found["status"] == "queued"
            return found.body if "predicted_start_at" in found.body else None

        found = await until(queued)
        assert 0 < found["position"] < 40
        assert found["submitted_at"] < found["predicted_start_at"]


async def test_without_a_worker_a_cancellation_is_taken_at_once_and_carried_out_when_one_starts(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanekeeper.over_amqp.ANSWERED_WITHIN_S", 3600)
    async with serving(vhost.amqp_url) as worker:
        settings = worker.settings
    async with gate(settings) as url:
        submitted = await submit(url, "never", x_lane_name="batch")
        found = await call("GET", url + submitted["status_url"])
        assert (found["status"], found["position"]) == ("queued", 0)
        assert "predicted_start_at" not in found.body

        cancelled = await call("DELETE", url + submitted["status_url"])
        assert (cancelled.status, cancelled["outcome"]) == (202, "unseen")
        async with serving(vhost.amqp_url) as worker:
            ended = await call("GET", f"{url}{submitted['status_url']}?wait=60s")
            assert ended["status"] == "cancelled"
            assert not worker.calls("never")


async def test_a_gateway_with_another_store_than_its_workers_logs_it(vhost: Vhost, tmp_path: Path) -> None:
    async with serving(vhost.amqp_url) as worker:
        other = worker.settings.model_copy(update={"store_url": SecretStr(f"sqlite:///{tmp_path}/other.sqlite")})
        with capture_logs() as logs:
            async with gate(other) as url:
                submitted = await submit(url, "lost to sight")
                await until(lambda: "gateway.other_store" in [each["event"] for each in logs])
                assert await status(url, submitted["id"]) == "queued"


async def test_a_failed_request_tells_its_problem(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        submitted = await submit(url, "[[fault: invalid]] wrong")
        found = await call("GET", f"{url}{submitted['status_url']}?wait=30s")

        assert found["status"] == "failed"
        assert found["problem"]["code"] == "provider_rejected"
        assert found["problem"]["request"] == submitted["id"]


async def test_the_same_key_is_the_same_request_and_with_another_body_a_conflict(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url, gate(worker.settings) as other:
        first = await submit(url, "[[latency: 500ms]] once", idempotency_key="k-1")
        again = await submit(other, "[[latency: 500ms]] once", idempotency_key="k-1")
        assert (first.status, again.status, again.body) == (202, 202, first.body)
        conflict = await submit(other, "another", idempotency_key="k-1")
        assert (conflict.status, conflict["code"]) == (409, "idempotency_conflict")

        assert (await call("GET", f"{other}/v1/requests/k-1?wait=30s"))["status"] == "completed"
        assert (await submit(url, "[[latency: 500ms]] once", idempotency_key="k-1")).status == 202
        assert (await submit(url, "another", idempotency_key="k-1")).status == 409
        assert len(worker.calls("once")) == 1


async def test_cancelled_while_it_is_queued_delayed_and_running(vhost: Vhost) -> None:
    lanes = {"normal": {"slots": 1}}
    async with serving(vhost.amqp_url, lanes=lanes) as worker, gate(worker.settings) as url:
        running = await submit(url, SLOW)
        await worker.api.until(lambda: worker.api.running == 1)
        queued = await submit(url, "never queued")
        delayed = await submit(url, "never delayed", x_lane_delay_ms="600000")
        assert await status(url, queued["id"]) == "queued"
        assert await status(url, delayed["id"]) == "delayed"
        assert (await call("GET", url + running["status_url"]))["attempts"] == 0  # the first has not ended

        for each, outcomes in ((delayed, {"recorded"}), (queued, {"recorded", "unseen"}), (running, {"told"})):
            cancelled = await call("DELETE", url + each["status_url"])
            assert (cancelled.status, cancelled["id"]) == (202, each["id"])
            assert cancelled["outcome"] in outcomes
            found = await call("GET", f"{url}{each['status_url']}?wait=30s")
            assert found["status"] == "cancelled"
            assert found["problem"]["code"] == "cancelled"
        ended = await call("DELETE", url + running["status_url"])
        assert (ended.status, ended["outcome"]) == (200, "ended")
        await worker.api.until(lambda: worker.api.running == 0)
        assert not worker.calls("never")


async def test_a_tenant_that_asks_for_anothers_request_learns_nothing(vhost: Vhost) -> None:
    keys = {hash_of(CRM): {"tenant": "crm"}, hash_of(SHOP): {"tenant": "shop"}}
    user = urlsplit(vhost.amqp_url).username
    async with serving(vhost.amqp_url, speakers=(user,)) as worker, gate(worker.settings, keys=keys) as url:
        submitted = await submit(url, SLOW, x_api_key=CRM)
        await worker.api.until(lambda: worker.api.running == 1)
        where = url + submitted["status_url"]
        theirs = [await call(method, where, x_api_key=SHOP) for method in ("GET", "DELETE")]
        unknown = await call("GET", f"{url}/v1/requests/nobodys", x_api_key=SHOP)

        for each in theirs:
            assert (each.status, each["title"]) == (unknown.status, unknown["title"]) == (404, "Not Found")
            assert each.headers["content-type"] == "application/problem+json"
        assert worker.api.running == 1
        assert (await call("GET", where)).status == 401
        assert (await call("DELETE", where, x_api_key=CRM)).status == 202


async def test_what_could_not_be_published_is_not_known(vhost: Vhost) -> None:
    lanes = {"batch": {"max_length": 1}}
    async with serving(vhost.amqp_url, lanes=lanes, works=("critical",)) as worker, gate(worker.settings) as url:
        full = 202
        number = 0
        while full == 202:  # a quorum queue takes a few more than its limit
            number += 1
            refused = await submit(url, "x", x_lane_name="batch", idempotency_key=f"b-{number}")
            full = refused.status

        assert (refused.status, refused.headers["content-type"]) == (529, "application/problem+json")
        assert int(refused.headers["retry-after"]) > 0
        assert (await call("GET", f"{url}/v1/requests/b-{number}")).status == 404
        waits = await call("GET", f"{url}/v1/requests/b-1")
        assert (waits["status"], waits["lane"]) == ("queued", "batch")


async def test_a_revoked_key_is_refused_after_a_restart_and_what_it_submitted_ends(vhost: Vhost) -> None:
    shop = {hash_of(SHOP): {"tenant": "shop"}}
    user = urlsplit(vhost.amqp_url).username
    async with serving(vhost.amqp_url, speakers=(user,)) as worker:
        async with gate(worker.settings, keys={hash_of(CRM): {"tenant": "crm"}, **shop}) as url:
            submitted = await submit(url, "[[held]] revoked", x_api_key=CRM)
            await worker.api.until(lambda: worker.api.running == 1)
        async with gate(worker.settings, keys=shop) as url:
            assert (await submit(url, x_api_key=CRM)).status == 401
            assert (await call("GET", url + submitted["status_url"], x_api_key=CRM)).status == 401
            assert (await submit(url, x_api_key=SHOP)).status == 202
            worker.api.release("revoked")
            await worker.api.until(lambda: worker.api.running == 0)
        assert [each.outcome for each in worker.calls("revoked")] == ["ok"]
