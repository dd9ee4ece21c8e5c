"""The outcome of a request is posted to its webhook: signed, again after failures, and until it is delivered."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import SecretStr
from standardwebhooks import WebhookVerificationError

from consumers.flows.lines import AT_ONCE, Line
from consumers.state.base import Identity
from service.config.flows import PipelineSettings
from tests.support.brokers import Vhost
from tests.support.endpoint import OTHER_SECRET, SECRET, endpoint
from tests.support.gate import call, gate, submit
from tests.support.processes import environment, lanekeeper, run
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


async def test_an_outcome_is_posted_signed_with_the_bytes_of_the_reply(vhost: Vhost) -> None:
    async with endpoint() as hook, serving(vhost.amqp_url, webhooks=hook.settings()), requester(vhost.amqp_url) as app:
        await app.read_events()
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        headers = {"x-lane-webhook": hook.url("/h?key=k"), "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        reply = await app.ask({"prompt": "posted"}, message_id="w-1", headers=headers)
        assert reply.status == "ok"
        await until(lambda: hook.posts)
        posted = hook.posts[0]
        posted.verify()
        with pytest.raises(WebhookVerificationError):
            posted.verify(OTHER_SECRET)
        assert (posted.path, posted.body) == ("/h?key=k", reply.body)
        found = (posted.id, posted.headers["x-lane-status"], posted.headers["content-type"])
        assert found == ("w-1", "ok", "application/json")
        assert trace_id in posted.headers["traceparent"]
        await until(lambda: "webhook" in app.events_of("w-1"))
        assert len(hook.posts) == 1


async def test_an_error_is_posted_too(vhost: Vhost) -> None:
    async with endpoint() as hook, serving(vhost.amqp_url, webhooks=hook.settings()), requester(vhost.amqp_url) as app:
        wrong = {"x-lane-webhook": hook.url(), "x-lane-deadline-ms": 1}
        await app.publish({"prompt": "late"}, message_id="w-late", headers=wrong)
        await app.publish({"prompt": 7}, message_id="w-wrong", headers={"x-lane-webhook": hook.url()})
        await until(lambda: hook.of("w-late") and hook.of("w-wrong"))
        for id, code in (("w-late", "deadline_exceeded"), ("w-wrong", "invalid_request")):
            (posted,) = hook.of(id)
            posted.verify()
            assert (posted.json["code"], posted.headers["x-lane-status"]) == (code, "error")
            assert posted.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("id", ["a\r\nx-evil: 1", "\u2603", "with space"])
async def test_a_request_with_an_id_that_is_refused_is_posted_under_another(vhost: Vhost, id: str) -> None:
    async with endpoint() as hook, serving(vhost.amqp_url, webhooks=hook.settings()), requester(vhost.amqp_url) as app:
        refused = await app.ask({"prompt": "x"}, message_id=id, headers={"x-lane-webhook": hook.url()})
        assert refused.code == "invalid_request"
        await until(lambda: hook.posts)
        posted = hook.posts[0]
        posted.verify()
        assert posted.id.isalnum()
        assert (posted.body, "x-evil" in posted.headers) == (refused.body, False)


async def test_secrets_rotate_each_signs(vhost: Vhost) -> None:
    async with endpoint() as hook:
        both = hook.settings(secrets=[SECRET, OTHER_SECRET])
        async with serving(vhost.amqp_url, webhooks=both), requester(vhost.amqp_url) as app:
            await app.publish({"prompt": "signed"}, headers={"x-lane-webhook": hook.url()})
            await until(lambda: hook.posts)
            hook.posts[0].verify(SECRET)
            hook.posts[0].verify(OTHER_SECRET)


@pytest.mark.every_version
async def test_500_slow_and_redirect_are_tried_again_and_then_delivered(vhost: Vhost) -> None:
    async with endpoint() as hook:
        bad: Iterator[web.Response | float] = iter(
            (
                web.Response(status=500),
                web.Response(status=302, headers={"location": hook.url("/elsewhere")}),
                3.0,  # slower than `timeout_s`
                web.Response(status=404),
            )
        )
        hook.answer = lambda posted: next(bad, web.Response(status=200))
        async with (
            serving(vhost.amqp_url, webhooks=hook.settings(timeout_s=0.5)) as worker,
            gate(worker.settings) as url,
        ):
            submitted = await submit(url, "again and again", x_lane_webhook=hook.url(), Idempotency_Key="w-5")
            assert submitted.status == 202
            await until(lambda: len(hook.posts) == 5)
            assert {posted.path for posted in hook.posts} == {"/hook"}, "a redirect is not followed"
            assert {posted.id for posted in hook.posts} == {"w-5"}
            assert len({posted.body for posted in hook.posts}) == 1
            for posted in hook.posts:
                posted.verify()
            gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(hook.posts)]
            assert gaps[3] > gaps[0], "each pause is longer than the one before"

            async def status() -> object:
                return (await call("GET", f"{url}{submitted['status_url']}")).body.get("webhook", {}).get("state")

            async def is_delivered() -> bool:
                return await status() == "delivered"

            await until(is_delivered)
            found = (await call("GET", f"{url}{submitted['status_url']}"))["webhook"]
            assert found["attempts"] == 5
            told = " ".join(found["errors"])
            assert all(each in told for each in ("answered 500", "answered 302", "no answer within 0.5 s", "404"))
            assert "/hook" not in json.dumps(found), "the URL may be secret"


async def test_410_ends_it_for_good(vhost: Vhost) -> None:
    async with endpoint() as hook:
        hook.answer = lambda posted: web.Response(status=410)
        async with serving(vhost.amqp_url, webhooks=hook.settings()) as worker, requester(vhost.amqp_url) as app:
            await app.read_dead()
            await app.publish({"prompt": "gone"}, message_id="w-410", headers={"x-lane-webhook": hook.url()})
            await until(lambda: worker.parts.posting.posted["gone"])
            await until(lambda: app.holds(0, "lane.webhooks"))
            assert len(hook.posts) == 1
            row = await until(lambda: worker.parts.store.webhook(Identity("", "w-410")))
            assert json.loads(row)["state"] == "gone"
            assert not app.dead_of("w-410")


async def test_after_give_up_s_it_is_a_dead_letter_which_a_replay_posts_again(vhost: Vhost) -> None:
    async with endpoint() as hook:
        hook.answer = lambda posted: web.Response(status=503)
        given = hook.settings(give_up_s=0.5)
        async with serving(vhost.amqp_url, webhooks=given) as worker, requester(vhost.amqp_url) as app:
            reply = await app.ask({"prompt": "parked"}, message_id="w-dead", headers={"x-lane-webhook": hook.url()})
            await until(lambda: worker.parts.posting.posted["undelivered"])
            hook.answer = lambda posted: web.Response(status=200)
            hook.posts.clear()
            from service.deadletters import DeadLetters, Filter, LetterEdit

            dead = DeadLetters(worker.settings, worker.parts.broker.consuming)
            (letter,) = [each for each in [await dead.find(Filter(ids=frozenset({"w-dead"})))] if each]
            assert letter.code == "webhook_undelivered"
            assert "503" in letter.detail
            assert letter.message.body == reply.body
            replayed = await dead.replay(Filter(codes=frozenset({"webhook_undelivered"})), LetterEdit())
            assert (replayed.replayed, replayed.refusals) == (1, 0)
            await until(lambda: hook.posts)
            hook.posts[0].verify()
            assert (hook.posts[0].id, hook.posts[0].body) == ("w-dead", reply.body)
            assert len(worker.calls("parked")) == 1, "the request itself is not run again"
            await until(lambda: worker.parts.posting.posted["delivered"])


async def test_a_slow_endpoint_delays_no_other_and_no_lane(vhost: Vhost) -> None:
    async with endpoint() as slow, endpoint() as quick:
        slow.answer = lambda posted: 30.0
        hosts = [f"127.0.0.1:{slow.port}", f"127.0.0.1:{quick.port}"]
        async with (
            serving(vhost.amqp_url, webhooks=quick.settings(allow_hosts=hosts, timeout_s=20)) as worker,
            requester(vhost.amqp_url) as app,
        ):
            for at in range(30):
                await app.publish({"prompt": f"slow {at}"}, headers={"x-lane-webhook": slow.url()})
            await until(lambda: len(slow.posts) == 4)
            ids = [f"quick-{at}" for at in range(20)]
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            replies = [app.ask({"prompt": id}, message_id=id, headers={"x-lane-webhook": quick.url()}) for id in ids]
            assert {reply.status for reply in await asyncio.gather(*replies)} == {"ok"}
            await until(lambda: {posted.id for posted in quick.posts} >= set(ids))
            assert loop.time() - began_s < 20, "none waits until a slow post ends"
            assert len(slow.posts) == 4, "of a slow endpoint only a few posts run at a time"
            await until(lambda: worker.parts.posting.running == 4)  # the quick ones end


async def test_a_backlog_of_one_slow_endpoint_holds_no_other_post_up(vhost: Vhost) -> None:
    async with endpoint() as slow, endpoint() as quick:
        slow.answer = lambda posted: 14.0
        given = quick.settings(allow_hosts=[f"127.0.0.1:{slow.port}", f"127.0.0.1:{quick.port}"])
        async with serving(vhost.amqp_url, webhooks=given) as worker, requester(vhost.amqp_url) as app:

            async def post(id: str, url: str) -> None:
                headers = {
                    "x-lane-webhook": url, "x-lane-request-id": id, "x-lane-status": "ok",
                    "x-lane-routing-key": "normal.a.b",
                }  # fmt: skip
                await app.publish({"a": 1}, exchange="lane.webhooks", key="webhooks.normal", headers=headers)

            for at in range(1500):
                await post(f"slow-{at}", slow.url())
            await until(lambda: app.holds(0, "lane.webhooks"), within_s=60)
            for at in range(20):
                await post(f"quick-{at}", quick.url())
            await until(lambda: len({posted.id for posted in quick.posts}) == 20)
            assert len(slow.posts) < 100, "nearly all of the backlog still waits"
            assert worker.parts.posting.lines.running[Line("", slow.url(""))] <= AT_ONCE


async def test_a_tenant_cannot_make_anothers_receiver_take_its_post_for_genuine(vhost: Vhost) -> None:
    """Nor can it use up an id of the other's: what does not verify is not noted as seen."""
    async with endpoint() as of_b:
        hosts = [f"*:{of_b.port}"]
        tenants = {
            "a": {"allow_hosts": hosts, "secrets": [SecretStr(OTHER_SECRET)]},
            "b": {"allow_hosts": hosts, "secrets": [SecretStr(SECRET)]},
        }
        given = of_b.settings(allow_hosts=[], secrets=[], tenants=tenants)
        async with (
            serving(vhost.amqp_url, webhooks=given, speakers=(vhost.user,)),
            requester(vhost.amqp_url) as app,
        ):
            for tenant in ("a", "b"):
                headers = {"x-lane-webhook": of_b.url(), "x-lane-tenant": tenant}
                await app.publish({"prompt": f"of {tenant}"}, message_id="w-1", user_id=vhost.user, headers=headers)
                await until(lambda tenant=tenant: any(f"of {tenant}".encode() in each.body for each in of_b.posts))
            seen: dict[str, bytes] = {}
            for each in of_b.posts:
                with suppress(WebhookVerificationError):
                    each.verify(SECRET)
                    seen.setdefault(each.id, each.body)
            assert list(seen) == ["w-1"]
            assert b"of b" in seen["w-1"]
            other = {"x-lane-webhook": of_b.url(), "x-lane-tenant": "c"}
            refused = await app.ask({"prompt": "x"}, user_id=vhost.user, headers=other)
            assert (refused.code, "[webhooks.tenants.NAME]" in refused.json["detail"]) == ("forbidden_webhook", True)


