"""The outcome of a request can be fetched by its id later; a repeated id calls the provider once; other tenants' ids
tell nothing (threat T5)."""

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from aiormq.exceptions import ChannelPreconditionFailed
from yarl import URL

from consumers.state.base import Identity
from lanekeeper import Client, NotEnded
from lanekeeper.replies import Problem
from tests.support.brokers import Vhost
from tests.support.defaults import store_url
from tests.support.requester import requester
from tests.support.serving import meeting, serving
from tests.support.waiting import until


async def test_a_fetched_answer_equals_the_one_that_was_sent(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app, Client(vhost.amqp_url) as client:
        reply = await app.ask({"prompt": "three rivers"}, message_id="a-1")
        result = await client.result("a-1")

        assert result.body == reply.body
        assert result.replayed
        told = {"x-lane-name", "x-lane-model", "x-lane-provider", "x-lane-attempt", "x-lane-wait-ms", "x-lane-run-ms"}
        assert {name: result.headers[name] for name in told} == {name: reply.headers[name] for name in told}
        assert (result.request_id, result.lane) == ("a-1", "critical")
        assert len(worker.api.calls) == 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": "x", "model": "claude-nope"}, "provider_rejected"),
        ({"prompt": "[[fault: overloaded]]"}, "attempts_exhausted"),
        (b"not JSON", "invalid_request"),
    ],
)
async def test_a_fetched_error_equals_the_one_that_was_sent(vhost: Vhost, body: object, code: str) -> None:
    async with serving(vhost), requester(vhost) as app, Client(vhost.amqp_url) as client:
        reply = await app.ask(body, message_id="a-1")
        with pytest.raises(Problem) as caught:
            await client.result("a-1")

        assert caught.value.code == code
        assert caught.value.fields == reply.json


async def test_fetching_a_running_request_waits_as_long_as_requested(vhost: Vhost) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        await client.publish({"prompt": "slow [[held]]"}, key="critical.tests.x", message_id="s-1")
        await until(lambda: worker.calls("slow"))
        with pytest.raises(NotEnded) as caught:
            await client.result("s-1")
        began = time.monotonic()
        with pytest.raises(NotEnded):
            await client.result("s-1", wait_s=0.5)

        assert caught.value.status == "running"
        assert time.monotonic() - began >= 0.5
        worker.api.release("slow")
        assert (await client.result("s-1", wait_s=60)).text.startswith("echo: slow")


async def test_a_request_between_two_attempts_is_reported_as_waiting(vhost: Vhost) -> None:
    pause_s = 60
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        retried = await client.request({"prompt": "at once [[fault: overloaded x1]]"}, key="normal.tests.x")
        assert (await client.result(retried.request_id)).attempt == 2
        prompt = f"again [[fault: rate_limited retry_after={pause_s} x1]]"
        began = datetime.now(UTC)
        await client.publish({"prompt": prompt}, key="normal.tests.x", message_id="w-1")
        await until(lambda: worker.calls("again") and worker.api.running == 0)

        async def waits() -> NotEnded | None:
            with pytest.raises(NotEnded) as caught:
                await client.result("w-1")
            return caught.value if (caught.value.status, caught.value.attempts) == ("waiting", 1) else None

        waiting = await until(waits)
        assert waiting.due_at is not None
        assert pause_s <= (waiting.due_at - began).total_seconds()
        assert (waiting.due_at - datetime.now(UTC)).total_seconds() < 1.1 * pause_s, "at most a tenth is added"
        assert await client.cancel("w-1") == "recorded"


@pytest.mark.parametrize("lane", ["critical", "batch"])
async def test_a_delayed_request_is_reported_as_waiting_until_its_due_time(vhost: Vhost, lane: str) -> None:
    async with serving(vhost), Client(vhost.amqp_url) as client:
        began = datetime.now(UTC)
        await client.publish({"prompt": "later"}, key=f"{lane}.tests.x", message_id="d-1", delay_s=60)
        published = datetime.now(UTC)

        async def waits() -> NotEnded | None:
            with pytest.raises(NotEnded) as caught:
                await client.result("d-1")
            return caught.value if caught.value.status == "waiting" else None

        waiting = await until(waits)
        assert (waiting.attempts, waiting.due_at is not None) == (0, True)
        assert waiting.due_at is not None
        millisecond = timedelta(milliseconds=1)
        assert began - millisecond <= waiting.due_at - timedelta(seconds=60) <= published
        assert await client.cancel("d-1") == "recorded"
        with pytest.raises(Problem, match="cancelled"):
            await client.result("d-1")


