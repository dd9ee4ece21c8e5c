"""Replies bound to their user: a worker sends them only to queues that the requester may read."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until

pytestmark = pytest.mark.oldest_version

BOUND = {"bound_to_user": True}


@pytest.fixture
def other(vhost: Vhost) -> Iterator[tuple[str, str]]:
    """Another user of the broker, with all permissions."""
    name = f"{vhost.name}-other"
    vhost.api("PUT", f"users/{name}", {"password": "secret", "tags": ""})
    vhost.api("PUT", f"permissions/{vhost.quoted}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    yield name, vhost.amqp_url.replace(f"{quote(vhost.user)}:{quote(vhost.password)}@", f"{name}:secret@")
    vhost.api("DELETE", f"users/{name}")


async def test_no_reply_goes_to_another_users_queue(vhost: Vhost, other: tuple[str, str]) -> None:
    """Neither to a durable queue nor to an exclusive one whose name is known."""
    name, url = other
    async with (
        serving(vhost.amqp_url, reply_to=BOUND) as worker,
        requester(vhost.amqp_url) as victim,
        requester(url) as app,
    ):
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


async def test_a_reply_goes_to_the_users_own_queue_also_after_a_delay_and_a_retry(
    vhost: Vhost, other: tuple[str, str]
) -> None:
    name, url = other
    async with serving(vhost.amqp_url, reply_to=BOUND) as worker, requester(url) as app:
        own = f"lane.reply.{name}.eu"
        await app.channel.queue_declare(own, durable=True)
        body = {"prompt": "x [[fault: server_error x1]]"}
        await app.publish(body, reply_to=own, user_id=name, headers={"x-lane-delay-ms": 200})
        await until(lambda: app.depth(own))
        got = await app.channel.basic_get(own, no_ack=True)
        assert got.header is not None
        assert (got.header.properties.headers or {})["x-lane-attempt"] == 2
        assert worker.is_well


async def test_direct_reply_to_works_without_a_user_for_requests_and_control_messages(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, reply_to=BOUND), requester(vhost.amqp_url, direct=True) as app:
        assert (await app.ask({"prompt": "x"}, message_id="m-1")).status == "ok"
        assert (await app.control({"result": "m-1"}, key="result")).status == "ok"
        assert (await app.control({"cancel": "m-1"}, key="cancel")).json["outcome"] == "ended"


async def test_replies_to_a_speaker_are_bound_to_its_own_user(vhost: Vhost, other: tuple[str, str]) -> None:
    name, url = other
    speaks: dict[str, Any] = {"speakers": (name,), "reply_to": BOUND}
    async with serving(vhost.amqp_url, **speaks) as worker, requester(url) as gateway, requester(vhost.amqp_url) as app:
        await app.read_dead()
        for queue in (f"lane.reply.{name}", "lane.reply.shop"):
            await gateway.channel.queue_declare(queue, durable=True)
        said: dict[str, Any] = {"user_id": name, "headers": {"x-lane-tenant": "shop"}}
        await gateway.publish({"prompt": "x"}, reply_to=f"lane.reply.{name}", **said)
        await until(lambda: gateway.depth(f"lane.reply.{name}"))
        await gateway.publish({"prompt": "y"}, reply_to="lane.reply.shop", message_id="s-2", **said)
        assert (await app.buried("s-2")).headers["x-lane-dead-code"] == "forbidden_reply_to"
        assert len(worker.api.calls) == 1


async def test_forged_direct_reply_addresses_of_control_messages_affect_no_other_requester(vhost: Vhost) -> None:
    """Before RabbitMQ 4.3.5 each of them kills the connection that answers it."""
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url, direct=True) as app:
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