async def test_what_was_posted_can_be_listed_and_posted_again_by_operators(vhost: Vhost) -> None:
    async with (
        endpoint() as hook,
        serving(vhost.amqp_url, webhooks=hook.settings(), control={"operators": [vhost.user]}) as worker,
        requester(vhost.amqp_url) as app,
    ):
        await app.ask({"prompt": "listed"}, message_id="w-list", headers={"x-lane-webhook": hook.url("/secret")})
        await until(lambda: worker.parts.posting.posted["delivered"])

        async def listed() -> object:
            answer = await app.control({"webhooks": "w-list"}, key="webhooks", user_id=vhost.user)
            return answer.json.get("webhooks")

        await until(listed)
        answer = await app.control({}, key="webhooks", user_id=vhost.user)
        (found,) = answer.json["webhooks"]
        assert (found["id"], found["state"], found["attempts"]) == ("w-list", "delivered", 1)
        assert found["endpoint"] == hook.url("")
        again = await app.control({"redeliver": "w-list"}, key="redeliver", user_id=vhost.user)
        assert again.control == "accepted"
        await until(lambda: len(hook.posts) == 2)
        assert hook.posts[0].body == hook.posts[1].body
        unknown = await app.control({"redeliver": "w-none"}, key="redeliver", user_id=vhost.user)
        assert (unknown.control, unknown.code) == ("error", "invalid_request")
        refused = await app.control({"redeliver": "w-list"}, key="redeliver")
        assert refused.code == "forbidden_control"


