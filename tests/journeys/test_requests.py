"""Requests that are submitted by HTTP and asked for later: polled, waited for, followed by Server-Sent Events and on a
WebSocket from any number on and on any gateway, cancelled, and nobody else's."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from consumers.slots import activity
from lanekeeper import Client
from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.gate import Reader, call, gate, submit
from tests.support.serving import HeldProvider, serving
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
    async with serving(vhost) as worker, gate(worker) as url:
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
    async with serving(vhost) as worker, gate(worker) as url:
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
    async with serving(vhost, lanes=lanes) as worker, gate(worker) as url:
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
    async with serving(vhost) as worker:
        settings = worker.settings
    async with gate(settings) as url:
        submitted = await submit(url, "never", x_lane_name="batch")
        found = await call("GET", url + submitted["status_url"])
        assert (found["status"], found["position"]) == ("queued", 0)
        assert "predicted_start_at" not in found.body

        cancelled = await call("DELETE", url + submitted["status_url"])
        assert (cancelled.status, cancelled["outcome"]) == (202, "unseen")
        async with serving(vhost) as worker:
            ended = await call("GET", f"{url}{submitted['status_url']}?wait=60s")
            assert ended["status"] == "cancelled"
            assert not worker.calls("never")


async def test_a_gateway_with_another_store_than_its_workers_logs_it(vhost: Vhost, tmp_path: Path) -> None:
    async with serving(vhost) as worker:
        other = worker.settings.model_copy(update={"store_url": SecretStr(f"sqlite:///{tmp_path}/other.sqlite")})
        with capture_logs() as logs:
            async with gate(other) as url:
                submitted = await submit(url, "lost to sight")
                await until(lambda: "gateway.other_store" in [each["event"] for each in logs])
                assert await status(url, submitted["id"]) == "queued"


async def test_the_same_key_is_the_same_request_and_with_another_body_a_conflict(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, gate(worker) as other:
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
    async with serving(vhost, lanes=lanes) as worker, gate(worker) as url:
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
    async with serving(vhost, speakers=(user,)) as worker, gate(worker, keys=keys) as url:
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
    async with serving(vhost, lanes=lanes, works=("critical",)) as worker, gate(worker) as url:
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
    async with serving(vhost, speakers=(user,)) as worker:
        async with gate(worker, keys={hash_of(CRM): {"tenant": "crm"}, **shop}) as url:
            submitted = await submit(url, "[[held]] revoked", x_api_key=CRM)
            await worker.api.until(lambda: worker.api.running == 1)
        async with gate(worker, keys=shop) as url:
            assert (await submit(url, x_api_key=CRM)).status == 401
            assert (await call("GET", url + submitted["status_url"], x_api_key=CRM)).status == 401
            assert (await submit(url, x_api_key=SHOP)).status == 202
            worker.api.release("revoked")
            await worker.api.until(lambda: worker.api.running == 0)
        assert [each.outcome for each in worker.calls("revoked")] == ["ok"]


async def test_a_streams_life_its_parts_and_its_end_come_in_order(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url:
        submitted = await submit(url, "a story in several pieces", stream=True)
        reader = Reader()
        await reader.read(url + submitted["events_url"])

        assert reader.kinds[:3] == ["queued", "started", "event"]
        assert reader.kinds[-1] == "completed"
        assert [each.id for each in reader.found] == list(range(1, len(reader.found) + 1))
        assert reader.text == "echo: a story in several pieces"
        final = reader.found[-1].data
        assert final["result"]["content"][0]["text"] == reader.text
        found = await call("GET", url + submitted["status_url"])
        assert found.body == final


async def test_what_is_read_again_from_a_number_lacks_nothing_and_repeats_nothing(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url:
        submitted = await submit(url, "read it again", stream=True)
        whole = Reader()
        await whole.read(url + submitted["events_url"])
        for at, event in enumerate(whole.found[:-1]):
            rest = Reader()
            await rest.read(url + submitted["events_url"], last_event_id=str(event.id))
            assert rest.found == whole.found[at + 1 :]

        await whole.read(url + submitted["events_url"])
        assert whole.status == 204  # a browser asks no more
        refused = await call("GET", url + submitted["events_url"], last_event_id="abc")
        assert (refused.status, refused["code"]) == (400, "invalid_request")
        assert (await call("GET", f"{url}/v1/requests/nobodys/events")).status == 404


async def test_a_retry_is_told_and_begins_the_answer_again(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url:
        submitted = await submit(url, "[[fault: cut x1]] a longer story in many pieces", stream=True)
        reader = Reader()
        await reader.read(url + submitted["events_url"])

        assert reader.kinds.count("started") == 2
        restart = len(reader.kinds) - 1 - reader.kinds[::-1].index("restart")
        assert "retrying" in reader.kinds[:restart]
        assert "event" in reader.kinds[restart:]
        after = Reader()
        after.found = reader.found[restart:]
        assert after.text == reader.found[-1].data["result"]["content"][0]["text"]


async def test_an_unstreamed_request_tells_its_life_and_its_end(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker, ping_every_s=0.1) as url:
        submitted = await submit(url, "[[held]] whole")
        reader = Reader()
        reading = asyncio.create_task(reader.read(url + submitted["events_url"]))
        await until(lambda: reader.comments >= 3)
        worker.api.release()
        await reading

        assert reader.kinds == ["queued", "started", "completed"]


async def test_a_request_that_is_published_over_amqp_without_reply_to_is_followed_too(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url:
        async with Client(vhost.amqp_url) as client:
            id = await client.publish(
                {"prompt": "by another way", "stream": True},
                key="critical.tests.follow",
                headers={"x-lane-stream": True},
            )
            await client.result(id, wait_s=30)
        reader = Reader()
        await reader.read(f"{url}/v1/requests/{id}/events")

        assert reader.kinds[0] == "started"
        assert reader.text == "echo: by another way"
        assert json.dumps(reader.found[-1].data["lane"]) == '"critical"'


LONG = "a word " * 30


class Socket:
    """A connection, and what came on it."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.found: list[dict[str, Any]] = []

    async def say(self, type: str, **fields: Any) -> None:
        await self.ws.send_json({"type": type, **fields})

    async def submit(self, prompt: str, *, stream: bool = True, **fields: Any) -> None:
        body = {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": prompt}]}
        await self.say("submit", body={**body, "stream": stream}, **fields)

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                found: dict[str, Any] = json.loads(await self.ws.receive_str())
                self.found.append(found)
                if holds(found):
                    return found

    async def ends(self, *ids: str) -> None:
        """Read until all these requests have ended."""
        missing = set(ids)
        while missing:
            found = await self.until(lambda each: each.get("kind") in ("completed", "failed", "cancelled"))
            missing -= {found["id"]}

    def entries(self, id: str) -> list[dict[str, Any]]:
        return [each for each in self.found if each["type"] == "entry" and each["id"] == id]

    def text(self, id: str) -> str:
        said = [each["data"]["delta"].get("text", "") for each in self.entries(id) if "delta" in each["data"]]
        return "".join(said)


@asynccontextmanager
async def socket(url: str, **headers: str) -> AsyncIterator[Socket]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/ws", headers=named) as ws:
        yield Socket(ws)


async def test_many_requests_on_one_connection_each_get_their_own_entries_in_order(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, socket(url) as own:
        ids = [f"w-{number}" for number in range(20)]
        for id in ids:
            await own.submit(f"request {id}.", id=id, ref=f"ref {id}", stream=id != "w-7")
        await own.ends(*ids)

        for id in ids:
            entries = own.entries(id)
            assert [each["number"] for each in entries] == list(range(1, len(entries) + 1))
            assert entries[-1]["data"]["result"]["content"][0]["text"] == f"echo: request {id}."
            assert own.text(id) == ("" if id == "w-7" else f"echo: request {id}.")
        refs = {each["ref"]: each["id"] for each in own.found if each["type"] == "submitted"}
        assert refs == {f"ref {id}": id for id in ids}


async def test_a_request_is_followed_on_another_connection_of_another_gateway_from_where_it_was(vhost: Vhost) -> None:
    async with (
        HeldProvider(parts=2) as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        gate(worker) as second,
    ):
        async with gate(worker) as first, socket(first) as own:
            await own.submit(LONG, id="long")
            await own.until(lambda each: each.get("number") == 6)
        async with socket(second) as other:
            await other.say("subscribe", id="long", after=6)
            await other.until(lambda each: each.get("number") == 7)
            provider.go_on()
            await other.ends("long")

        entries = own.entries("long") + other.entries("long")
        assert [each["number"] for each in entries] == list(range(1, len(entries) + 1))
        assert own.text("long") + other.text("long") == entries[-1]["data"]["result"]["content"][0]["text"]


async def test_a_request_is_cancelled_and_one_that_is_left_is_followed_no_more(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, socket(url) as own:
        await own.submit(SLOW, id="slow", subscribe=False)
        submitted = await submit(url, "[[held]] left")
        await own.say("subscribe", id=submitted["id"])
        await own.until(lambda each: each["type"] == "entry")
        await own.say("unsubscribe", id=submitted["id"])
        await own.until(lambda each: each["type"] == "unsubscribed")
        await worker.api.until(lambda: worker.api.running == 2)
        worker.api.release("left")
        await call("GET", f"{url}{submitted['status_url']}?wait=30s")
        await own.say("cancel", id="slow", ref="c")
        cancelling = await own.until(lambda each: each["type"] == "cancelling")
        assert (cancelling["ref"], cancelling["id"]) == ("c", "slow")
        assert cancelling["outcome"] in ("told", "recorded")
        await worker.api.until(lambda: worker.api.running == 0)

        await own.say("subscribe", id="slow")
        await own.ends("slow")
        assert own.entries("slow")[-1]["kind"] == "cancelled"
        assert own.entries(submitted["id"])[-1]["kind"] != "completed"


@pytest.mark.parametrize(
    ("rubbish", "code"), [(b"\x00\x01", 1003), ("nonsense", 1007), ('{"type": "shout"}', 1008), ("x" * 1_100_000, 1009)]
)
async def test_rubbish_closes_the_connection_with_a_reason(vhost: Vhost, rubbish: str | bytes, code: int) -> None:
    async with serving(vhost) as worker, gate(worker) as url, socket(url) as own:
        if isinstance(rubbish, bytes):
            await own.ws.send_bytes(rubbish)
        else:
            await own.ws.send_str(rubbish)
        closed = await own.ws.receive()

        assert closed.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        assert own.ws.close_code == code
        assert closed.extra or code == 1009  # of the library, without a reason


async def test_origin_and_key_are_checked_at_the_upgrade(vhost: Vhost) -> None:
    keys = {hash_of("lane-crm"): {"tenant": "crm"}}
    async with serving(vhost) as worker, gate(worker) as url:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with socket(url, origin="https://evil.example"):
                pass
        assert refused.value.status == 403
        assert (await call("GET", f"{url}/v1/ws")).status == 426
        async with gate(worker, keys=keys) as guarded:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with socket(guarded):
                    pass
            assert refused.value.status == 401
