"""Requests that are followed by Server-Sent Events: in order, from any number on, on any gateway."""

import asyncio
import json

from lanekeeper import Client
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.http_calls import Reader, call, submit
from tests.support.serving import serving
from tests.support.waiting import until

LONG = f"[[latency: 10s]] {'a word ' * 30}"


async def test_a_streams_life_its_parts_and_its_end_come_in_order(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
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
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
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
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        submitted = await submit(url, "[[fault: cut x1]] a longer story in many pieces", stream=True)
        reader = Reader()
        await reader.read(url + submitted["events_url"])

        assert reader.kinds.count("started") == 2
        restart = reader.kinds.index("restart")
        assert "retrying" in reader.kinds[:restart]
        assert "event" in reader.kinds[restart:]
        after = Reader()
        after.found = reader.found[restart:]
        assert after.text == reader.found[-1].data["result"]["content"][0]["text"]


async def test_an_unstreamed_request_tells_its_life_and_its_end(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings, ping_every_s=0.1) as url:
        submitted = await submit(url, "[[held]] whole")
        reader = Reader()
        reading = asyncio.create_task(reader.read(url + submitted["events_url"]))
        await until(lambda: reader.comments >= 3)
        worker.api.release()
        await reading

        assert reader.kinds == ["queued", "started", "completed"]


async def test_a_request_that_is_published_over_amqp_without_reply_to_is_followed_too(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
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