async def test_the_command_lists_posts_and_posts_again(vhost: Vhost, tmp_path: Path) -> None:
    async with (
        endpoint() as hook,
        serving(vhost.amqp_url, webhooks=hook.settings()) as worker,
        requester(vhost.amqp_url) as app,
    ):
        environ = environment(vhost)

        async def does(*line: str) -> tuple[int, str]:
            code, lines = await run("webhooks", *line, environ=environ, folder=tmp_path)
            return code, "\n".join(lines)

        assert await does("list") == (0, "no webhook is known")
        hook.answer = lambda posted: web.Response(status=500 if len(hook.posts) == 1 else 200)
        await app.ask({"prompt": "x"}, message_id="w-cli", headers={"x-lane-webhook": hook.url("/secret")})
        await until(lambda: worker.parts.posting.posted["delivered"])
        code, told = await does("list", "w-cli")
        assert code == 0
        assert "w-cli  " in told
        assert "delivered at" in told
        assert "after 2 attempts" in told
        assert "answered 500" in told
        assert "secret" not in told
        async with lanekeeper("result", "w-cli", environ=environ, folder=tmp_path) as fetched:
            assert await fetched.ended() == 0
        assert fetched.lines == ["echo: x"]
        told = "\n".join(each["event"] for each in fetched.events)
        assert "delivered at" in told
        assert "after 2 attempts" in told
        assert "answered 500" in told
        assert "secret" not in told
        assert (await does("redeliver", "w-cli"))[0] == 0
        await until(lambda: len(hook.posts) == 3)
        assert (await does("redeliver", "unknown"))[0] == 1
        (listed,) = json.loads((await does("list", "--json"))[1])
        assert listed["state"] == "delivered"


