"""Our client with the address of a gateway: what it returns and raises is what it does over AMQP."""

import asyncio
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import pytest

from lanekeeper import AccessRefused, Client, ControlRefused, Final, NotEnded, Part, Problem, PublishRefused
from lanekeeper.replies import Final as Reply
from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving
from tests.support.waiting import until

KEY = "normal.tests.remote"
SLOW = {"prompt": "[[latency: 60s]] slow, word by word"}
CRM, SHOP = "lane-crm", "lane-shop"


async def outcomes(client: Client, ids: str) -> list[Any]:
    """What the calls of a client come to; `ids`: with what the requests' ids begin."""

    def told(final: Reply) -> tuple[Any, ...]:
        return final.text, final.lane, final.model, final.provider, final.attempt

    final = await client.request({"prompt": "three rivers"}, key=KEY, message_id=f"{ids}-1")
    again = await client.request({"prompt": "three rivers"}, key=KEY, message_id=f"{ids}-1")
    parts = [each async for each in client.stream({"prompt": "three rivers"}, key=KEY, message_id=f"{ids}-2")]
    id = await client.publish({"prompt": "later"}, key=KEY, message_id=f"{ids}-3")
    later = await client.result(id, wait_s=60)
    failed: list[Any] = []
    for body, named in (({"prompt": ""}, f"{ids}-4"), ({"prompt": "other"}, f"{ids}-1")):
        with pytest.raises(Problem) as problem:
            await client.request(body, key=KEY, message_id=named)
        failed.append((problem.value.code, problem.value.status))
    with pytest.raises(NotEnded) as unknown:
        await client.result("never")
    return [
        told(final), told(later), again.body == final.body, again.request_id == final.request_id,
        [(each.kind, each.seq, each.text) if isinstance(each, Part) else told(each) for each in parts],
        failed, unknown.value.status, await client.cancel(f"{ids}-1"),
    ]  # fmt: skip


async def test_everything_comes_to_the_same_as_over_amqp(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url) as worker,
        gate(worker.settings) as url,
        Client(vhost.amqp_url) as over_amqp,
        Client(url) as over_http,
    ):
        assert await outcomes(over_http, "h") == await outcomes(over_amqp, "a")


async def test_a_failed_attempt_gives_a_restart_and_the_parts_after_it_are_the_answer(vhost: Vhost) -> None:
    prompt = "one two three four five six seven eight [[fault: cut x1]]"
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url, Client(url) as client:
        said = ""
        async for each in client.stream({"prompt": prompt}, key=KEY):
            if isinstance(each, Part):
                said = "" if each.kind == "restart" else said + each.text
        assert isinstance(each, Final)
        assert said == each.text
        assert len(worker.calls("one two")) == 2


async def test_a_gateway_that_restarts_loses_neither_request_nor_part(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker:
        async with gate(worker.settings) as url:
            client = Client(url)
            await client.__aenter__()
            whole = asyncio.create_task(client.request({"prompt": "[[latency: 4s]] whole"}, key=KEY))
            stream = client.stream({"prompt": "[[latency: 4s]] a story told in many words, one by one"}, key=KEY)
            came = [await anext(stream)]
            await worker.api.until(lambda: len(worker.api.calls) == 2)
        async with gate(worker.settings, port=urlsplit(url).port or 0), aclosing(stream), client:
            came += [each async for each in stream]

            *parts, last = came
            assert [each.seq for each in parts if isinstance(each, Part)] == list(range(len(parts)))
            assert isinstance(last, Final)
            assert "".join(each.text for each in parts if isinstance(each, Part)) == last.text
            assert (await whole).text.endswith("whole")
            assert len(worker.api.calls) == 2


@pytest.mark.parametrize("how", ["request", "stream"])
async def test_a_caller_that_leaves_cancels_its_request_at_the_provider(vhost: Vhost, how: str) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url, Client(url) as client:
        if how == "request":
            asked = asyncio.create_task(client.request(SLOW, key=KEY, message_id="a-1"))
            await worker.api.until(lambda: worker.api.running == 1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        else:
            async with aclosing(client.stream(SLOW, key=KEY, message_id="a-1")) as replies:
                async for _ in replies:
                    break

        await worker.api.until(lambda: worker.api.running == 0)
        assert [call.outcome for call in worker.calls("slow")] == ["client_gone"]
        with pytest.raises(Problem, match="cancelled"):
            await client.result("a-1", wait_s=30)


async def test_a_request_that_waits_is_cancelled_by_its_id(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url, Client(url) as client:
        await client.publish({"prompt": "delayed"}, key=KEY, message_id="a-1", delay_s=600)

        async def waits() -> bool:
            with pytest.raises(NotEnded) as waiting:
                await client.result("a-1")
            return waiting.value.due_at is not None and waiting.value.status == "waiting"

        await until(waits)
        assert await client.cancel("a-1") in ("recorded", "unseen")
        with pytest.raises(Problem, match="cancelled"):
            await client.result("a-1", wait_s=30)
        assert not worker.calls("delayed")


async def test_a_key_gives_its_own_requests_alone(vhost: Vhost) -> None:
    keys = {hash_of(CRM): {"tenant": "crm", "lanes": ["normal"]}, hash_of(SHOP): {"tenant": "shop"}}
    user = urlsplit(vhost.amqp_url).username
    async with (
        serving(vhost.amqp_url, speakers=(user,)) as worker,
        gate(worker.settings, keys=keys) as url,
        Client(url, api_key=CRM) as crm,
        Client(url, api_key=SHOP) as shop,
    ):
        assert (await crm.request({"prompt": "mine"}, key=KEY, message_id="a-1")).text == "echo: mine"
        with pytest.raises(NotEnded, match="unknown"):
            await shop.result("a-1")
        with pytest.raises(ControlRefused):
            await shop.cancel("a-1")
        with pytest.raises(AccessRefused, match="this key allows normal"):
            await crm.publish({"prompt": "x"}, key="critical.tests.remote")
        with pytest.raises(AccessRefused, match="invalid x-api-key"):
            async with Client(url, api_key="lane-nobody"):
                pass


async def test_a_full_lane_is_refused_with_how_long_to_wait(vhost: Vhost) -> None:
    lanes = {"batch": {"max_length": 2}}
    async with (
        serving(vhost.amqp_url, works=("critical",), lanes=lanes) as worker,
        gate(worker.settings) as url,
        Client(url) as client,
    ):

        async def fill() -> None:
            for n in range(50):  # a quorum queue notices late that it is full
                await client.publish({"prompt": f"{n}"}, key="batch.tests.remote")

        with pytest.raises(PublishRefused, match="the lane is full") as refused:
            await fill()
        assert refused.value.retry_after_s > 0
