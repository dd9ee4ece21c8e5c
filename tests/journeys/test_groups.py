"""Groups: requests that belong together, over AMQP and HTTP."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lanekeeper import Client, Final, Group, InvalidArgument, NotEnded, Problem
from lanekeeper.groups import Outcome
from lanekeeper.sync import Client as SyncClient
from service.cli import main
from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.endpoint import endpoint
from tests.support.gate import call, gate
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

KEYS = {
    hash_of("lane-crm"): {"tenant": "crm", "name": "crm"},
    hash_of("lane-other"): {"tenant": "other"},
    hash_of("lane-operator"): {"tenant": "desk", "operator": "look"},
}
BODY = {"model": "claude-haiku-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


async def ended(url: str, id: str, **headers: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def has_ended() -> bool:
        nonlocal found
        found = (await call("GET", f"{url}/v1/groups/{id}", **headers)).body
        return bool(found.get("status") == "ended")

    await until(has_ended, within_s=20)
    return found


async def results(url: str, id: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/groups/{id}/results") as got:
        return [json.loads(line) for line in (await got.text()).splitlines()]


async def test_requests_of_amqp_and_http_are_one_group_with_one_end(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, Client(vhost.amqp_url) as client:
        group = {"x-lane-group": "night-1"}
        last = {**group, "x-lane-group-size": 4}
        await client.publish(BODY, key="normal.a.b", message_id="k-1", headers=group)
        await client.publish({"no": "request"}, key="normal.a.b", message_id="k-2", headers=last)
        posted = await call("POST", f"{url}/v1/requests", BODY, idempotency_key="k-3", **group)
        assert posted.status == 202
        answered = await call("POST", f"{url}/v1/messages", BODY, idempotency_key="k-4", **group)
        assert answered.status == 200

        found = await ended(url, "night-1")

        assert found["counts"] == {"in_progress": 0, "completed": 3, "failed": 1, "cancelled": 0}
        assert found["size"] == 4
        assert found["ended_at"] >= found["created_at"]
        by_id = {each["id"]: each for each in await results(url, "night-1")}
        assert by_id.keys() == {"k-1", "k-2", "k-3", "k-4"}
        assert by_id["k-2"]["problem"]["code"] == "invalid_request"
        assert by_id["k-4"]["result"] == answered.body


async def test_a_group_shows_how_far_it_is_and_its_cancellation_reaches_what_comes_later(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url:
        group = {"x-lane-group": "g", "x-lane-group-size": "3"}
        answered = await call("POST", f"{url}/v1/messages", BODY, idempotency_key="k-1", **group)
        assert answered.status == 200
        later = {"x-lane-delay-ms": "600000"}
        await call("POST", f"{url}/v1/requests", BODY, idempotency_key="k-2", **group, **later)
        found = (await call("GET", f"{url}/v1/groups/g")).body
        assert found["counts"] == {"in_progress": 2, "completed": 1, "failed": 0, "cancelled": 0}
        assert found["status"] == "in_progress"
        assert "predicted_end_at" in found
        assert [each["id"] for each in await results(url, "g")] == ["k-1"]

        cancelled = await call("DELETE", f"{url}/v1/groups/g")
        assert cancelled.status == 202
        assert cancelled.body["status"] == "cancelling"
        assert cancelled.body["counts"]["cancelled"] == 1
        await call("POST", f"{url}/v1/requests", BODY, idempotency_key="k-3", x_lane_delay_ms="1500", **group)
        assert (await ended(url, "g"))["counts"]["cancelled"] == 2

        assert (await call("DELETE", f"{url}/v1/groups/g")).status == 200
        assert len(worker.api.calls) == 1


async def test_a_group_is_its_tenants(vhost: Vhost) -> None:
    async with serving(vhost, speakers=(vhost.user,)) as worker, gate(worker, keys=KEYS) as url:
        group, mine = {"x-lane-group": "g", "x-lane-group-size": "1"}, {"x_api_key": "lane-crm"}
        await call("POST", f"{url}/v1/messages", BODY, idempotency_key="k-1", **group, **mine)
        batch = {"requests": [{"custom_id": "a", "params": BODY}]}
        made = (await call("POST", f"{url}/v1/messages/batches", batch, x_lane_name="normal", **mine)).body

        assert (await ended(url, made["id"], **mine))["counts"]["completed"] == 1
        for path in (f"/v1/groups/{made['id']}", "/v1/groups/g"):
            assert (await call("GET", url + path, x_api_key="lane-other")).status == 404
            assert (await call("GET", f"{url}{path}?tenant=crm", x_api_key="lane-other")).status == 403
            seen = await call("GET", f"{url}{path}?tenant=crm", x_api_key="lane-operator")
            assert seen.body["counts"]["completed"] == 1
            assert (await call("GET", f"{url}{path}/results?tenant=crm", x_api_key="lane-operator")).status == 403
            assert (await call("DELETE", f"{url}{path}?tenant=crm", x_api_key="lane-operator")).status == 403
        batches = (await call("GET", f"{url}/v1/messages/batches", **mine)).body["data"]
        assert [each["id"] for each in batches] == [made["id"]]


async def test_a_key_lists_its_own_groups_and_an_operator_those_of_all_tenants(vhost: Vhost, capfd: Any) -> None:
    keys = {
        **KEYS,
        hash_of("lane-crm-2"): {"tenant": "crm", "name": "crm-2"},
        hash_of("lane-acts"): {"tenant": "desk", "operator": "act"},
    }
    async with serving(vhost, speakers=(vhost.user,)) as worker, gate(worker, keys=keys) as url:

        async def listed(key: str, query: str = "") -> list[dict[str, Any]]:
            answered = await call("GET", f"{url}/v1/groups{query}", x_api_key=key)
            assert answered.status == 200, answered.body
            found: list[dict[str, Any]] = answered.body["groups"]
            return found

        async def ids(key: str, query: str = "") -> list[str]:
            return [each["id"] for each in await listed(key, query)]

        batch = {"requests": [{"custom_id": "a", "params": BODY}]}
        mine = {"x_api_key": "lane-crm"}
        made = (await call("POST", f"{url}/v1/messages/batches", batch, x_lane_name="normal", **mine)).body["id"]
        await ended(url, made, **mine)
        later = {"x-lane-group-size": "2", "x-lane-delay-ms": "600000"}
        for number, (key, id) in enumerate((("lane-crm", "later"), ("lane-other", "later"))):
            await call(
                "POST",
                f"{url}/v1/requests",
                BODY,
                idempotency_key=f"k-{number}",
                x_lane_group=id,
                x_api_key=key,
                **later,
            )

        assert await ids("lane-crm") == ["later", made]
        assert await ids("lane-crm-2") == ["later"], "a batch is its key's"
        assert [each["status"] for each in await listed("lane-crm")] == ["in_progress", "ended"]
        assert "tenant" not in (await listed("lane-crm"))[0]
        (first,) = await listed("lane-operator", "?limit=1")
        assert (first["tenant"], first["id"], first["lane"], first["size"]) == ("other", "later", "normal", 2)
        assert await ids("lane-operator") == ["later", "later", made]
        assert await ids("lane-operator", "?status=in_progress&status=cancelling") == ["later", "later"]
        assert await ids("lane-operator", "?tenant=crm&status=ended") == [made]
        paged: list[str] = []
        query = "?limit=1"
        while True:
            page = (await call("GET", f"{url}/v1/groups{query}", x_api_key="lane-operator")).body
            paged += [f"{each['tenant']}/{each['id']}" for each in page["groups"]]
            if page["next"] is None:
                break
            query = f"?limit=1&after={page['next']}"
        assert paged == ["other/later", "crm/later", f"crm/{made}"]
        for wrong, status in (
            ("?status=done", 400), ("?limit=0", 400), ("?after=x", 400), ("?lane=batch", 400), ("?tenant=other", 403),
        ):  # fmt: skip
            assert (await call("GET", f"{url}/v1/groups{wrong}", **mine)).status == status, wrong

        async def command(key: str, *line: str) -> tuple[int, str]:
            sets = [word for given in (f"client.url={url}", f"client.api_key={key}") for word in ("--set", given)]
            code = await asyncio.to_thread(main.run, ["batch", *line, *sets])
            return code, capfd.readouterr().out

        code, told = await command("lane-operator", "list", "--limit", "1")
        assert code == 0
        assert "tenant other  later in_progress: 0 of 2 requests have ended" in told
        assert "the next page: --after " in told
        assert f"{made} ended: 1 of 1 requests have ended (1 succeeded)" in (await command("lane-crm", "list"))[1]
        assert (await command("lane-acts", "cancel", "later", "--tenant", "other"))[0] == 0
        assert (await ids("lane-operator", "?status=cancelling")) == ["later"]

        await call("DELETE", f"{url}/v1/messages/batches/{made}", **mine)
        assert await ids("lane-crm") == ["later"]
        assert (await call("GET", f"{url}/v1/groups/{made}", **mine)).status == 404, "it was removed"


async def test_its_end_is_told_by_one_event_and_one_webhook_after_the_last_request(vhost: Vhost) -> None:
    async with (
        endpoint() as hook,
        serving(vhost, webhooks=hook.settings()) as worker,
        gate(worker) as url,
        requester(vhost.amqp_url) as app,
    ):
        await app.read_events()
        group = {"x-lane-group": "g", "x-lane-group-size": "2", "x-lane-webhook": hook.url()}
        await call("POST", f"{url}/v1/messages", BODY, idempotency_key="k-1", **group)
        later = {"x-lane-delay-ms": "1500"}
        await call("POST", f"{url}/v1/requests", BODY, idempotency_key="k-2", **group, **later)
        await until(lambda: len(worker.api.calls) == 2)
        await until(lambda: hook.posts and "group" in app.events_of("g"))
        batch = {"requests": [{"custom_id": "a", "params": BODY}]}
        headers = {"x_lane_name": "normal", "x_lane_webhook": hook.url()}
        made = (await call("POST", f"{url}/v1/messages/batches", batch, **headers)).body
        await until(lambda: len(hook.posts) == 2)

        first, second = hook.posts
        first.verify()
        assert (first.id, first.json["type"]) == ("g", "group")
        assert first.json["counts"] == {"in_progress": 0, "completed": 2, "failed": 0, "cancelled": 0}
        assert first.json == {"type": "group", **(await call("GET", f"{url}/v1/groups/g")).body}
        assert second.id == made["id"]
        assert app.events_of("g").count("group") == 1


async def test_a_routing_key_as_long_as_may_be_ends_no_worker_and_its_webhooks_are_posted(vhost: Vhost) -> None:
    async with endpoint() as hook, serving(vhost, webhooks=hook.settings()), requester(vhost) as app:
        webhook = {"x-lane-webhook": hook.url()}
        alone = await app.publish({"prompt": "x"}, key="x" * 250, message_id="k-1", headers=webhook)
        group = {"x-lane-group": "g", "x-lane-group-size": "1", **webhook}
        grouped = await app.publish({"prompt": "x"}, key="é" * 127, message_id="k-2", headers=group)

        assert [(await app.final(each)).code for each in (alone, grouped)] == ["unroutable"] * 2
        await until(lambda: {each.id for each in hook.posts} == {"k-1", "g"}, within_s=20)


@pytest.mark.parametrize("transport", ["amqp", "http"])
async def test_the_client_publishes_many_and_follows_them_as_one(vhost: Vhost, transport: str) -> None:
    async with (
        serving(vhost) as worker,
        gate(worker) as url,
        Client(url if transport == "http" else vhost.amqp_url) as client,
    ):
        bodies = {"a": {"prompt": "one"}, "b": {"prompt": "two [[held]]"}, "c": {"prompt": "[[fault: invalid]]"}}
        group = await client.publish_many(bodies, key="normal.docs.night", group="night-1")
        again = await client.publish_many(bodies, key="normal.docs.night", group="night-1")
        assert again.id == group.id == "night-1"

        came: dict[str, Outcome] = {}
        async with aclosing(group.results()) as results:
            async for id, outcome in results:
                came[id] = outcome
                if len(came) == 2:  # those that have ended do not wait for the one that runs
                    progress = await client.group("night-1").progress()
                    assert (progress.size, progress.in_progress, progress.completed, progress.failed) == (
                        3,
                        1,
                        1,
                        1,
                    )
                    worker.api.release()
        in_order = [id async for id, _ in group.results(in_order=True)]
        found = await client.results(["night-1.a", "night-1.c", "nobody"])

        assert isinstance(came["night-1.b"], Final)
        assert "two" in came["night-1.b"].text
        assert isinstance(problem := came["night-1.c"], Problem)
        assert problem.code == "provider_rejected"
        assert sorted(in_order) == sorted(came) == ["night-1.a", "night-1.b", "night-1.c"]
        assert isinstance(found["night-1.a"], Final)
        assert isinstance(found["night-1.c"], Problem)
        assert isinstance(found["nobody"], NotEnded)
        assert (await group.progress()).status == "ended"
        assert len(worker.api.calls) == 3

        later = await client.publish_many([{"prompt": "x"}] * 3, key="normal.docs.night", delay_s=600)

        await until(lambda: _are_delayed(client, later, 3))
        assert (await later.cancel()).cancelled == 3
        assert [type(each) async for _, each in later.results()] == [Problem] * 3
        assert (await client.group("nobody").progress()).status == "unknown"

        bad = {"ok": {"prompt": "x"}, "a b": {"prompt": "x"}}
        with pytest.raises(InvalidArgument, match="the name 'a b'"):
            await client.publish_many(bad, key="normal.docs.night", group="h")
        after = await client.publish_many([{"prompt": "x"}], key="normal.docs.night")
        assert [type(each) async for _, each in after.results()] == [Final]
        assert (await client.group("h").progress()).status == "unknown", "none was published"


async def _are_delayed(client: Client, group: Group, count: int) -> bool:
    states = await client.results([f"{group.id}.{number}" for number in range(count)])
    return all(isinstance(each, NotEnded) and each.due_at is not None for each in states.values())


async def test_many_large_results_come_by_few_messages(vhost: Vhost) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        group = await client.publish_many([{"prompt": "x" * 100_000}] * 40, key="normal.docs.night")
        ids = [f"{group.id}.{number}" for number in range(40)]
        outcomes = {id: outcome async for id, outcome in group.results()}
        found = await client.results([*ids, *(f"nobody-{number}" for number in range(200))])

        assert sorted(outcomes) == sorted(ids)
        assert sum(isinstance(each, Final) for each in found.values()) == 40
        assert sum(isinstance(each, NotEnded) for each in found.values()) == 200
        assert len(worker.api.calls) == 40


async def test_a_program_without_an_event_loop_follows_a_group(vhost: Vhost) -> None:
    def followed() -> list[str]:
        with SyncClient(vhost.amqp_url) as client:
            group = client.publish_many([{"prompt": "x"}] * 5, key="normal.docs.night", group="g")
            ids = [id for id, _ in group.results()]
            assert group.progress().completed == len(client.results(ids)) == 5
            return ids

    async with serving(vhost):
        assert sorted(await asyncio.to_thread(followed)) == [f"g.{number}" for number in range(5)]


async def test_the_commands_for_batches_follow_groups_too(vhost: Vhost, tmp_path: Path, capfd: Any) -> None:
    async def command(url: str, *line: str) -> int:
        return await asyncio.to_thread(main.run, ["batch", *line, "--set", f"client.url={url}"])

    async with serving(vhost) as worker, gate(worker) as url, Client(vhost.amqp_url) as client:
        await client.publish_many([{"prompt": "x"}] * 3, key="normal.docs.night", group="night-1")
        await ended(url, "night-1")
        later = await client.publish_many([{"prompt": "x"}], key="normal.docs.night", group="later", delay_s=600)
        await until(lambda: _are_delayed(client, later, 1))

        assert await command(url, "status", "night-1", "--wait") == 0
        assert "night-1 ended: 3 of 3 requests have ended (3 succeeded)" in capfd.readouterr().out
        assert await command(url, "results", "night-1", "--output", str(tmp_path / "results")) == 0
        assert len((tmp_path / "results").read_text().splitlines()) == 3
        assert await command(url, "cancel", "later") == 0
        assert "later ended: 1 of 1 requests have ended (1 canceled)" in capfd.readouterr().out
        assert await command(url, "status", "nobody") == 1
        assert "group 'nobody' is not known" in capfd.readouterr().err


async def test_a_size_needs_its_group(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url:
        for headers in ({"x-lane-group-size": "3"}, {"x-lane-group": "g", "x-lane-group-size": "100001"}):
            refused = await call("POST", f"{url}/v1/requests", BODY, **headers)
            assert refused.status == 400
            assert "x-lane-group-size" in refused.body["detail"]
        assert (await call("GET", f"{url}/v1/groups/g")).status == 404
