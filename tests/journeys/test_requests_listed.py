"""An operator lists the requests of all tenants, cancels those that wait, and runs failed ones again, over HTTP and by
the command line."""

from typing import Any

import aiohttp

from consumers.state.base import Identity
from service.gateway.access import hash_of
from tests.journeys.test_dead_letters import NEWEST, USER, request
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


async def test_an_operator_lists_cancels_and_replays_requests_by_a_filter(vhost: Vhost) -> None:
    keys = {
        hash_of(right): {"tenant": USER, "operator": right, "name": f"{right}-key"} for right in ("no", "look", "act")
    }
    async with (
        serving(vhost, **NEWEST) as worker,
        gate(worker, keys=keys) as url,
        requester(vhost) as app,
        aiohttp.ClientSession() as session,
    ):

        async def call(right: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
            async with session.request(
                method, f"{url}/v1/requests{path}", headers={"x-api-key": right}, json=body
            ) as got:
                return got.status, await got.json(content_type=None)

        async def ids(query: str) -> list[str]:
            return [each["id"] for each in (await call("look", "GET", query))[1]["requests"]]

        for number in range(3):
            await app.ask(request(number, temperature=1), message_id=f"bad-{number}", key="normal.shop.ask")
        await app.ask(request(9), message_id="good", key="critical.web.ask")
        for number in range(2):
            await app.publish(
                request(number),
                message_id=f"later-{number}",
                key="batch.night.job",
                headers={"x-lane-delay-ms": 600_000},
            )
        await until(lambda: app.holds(3, "lane.dead"))

        async def both_wait() -> bool:
            return len(await ids("?status=waiting")) == 2

        await until(both_wait)

        assert sorted(await ids("?limit=2")) == ["later-0", "later-1"]
        assert await ids("?status=completed") == await ids("?lane=critical&app=web") == ["good"]
        found = (await call("look", "GET", "?status=failed&limit=2"))[1]
        assert [each["id"] for each in found["requests"]] == ["bad-2", "bad-1"]
        assert await ids(f"?status=failed&limit=2&after={found['next']}") == ["bad-0"]
        bad = found["requests"][0]
        assert (bad["lane"], bad["app"], bad["code"]) == ("normal", "shop", "provider_rejected")
        assert await ids(f"?cause={bad['cause']}") == ["bad-2", "bad-1", "bad-0"]
        (waiting, _) = (await call("look", "GET", "?status=waiting"))[1]["requests"]
        assert (waiting["status"], waiting["lane"]) == ("delayed", "batch")

        assert (await call("no", "GET", ""))[0] == 403
        assert (await call("look", "POST", "/cancel", {"lane": "batch"}))[0] == 403
        wrong: list[Any] = [{}, {"lanes": "batch"}, {"status": "done"}, {"since": "yesterday"}, {"lane": []}, 5]
        for body in wrong:
            assert (await call("act", "POST", "/cancel", body))[0] == 400, body
        assert (await call("look", "GET", "?after=x"))[0] == 400

        assert (await call("act", "POST", "/cancel", {"lane": "batch", "dry_run": True}))[1]["matched"] == 2
        done = (await call("act", "POST", "/cancel", {"lane": "batch"}))[1]
        assert (done["cancelled"], done["left"]) == (2, 0)
        end = await worker.parts.store.find(Identity(bad["tenant"], "later-0"))
        assert end is not None
        assert end.completion is not None
        assert b"act-key" in end.completion.body
        assert sorted(await ids("?status=cancelled")) == ["later-0", "later-1"]

        chosen = {"cause": bad["cause"], "app": "shop"}
        dry = (await call("act", "POST", "/replay", {**chosen, "dry_run": True}))[1]
        assert (dry["failed"], dry["matched"], dry["replayed"]) == (3, 3, 0)
        done = (await call("act", "POST", "/replay", {**chosen, "edit": {"temperature": None}}))[1]
        assert (done["replayed"], done["left"]) == (3, 0)
        assert {each["id"] for each in done["requests"]} == {"bad-0", "bad-1", "bad-2"}

        async def all_completed() -> bool:
            return len(await ids("?status=completed&app=shop")) == 3

        await until(all_completed)
        assert await ids("?status=failed") == []
