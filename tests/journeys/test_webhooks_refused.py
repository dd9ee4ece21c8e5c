"""A webhook reaches no address that it may not, and nobody but workers and operators can have something signed."""

import socket
from typing import Any

import pytest

from tests.support.brokers import Vhost
from tests.support.endpoint import endpoint
from tests.support.gate import call, gate, submit
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


async def test_a_forbidden_host_ends_the_request_before_anything_is_called(vhost: Vhost) -> None:
    async with endpoint() as hook:
        given = hook.settings(allow_hosts=["hooks.example.com"], allow_private=False)
        async with (
            serving(vhost.amqp_url, webhooks=given) as worker,
            requester(vhost.amqp_url) as app,
            gate(worker.settings) as url,
        ):
            await app.read_dead()
            refused = await app.ask({"prompt": "x"}, message_id="f-1", headers={"x-lane-webhook": hook.url()})
            assert (refused.code, refused.json["status"]) == ("forbidden_webhook", 403)
            letter = await app.buried("f-1")
            assert letter.headers["x-lane-webhook"] == hook.url()
            over_http = await submit(url, "x", x_lane_webhook="https://evil.example/")
            ended = await call("GET", f"{url}{over_http['status_url']}?wait=30s")
            assert ended["problem"]["code"] == "forbidden_webhook"
            corrected = await app.ask({"prompt": "x"}, message_id="f-1")
            assert corrected.status == "ok", "the id may be used again"
            assert not hook.posts


async def test_while_webhooks_are_off_a_request_with_one_is_refused(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        refused = await app.ask({"prompt": "x"}, headers={"x-lane-webhook": "https://hooks.example.com/"})
        assert refused.code == "forbidden_webhook"
        assert "LANEKEEPER_WEBHOOKS__ALLOW_HOSTS" in refused.json["detail"]
        assert not worker.calls("x")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "2130706433", "127.1", "0x7f000001", "localhost"])
async def test_an_address_that_is_this_machine_is_refused_in_every_form(vhost: Vhost, host: str) -> None:
    """A literal at once; what only the resolver understands when it is posted."""
    async with endpoint() as hook:
        given = hook.settings(allow_private=False)
        async with serving(vhost.amqp_url, webhooks=given) as worker, requester(vhost.amqp_url) as app:
            await app.read_dead()
            url = hook.url(host=host)
            reply = await app.ask({"prompt": "x"}, message_id="p-1", headers={"x-lane-webhook": url})
            code = "webhook_undelivered" if reply.status == "ok" else reply.code
            assert code in ("webhook_undelivered", "forbidden_webhook")
            letter = await app.buried("p-1")
            assert letter.headers["x-lane-dead-code"] == code
            assert "private address" in letter.headers["x-lane-dead-detail"]
            posted = int(code == "webhook_undelivered")
            await until(lambda: worker.parts.posting.posted.total() == posted)  # counted after the letter is confirmed
            assert not hook.posts


async def test_every_address_of_a_name_is_checked_and_the_checked_one_is_dialled(
    vhost: Vhost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a public and a private address; and one that is public first, and private when it is asked again."""
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def answer(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("both.example.com", "rebinding.example.com"):
            return resolve(host, port, *args, **kwargs)
        asked.append(host)
        public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.114.7", port))
        private = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        if host == "both.example.com":
            return [public, private]
        return [public] if asked.count(host) == 1 else [private]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    async with endpoint() as hook:
        given = hook.settings(allow_private=False, timeout_s=0.3, give_up_s=0.2)
        async with serving(vhost.amqp_url, webhooks=given) as worker, requester(vhost.amqp_url) as app:
            await app.read_dead()
            for name in ("both", "rebinding"):
                url = hook.url(host=f"{name}.example.com")
                await app.publish({"prompt": "x"}, message_id=name, headers={"x-lane-webhook": url})
            assert "private address" in (await app.buried("both")).headers["x-lane-dead-detail"]
            await app.buried("rebinding")
            await until(lambda: worker.parts.posting.posted["undelivered"] == 2)
            assert not hook.posts


async def test_what_did_not_come_from_a_worker_is_not_signed(vhost: Vhost) -> None:
    async with (
        endpoint() as hook,
        serving(vhost.amqp_url, webhooks=hook.settings()),
        requester(vhost.amqp_url) as app,
    ):
        await app.read_dead()
        forged = {
            "x-lane-webhook": hook.url(),
            "x-lane-request-id": "forged",
            "x-lane-status": "ok",
            "x-lane-routing-key": "critical.a.b",
        }
        await app.publish({"paid": True}, exchange="", key="lane.webhooks", headers=forged)
        await app.publish({"prompt": "x"}, message_id="sent", headers={**forged, "x-lane-request-id": "forged-2"})
        await until(lambda: app.dead_of("forged"))
        await until(lambda: hook.posts)
        assert [posted.id for posted in hook.posts] == ["sent"], "internal headers of a requester do not count"