async def test_a_delayed_request_runs_although_the_store_has_forgotten_it(vhost: Vhost) -> None:
    async with serving(vhost) as worker, Client(vhost.amqp_url) as client:
        for delay_s in (1, 4, 16):  # on a busy machine it may begin before the store has forgotten it
            id = await client.publish({"prompt": f"after {delay_s} s"}, key="normal.tests.x", delay_s=delay_s)
            await until(partial(worker.parts.store.find, Identity("", id)))
            os.unlink(store_url(vhost.amqp_url).removeprefix("sqlite:///"))
            if not worker.calls(f"after {delay_s} s"):
                break

        assert (await client.result(id, wait_s=60)).text == f"echo: after {delay_s} s"


async def test_a_speaker_can_fetch_results_of_its_tenants(vhost: Vhost) -> None:
    async with serving(vhost, speakers=(vhost.user,)), Client(vhost.amqp_url) as client:
        for tenant in ("acme", "bell"):
            await client.request({"prompt": tenant}, key="critical.tests.x", message_id="t-1", tenant=tenant)

        assert [(await client.result("t-1", tenant=tenant)).text for tenant in ("acme", "bell")] == [
            "echo: acme",
            "echo: bell",
        ]


async def test_results_can_be_fetched_while_every_slot_is_in_use(vhost: Vhost) -> None:
    async with meeting(vhost, lanes={"critical": {"slots": 1}}, works=("critical",)) as (worker, _, client):
        await client.request({"prompt": "x"}, key="critical.tests.x", message_id="a-1")
        await client.publish({"prompt": "[[latency: 60s]]"}, key="critical.tests.x")
        await until(lambda: worker.api.running == 1)
        results = await asyncio.gather(*(client.result("a-1") for _ in range(50)))

        assert {each.text for each in results} == {"echo: x"}
        assert worker.api.running == 1