async def test_a_large_answer_is_posted_as_its_address(vhost: Vhost, tmp_path: Path) -> None:
    bodies = {"url": f"file://{tmp_path}/bodies", "answers_over_bytes": 4096}
    async with (
        endpoint() as hook,
        serving(vhost.amqp_url, webhooks=hook.settings(), bodies=bodies),
        requester(vhost.amqp_url) as app,
    ):
        body = {"prompt": "a long one [[tokens: 20000]]", "max_tokens": 20_000}
        reply = await app.ask(body, message_id="w-large", headers={"x-lane-webhook": hook.url()})
        assert reply.json["type"] == "urn:lanekeeper:body"
        await until(lambda: hook.posts)
        hook.posts[0].verify()
        assert hook.posts[0].body == reply.body
        assert hook.posts[0].headers["x-lane-status"] == "ok"


async def test_a_pipeline_is_posted_once_with_what_its_last_step_answered(vhost: Vhost) -> None:
    steps = [{"name": "first", "prompt": "one {{ input }}"}, {"name": "second", "prompt": "two {{ first }}"}]
    pipelines = {"two": PipelineSettings.model_validate({"steps": steps})}
    async with (
        endpoint() as hook,
        serving(vhost.amqp_url, webhooks=hook.settings(), pipelines=pipelines) as worker,
        requester(vhost.amqp_url) as app,
    ):
        headers = {"x-lane-pipeline": "two", "x-lane-webhook": hook.url()}
        delayed = {"x-lane-debounce": "doc", "x-lane-delay-ms": 300}
        reply = await app.ask("river", message_id="w-pipe", headers={**headers, **delayed})
        assert reply.status == "ok"
        await until(lambda: worker.parts.posting.posted["delivered"])
        assert [posted.id for posted in hook.posts] == ["w-pipe"]
        assert hook.posts[0].body == reply.body
