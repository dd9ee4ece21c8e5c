"""Our client with the address of a gateway: what it returns and raises is what it does over AMQP."""

import asyncio
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import pytest

from lanekeeper import Client, Final, NotEnded, Part, Problem
from lanekeeper.replies import Final as Reply
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.serving import serving

KEY = "normal.tests.remote"
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
