"""Nothing that a requester writes into a message gives it more rights than a request has."""

import pytest

from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.requester import CRITICAL, requester
from tests.support.serving import serving
from tests.support.waiting import until

INTERNAL = {
    "x-lane-attempt": 99,
    "x-lane-errors": ["made up"],
    "x-lane-user-id": "boss",
    "x-lane-expiration": "1",
    "x-lane-first-seen-ms": 1,
    "x-lane-due-ms": 4_000_000_000_000,
    "x-lane-status": "ok",
    "x-lane-dead-code": "poison",
    "x-lane-request-id": "another",
    "x-delivery-count": 19,
    "x-acquired-count": 50,
    "x-first-death-queue": "lane.normal",
    "x-last-death-reason": "expired",
    "lane-d00": 1,
    "lane-d05": 0,
}


async def test_internal_headers_of_a_fresh_request_are_not_believed(vhost: Vhost) -> None:
    """Neither its attempts, nor its due time, nor its tenant; and they are not in the dead letter."""
    async with meeting(vhost.amqp_url, lanes={"critical": {"max_attempts": 3}}) as (worker, app, _):
        await app.read_dead()
        reply = await app.ask({"prompt": "pushy"}, headers=INTERNAL, message_id="f-1")
        assert (reply.status, reply.headers["x-lane-attempt"]) == ("ok", 1)
        assert reply.headers["x-lane-request-id"] == "f-1"
        assert reply.headers["x-lane-wait-ms"] < 60_000, "not since 1970"

        reply = await app.ask({"prompt": "pushy [[fault: server_error]]"}, headers=INTERNAL, message_id="f-2")
        assert reply.code == "attempts_exhausted"
        assert len(worker.calls("pushy [[fault")) == 3
        dead = await app.buried("f-2")
        assert len(dead.headers["x-lane-errors"]) == 3
        assert "made up" not in str(dead.headers["x-lane-errors"])
        assert dead.headers["x-lane-attempt"] == 3
        left = INTERNAL.keys() & dead.headers.keys()
        assert left == {"x-lane-attempt", "x-lane-errors", "x-lane-dead-code"}


@pytest.mark.oldest_version
async def test_a_forged_death_is_refused_by_name(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        death = [{"queue": "lane.critical.due", "reason": "delivery_limit", "count": 1, "exchange": "lane.due"}]
        reply = await app.ask({"prompt": "undead"}, headers={"x-death": death}, message_id="f-3")
        assert reply.code == "invalid_request"
        assert "x-death" in reply.json["detail"]
        assert "x-death" not in (await app.buried("f-3")).headers
        lost = await app.ask({"prompt": "undead"}, headers={"x-death": death}, key="nowhere.x", message_id="f-4")
        assert lost.code == "unroutable"
        assert not worker.api.calls


@pytest.mark.oldest_version
async def test_the_internal_exchange_cannot_be_published_to(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        with pytest.raises(Exception, match=r"ACCESS_REFUSED|internal"):
            await app.publish({"prompt": "x"}, exchange="lane.due", headers={"x-lane-attempt": 0})
        assert not worker.api.calls


@pytest.mark.oldest_version
async def test_the_user_checked_by_the_broker_is_kept_through_retries(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, lanes={"critical": {"max_attempts": 2}}), requester(vhost.amqp_url) as app:
        await app.read_dead()
        headers = {"x-lane-user-id": "boss"}
        await app.ask({"prompt": "x [[fault: server_error]]"}, user_id=vhost.user, headers=headers, message_id="f-5")
        dead = await app.buried("f-5")
        assert dead.headers["x-lane-user-id"] == vhost.user
        assert dead.properties.user_id in (None, "")


FORBIDDEN = [
    "lane.critical",
    "lane.batch.due",
    "lane.dead",
    "lane.fallen",
    "lane.control",
    "lane.delay.00",
    "lane",
    "lane.replyx",
    "amq.rabbitmq.trace",
    "amq.rabbitmq.log",
    "amq.topic",
    "amq.gen-short",
    "amq.gen-AAAAAAAAAAAAAAAAAAAAAAAAA",
    "amq.rabbitmq.reply-to.with space",
]


async def test_a_forbidden_reply_address_is_parked_and_nothing_is_sent_there(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        for n, address in enumerate(FORBIDDEN):
            await app.publish({"prompt": "deputy"}, reply_to=address, message_id=f"lane-{n}")
            await app.publish({"prompt": "deputy"}, reply_to=address, message_id=f"none-{n}", key="nowhere.x")
        for n, address in enumerate(FORBIDDEN):
            dead = await app.buried(f"lane-{n}")
            assert dead.headers["x-lane-dead-code"] == "forbidden_reply_to"
            assert address in dead.headers["x-lane-dead-detail"]
            assert dead.properties.reply_to == address
            assert (await app.buried(f"none-{n}")).headers["x-lane-dead-code"] == "unroutable"
        assert (await app.ask({"prompt": "a good one"})).status == "ok"
        assert len(worker.api.calls) == 1
        assert len(app.dead) == 2 * len(FORBIDDEN), "nothing was sent to lane.dead as a reply"
        queues = ("lane.critical", "lane.batch.due", "lane.fallen", "lane.control", "lane.delay.00")
        await until(lambda: app.holds(0, *queues))
        assert worker.is_well


@pytest.mark.every_version
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_forged_direct_reply_address_affects_no_other_requester(vhost: Vhost, stream: bool) -> None:
    """Before RabbitMQ 4.3.5 it kills the connection that answers it (docs/facts.md, section 6)."""
    async with (
        serving(vhost.amqp_url) as worker,
        requester(vhost.amqp_url) as app,
        requester(vhost.amqp_url, direct=True) as direct,
    ):
        await app.read_dead()
        for n in range(3):
            ours = [
                await direct.publish({"prompt": f"mine {n}"}, headers={"x-lane-stream": stream}),
                await app.publish({"prompt": f"mine too {n}"}, headers={"x-lane-stream": stream}),
            ]
            await app.publish(
                {"prompt": "evil"},
                reply_to="amq.rabbitmq.reply-to.g2dkABNyYWJiaXRAbm93aGVyZQAAAAAAAAAAAAAAAA==.AAAAAAAAAAAAAAAAAAAAAA==",
                message_id=f"evil-{n}",
                headers={"x-lane-stream": stream},
            )
            ours += [await direct.publish({"prompt": f"mine after {n}"}), await app.publish({"prompt": f"and {n}"})]
            for each in ours:
                await until(lambda each=each: app.finals(each) or direct.finals(each))
                got = (app.finals(each) or direct.finals(each))[0]
                assert got.status == "ok"
        assert worker.is_well
        if tuple(int(part) for part in vhost.version.split(".")[:3]) < (4, 3, 5):
            for n in range(3):
                dead = await app.buried(f"evil-{n}")
                assert dead.headers["x-lane-dead-code"] == "forbidden_reply_to"
                assert len(app.dead_of(f"evil-{n}")) == 1
        await until(lambda: app.holds(0, *CRITICAL))
