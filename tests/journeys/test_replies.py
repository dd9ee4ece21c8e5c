"""Where replies go: only to queues that the requester may read. A requester that has gone is no error, and a full reply
queue occupies no slot: the reply is sent again later, and the result stays in the store."""

import asyncio
import json
import statistics
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import Got, Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until

BOUND = {"bound_to_user": True}


@pytest.fixture
def other(vhost: Vhost) -> Iterator[tuple[str, str]]:
    """Another user of the broker, with all permissions."""
    name = f"{vhost.name}-other"
    vhost.api("PUT", f"users/{name}", {"password": "secret", "tags": ""})
    vhost.api("PUT", f"permissions/{vhost.quoted}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    yield name, vhost.amqp_url.replace(f"{quote(vhost.user)}:{quote(vhost.password)}@", f"{name}:secret@")
    vhost.api("DELETE", f"users/{name}")


@pytest.mark.oldest_version
async def test_no_reply_goes_to_another_users_queue(vhost: Vhost, other: tuple[str, str]) -> None:
    """Neither to a durable queue nor to an exclusive one whose name is known."""
    name, url = other
    async with serving(vhost, reply_to=BOUND) as worker, requester(vhost) as victim, requester(url) as app:
        await victim.read_dead()
        await victim.channel.queue_declare("bank.answers", durable=True)
        await victim.channel.queue_declare(f"lane.reply.{vhost.user}", durable=True)
        theirs = (victim.reply_to, "bank.answers", f"lane.reply.{vhost.user}")
        for n, address in enumerate(theirs):
            for user in (name, None):
                await app.publish({"prompt": "deputy"}, reply_to=address, user_id=user, message_id=f"d-{n}-{user}")
                dead = await victim.buried(f"d-{n}-{user}")
                assert dead.headers["x-lane-dead-code"] == "forbidden_reply_to"
                assert "direct reply-to" in dead.headers["x-lane-dead-detail"]
        assert not worker.api.calls
        assert not victim.replies
        await until(lambda: victim.holds(0, *theirs[1:]))


@pytest.mark.oldest_version
async def test_a_reply_goes_to_the_users_own_queue_also_after_a_delay_and_a_retry(
    vhost: Vhost, other: tuple[str, str]
) -> None:
    name, url = other
    async with serving(vhost, reply_to=BOUND) as worker, requester(url) as app:
        own = f"lane.reply.{name}.eu"
        await app.channel.queue_declare(own, durable=True)
        body = {"prompt": "x [[fault: server_error x1]]"}
        await app.publish(body, reply_to=own, user_id=name, headers={"x-lane-delay-ms": 200})
        await until(lambda: app.depth(own))
        got = await app.channel.basic_get(own, no_ack=True)
        assert Got.of(got).headers["x-lane-attempt"] == 2
        assert worker.is_well


@pytest.mark.oldest_version
async def test_direct_reply_to_works_without_a_user_for_requests_and_control_messages(vhost: Vhost) -> None:
    async with serving(vhost, reply_to=BOUND), requester(vhost, direct=True) as app:
        assert (await app.ask({"prompt": "x"}, message_id="m-1")).status == "ok"
        assert (await app.control({"result": "m-1"}, key="result")).status == "ok"
        assert (await app.control({"cancel": "m-1"}, key="cancel")).json["outcome"] == "ended"


@pytest.mark.oldest_version
async def test_replies_to_a_speaker_are_bound_to_its_own_user(vhost: Vhost, other: tuple[str, str]) -> None:
    name, url = other
    speaks: dict[str, Any] = {"speakers": (name,), "reply_to": BOUND}
    async with serving(vhost, **speaks) as worker, requester(url) as gateway, requester(vhost) as app:
        await app.read_dead()
        for queue in (f"lane.reply.{name}", "lane.reply.shop"):
            await gateway.channel.queue_declare(queue, durable=True)
        said: dict[str, Any] = {"user_id": name, "headers": {"x-lane-tenant": "shop"}}
        await gateway.publish({"prompt": "x"}, reply_to=f"lane.reply.{name}", **said)
        await until(lambda: gateway.depth(f"lane.reply.{name}"))
        await gateway.publish({"prompt": "y"}, reply_to="lane.reply.shop", message_id="s-2", **said)
        assert (await app.buried("s-2")).headers["x-lane-dead-code"] == "forbidden_reply_to"
        assert len(worker.api.calls) == 1


@pytest.mark.oldest_version
async def test_forged_direct_reply_addresses_of_control_messages_affect_no_other_requester(vhost: Vhost) -> None:
    """Before RabbitMQ 4.3.5 each of them kills the connection that answers it."""
    async with serving(vhost) as worker, requester(vhost, direct=True) as app:
        for n in range(3):
            await app.publish(
                json.dumps({"result": "m-1"}).encode(),
                exchange="lane.control",
                key="result",
                message_type="result",
                reply_to=f"amq.rabbitmq.reply-to.g2dkABNyYWJiaXRAbm93aGVyZQAAAAAAAAAAAAAAAA==.{n}AAAAAAAAAAAAAAAAAAAAA==",
            )
            assert (await app.control({"result": "m-1"}, key="result")).control == "pending"
        assert (await app.ask({"prompt": "x"})).status == "ok"
        assert worker.is_well


@pytest.mark.oldest_version
async def test_the_request_of_a_requester_that_has_gone_runs_once_and_is_acknowledged(vhost: Vhost) -> None:
    """With an exclusive queue and with direct reply-to, with and without streaming."""
    async with serving(vhost) as worker, requester(vhost) as stays:
        await stays.read_dead()
        await stays.read_events()
        for direct in (False, True):
            names = [f"gone {direct} {stream}".replace(" ", "-") for stream in (False, True)]
            async with requester(vhost, direct=direct) as leaves:
                for name in names:
                    headers = {"x-lane-stream": name.endswith("True")}
                    await leaves.publish({"prompt": f"{name} [[held]]"}, message_id=name, headers=headers)
                await until(lambda: worker.api.running == 2)
            worker.api.release(f"gone-{direct}")
            for name in names:
                await until(lambda name=name: stays.events_of(name) == ["started", "completed"])
                assert len(worker.calls(name)) == 1
        assert (await stays.ask({"prompt": "still there?"})).status == "ok"
        assert not stays.dead
        assert worker.is_well
        await until(lambda: stays.holds(0, "lane.critical"))


@pytest.mark.oldest_version
async def test_an_error_for_a_requester_that_has_gone_is_parked_once(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as stays:
        await stays.read_dead()
        async with requester(vhost) as leaves:
            gone = leaves.reply_to
        await stays.publish({"prompt": "x [[fault: invalid]]"}, reply_to=gone, message_id="g-2")
        await stays.buried("g-2")
        assert (await stays.ask({"prompt": "still there?"})).status == "ok"
        assert len(stays.dead_of("g-2")) == 1
        assert worker.is_well


FULL: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish", "x-queue-type": "classic"}
FLOOD_S = 5.0
A_SECOND = 50


async def make_full(app: Requester, queue: str) -> None:
    await app.channel.queue_declare(queue, durable=True, arguments=FULL)
    await app.channel.basic_publish(b"full", routing_key=queue)


@pytest.mark.oldest_version
async def test_a_reply_to_a_full_queue_is_sent_when_there_is_room_without_another_call(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.read_dead()
        await app.read_events()
        await make_full(app, "shop.full")
        await app.publish({"prompt": "an answer"}, reply_to="shop.full", message_id="r-1", correlation_id="c-1")
        await app.publish({"prompt": "x [[fault: invalid]]"}, reply_to="shop.full", message_id="r-2")
        await app.publish(b"!", reply_to="shop.full", message_id="r-3")
        await app.publish(b"!", reply_to="shop.full", key="nowhere.x", message_id="r-4")
        await until(lambda: "completed" in app.events_of("r-1"))
        assert (await app.control({"result": "r-1"}, key="result")).status == "ok", "kept, while its queue is full"
        for each in ("r-2", "r-3", "r-4"):
            await app.buried(each)
        await app.channel.queue_purge("shop.full")
        found = {}
        for _ in range(4):  # it has room for one message at a time
            await until(lambda: app.depth("shop.full"))
            got = Got.of(await app.channel.basic_get("shop.full", no_ack=True))
            found[got.headers["x-lane-request-id"]] = got
        assert found.keys() == {"r-1", "r-2", "r-3", "r-4"}
        assert (found["r-1"].properties.correlation_id, found["r-1"].status) == ("c-1", "ok")
        assert b"unroutable" in found["r-4"].body
        assert len(worker.calls("an answer")) == 1
        assert len(app.dead) == 3, "each was parked once"
        assert worker.is_well


async def test_a_flood_of_invalid_requests_for_a_full_reply_queue_does_not_delay_others_and_is_limited(
    vhost: Vhost,
) -> None:
    """With two slots; without the control each such reply would occupy one for three seconds."""
    few = {"critical": {"slots": 2}}
    async with serving(vhost, lanes=few) as worker, requester(vhost) as app, requester(vhost) as flood:
        worker.parts.settler.reply_retries.max_waiting = 100
        await make_full(app, "shop.full")
        usual = await app.waits_s(10, pause_s=0.1)
        flooding = asyncio.create_task(_flood(flood))
        meanwhile = await app.waits_s(20, pause_s=0.1)
        await flooding
        print(f"waits in the same lane: usual {max(usual):.3f} s, meanwhile {sorted(meanwhile)[-3:]} s")
        assert statistics.median(meanwhile) < max(1.5, 5 * max(usual))
        assert max(meanwhile) < 30, "nothing waits for a slot: that would be minutes"
        await until(lambda: worker.parts.settler.reply_retries.given_up >= FLOOD_S * A_SECOND - 10 * 6)
        delayed = [await app.depth(f"lane.delay.{level:02d}") for level in range(10)]
        # A tenth of 100 for one queue, by the worker's clock: on a busy broker a few come back later than it counts.
        assert sum(delayed) <= 20, "without a bound these would be hundreds"
        assert worker.is_well


async def _flood(app: Requester) -> None:
    end = asyncio.get_running_loop().time() + FLOOD_S
    count = 0
    while asyncio.get_running_loop().time() < end or count < FLOOD_S * A_SECOND:
        count += 1
        await app.publish(b"!", reply_to="shop.full")
        await asyncio.sleep(1 / A_SECOND)