async def test_the_same_request_again_is_answered_from_the_store(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        first = await app.ask({"prompt": "once"}, message_id="i-1")
        second = await app.ask({"prompt": "once"}, message_id="i-1")
        streamed = await app.ask({"prompt": "once"}, message_id="i-1", headers={"x-lane-stream": True})

        assert second.body == streamed.body == first.body
        assert [each.headers.get("x-lane-replayed") for each in (first, second, streamed)] == [None, True, True]
        assert second.headers["x-lane-request-id"] == "i-1"
        assert second.properties.message_id != first.properties.message_id
        assert len(worker.calls("once")) == 1


async def test_a_repeated_request_gets_the_same_error_and_is_parked_once(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        body = {"prompt": "hopeless [[fault: invalid]]"}
        first = await app.ask(body, message_id="i-1")
        second = await app.ask(body, message_id="i-1")

        assert (first.code, second.json, second.headers["x-lane-replayed"]) == ("provider_rejected", first.json, True)
        assert len(worker.calls("hopeless")) == 1
        await until(lambda: app.holds(1, "lane.dead"))


async def test_the_same_id_with_another_body_is_a_conflict_and_does_not_affect_the_first(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app, Client(vhost.amqp_url) as client:
        first = await app.ask({"prompt": "one"}, message_id="i-1")
        other = await app.ask({"prompt": "two"}, message_id="i-1")

        assert (other.code, other.json["status"]) == ("idempotency_conflict", 409)
        assert not worker.calls("two")
        assert (await client.result("i-1")).body == first.body
        await until(lambda: app.holds(0, "lane.dead"))


async def test_requests_without_an_id_are_never_the_same(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        await app.ask({"prompt": "any"})
        await app.ask({"prompt": "any"})

        assert len(worker.calls("any")) == 2


async def test_fifty_copies_at_once_with_two_workers_make_one_call(vhost: Vhost) -> None:
    async with serving(vhost) as one, serving(vhost) as two, requester(vhost) as app:
        body = {"prompt": "once [[latency: 500ms]]"}
        asked = await asyncio.gather(*(app.publish(body, message_id="i-1") for _ in range(50)))
        replies = [await app.final(each) for each in asked]

        assert len(one.calls("once")) + len(two.calls("once")) == 1
        assert len({reply.body for reply in replies}) == 1
        assert Counter(reply.headers.get("x-lane-replayed") for reply in replies) == {None: 1, True: 49}
        assert [len(app.finals(each)) for each in asked] == [1] * 50


@contextmanager
def user_of(vhost: Vhost) -> Iterator[str]:
    """The URL of another user with all permissions, removed afterwards."""
    name, password = f"other-{secrets.token_hex(4)}", secrets.token_hex(8)
    vhost.api("PUT", f"users/{name}", {"password": password, "tags": ""})
    try:
        every = {"configure": ".*", "write": ".*", "read": ".*"}
        vhost.api("PUT", f"permissions/{vhost.quoted}/{name}", every)
        yield str(URL(vhost.amqp_url).with_user(name).with_password(password))
    finally:
        vhost.api("DELETE", f"users/{name}")


async def test_another_tenants_id_reveals_neither_answer_nor_state_nor_a_conflict(vhost: Vhost) -> None:
    with user_of(vhost) as url:
        name = URL(url).user
        async with serving(vhost) as worker, requester(vhost) as mine, requester(url) as theirs:
            first = await mine.ask({"prompt": "secret one"}, message_id="t-1", user_id=vhost.user)
            same = await theirs.ask({"prompt": "secret one"}, message_id="t-1", user_id=name)
            running = await mine.publish({"prompt": "slow [[held]]"}, message_id="t-2", user_id=vhost.user)
            await until(lambda: worker.calls("slow"))

            assert first.text == same.text == "echo: secret one"
            assert "x-lane-replayed" not in same.headers, "it was answered for itself, not from the other's store"
            assert len(worker.calls("secret one")) == 2
            other = await theirs.ask({"prompt": "another body"}, message_id="t-2", user_id=name)
            assert other.text == "echo: another body", "no conflict tells that the other's id is taken"
            for id in ("t-1", "t-2"):
                found = await theirs.control({"result": id, "tenant": vhost.user}, key="result", user_id=name)
                assert (found.control, "may not speak" in found.json["detail"]) == ("error", True)
                stopped = await theirs.control({"cancel": id, "tenant": vhost.user}, key="cancel", user_id=name)
                assert stopped.control == "error"
            asked = await theirs.control({"cancel": "t-2"}, key="cancel", user_id=name)
            assert asked.json["outcome"] == "ended", "its own of that id"
            assert not mine.finals(running)
            stopped = await mine.control({"cancel": "t-2"}, key="cancel", user_id=vhost.user)
            assert stopped.json["outcome"] == "told"
            assert (await mine.final(running)).code == "cancelled"


async def test_a_user_cannot_pretend_to_be_another(vhost: Vhost) -> None:
    """With another `user_id` the broker closes the channel; a header is ignored."""
    with user_of(vhost) as url:
        async with serving(vhost), requester(vhost) as mine, requester(url) as theirs:
            name = URL(url).user
            await mine.ask({"prompt": "mine"}, message_id="t-3", user_id=vhost.user)
            forged = {"x-lane-tenant": vhost.user, "x-lane-user-id": vhost.user}
            reply = await theirs.ask({"prompt": "mine"}, message_id="t-3", user_id=name, headers=forged)
            assert "x-lane-replayed" not in reply.headers
            async with requester(url) as liar:
                with pytest.raises(ChannelPreconditionFailed, match="user_id"):
                    await liar.publish({"prompt": "mine"}, message_id="t-3", user_id=vhost.user)
