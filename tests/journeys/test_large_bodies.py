"""A body that is too large for a message lies beside the broker, and the message has its address and digest."""

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import aiohttp

from lanekeeper import Client
from lanekeeper.bodies import BodyStore
from lanekeeper.contract.messages import BodyAddress
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.meeting import meeting
from tests.support.requester import Got, Requester, requester
from tests.support.serving import serving
from tests.support.waiting import until
from topology.lanes import MIB


def images(prompt: str, *, mebibytes: int = 20) -> bytes:
    """A request with that many images of a mebibyte."""
    data = base64.b64encode(os.urandom(MIB * 3 // 4)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: list[dict[str, Any]] = [{"type": "image", "source": source}] * mebibytes
    asked = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
    return json.dumps({"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": asked}).encode()


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"bodies": {"url": f"file://{folder}/bodies", **more}}


async def ask(app: Requester, kept: BodyAddress, **properties: Any) -> Got:
    return await app.ask(b"", headers=dict(kept.headers), within_s=60, **properties)


async def test_twenty_megabytes_of_images_are_answered_and_their_body_is_removed(vhost: Vhost, tmp_path: Path) -> None:
    body = images("what is this?")
    store = BodyStore(f"file://{tmp_path}/bodies")
    async with serving(vhost.amqp_url, **settings(tmp_path)) as worker, requester(vhost.amqp_url) as app:
        kept = await store.keep([body])
        reply = await ask(app, kept, message_id="large")
        assert reply.status == "ok"
        (call,) = worker.api.calls
        assert int(call.headers["content-length"]) == len(body)
        await until(lambda: not list((tmp_path / "bodies").iterdir()))
        again = await ask(app, await store.keep([body]), message_id="large")
        assert (again.body, again.headers["x-lane-replayed"], len(worker.api.calls)) == (reply.body, True, 1)
        other = await ask(app, await store.keep([body + b" "]), message_id="large")
        assert other.code == "idempotency_conflict"
        assert not worker.losses
    store.close()


async def test_a_body_that_is_not_as_announced_is_refused_parked_and_never_sent(vhost: Vhost, tmp_path: Path) -> None:
    store = BodyStore(f"file://{tmp_path}/bodies")
    kept = await store.keep([images("right", mebibytes=2)])
    (tmp_path / "secret").write_bytes(b'{"prompt": "secret"}')
    secret = hashlib.sha256(b'{"prompt": "secret"}').hexdigest()
    wrong = {
        "another digest": (BodyAddress(kept.address, "0" * 64), "invalid_request", "SHA-256"),
        "nothing there": (BodyAddress(kept.address + "0", kept.sha256), "invalid_request", "nothing is there"),
        "elsewhere": (BodyAddress(f"file://{tmp_path}/secret", secret), "invalid_request", "not allowed"),
        "above": (BodyAddress(f"{store.url}/../secret", secret), "invalid_request", "not allowed"),
        "by http": (BodyAddress("http://169.254.169.254/meta-data", secret), "invalid_request", "not allowed"),
        "too large": (await store.keep([b" " * (4 * MIB)]), "too_large", "more than"),
        "no JSON": (await store.keep([b"x" * 2 * MIB]), "invalid_request", "body"),
    }
    async with meeting(vhost.amqp_url, **settings(tmp_path, most_bytes=3 * MIB)) as (worker, app, _):
        await app.read_dead()
        for number, (each, code, words) in enumerate(wrong.values()):
            reply = await ask(app, each, message_id=f"id-{number}")
            assert (reply.code, words in reply.json["detail"]) == (code, True), reply.json
            dead = await app.buried(f"id-{number}")
            assert dead.headers["x-lane-body"] == each.address
        assert not worker.api.calls
        assert (await ask(app, kept, message_id="right")).status == "ok"
    store.close()


async def test_a_dead_letters_body_stays_and_its_replay_is_answered(vhost: Vhost, tmp_path: Path) -> None:
    store = BodyStore(f"file://{tmp_path}/bodies")
    body = images("[[fault: invalid x1]]", mebibytes=2)
    kept = await store.keep([body])
    async with serving(vhost.amqp_url, **settings(tmp_path)) as worker, requester(vhost.amqp_url) as app:
        await app.read_dead()
        asked = await app.publish(b"", headers=dict(kept.headers), message_id="dead")
        assert (await app.final(asked)).code == "provider_rejected"
        dead = await app.buried("dead")
        assert await store.fetch(kept) == body
        await app.channel.basic_publish(
            dead.body,
            exchange="lane.requests",
            routing_key=dead.headers["x-lane-routing-key"],
            properties=dead.properties,
        )
        await until(lambda: len(app.finals(asked)) == 2)
        assert app.finals(asked)[1].status == "ok"
        assert [int(call.headers["content-length"]) for call in worker.api.calls] == [len(body)] * 2
        await until(lambda: not list((tmp_path / "bodies").iterdir()))
    store.close()


async def test_a_store_that_is_away_delays_the_request_and_counts_no_attempt(vhost: Vhost, tmp_path: Path) -> None:
    store = BodyStore(f"file://{tmp_path}/bodies")
    kept = await store.keep([images("later", mebibytes=2)])
    folder = tmp_path / "bodies"
    folder.rename(tmp_path / "away")
    folder.write_bytes(b"no folder")
    async with serving(vhost.amqp_url, **settings(tmp_path)), requester(vhost.amqp_url) as app:
        await app.read_events()
        id = await app.publish(b"", headers=dict(kept.headers), message_id="later")
        await until(lambda: [each for each in app.events if each.json["event"] == "deferred"])
        folder.unlink()
        (tmp_path / "away").rename(folder)
        await until(lambda: app.finals(id), within_s=60)
        assert (app.finals(id)[0].status, app.finals(id)[0].headers["x-lane-attempt"]) == ("ok", 1)
    store.close()


async def test_twenty_megabytes_by_http_reach_the_provider_unchanged_and_leave_nothing_behind(
    vhost: Vhost, tmp_path: Path
) -> None:
    body = images("what is this?")
    async with serving(vhost.amqp_url, **settings(tmp_path)) as worker, gate(worker.settings) as url:
        status, answer = await post(url, body, idempotency_key="large")
        assert (status, answer["type"]) == (200, "message")
        (call,) = worker.api.calls
        assert int(call.headers["content-length"]) == len(body)
        await until(lambda: not list((tmp_path / "bodies").iterdir()))
        assert await post(url, body, idempotency_key="large") == (status, answer)
        assert (await post(url, body + b" ", idempotency_key="large"))[0] == 409
        assert len(worker.api.calls) == 1


async def test_a_wrong_large_body_is_refused_by_the_name_of_its_field_and_not_kept(
    vhost: Vhost, tmp_path: Path
) -> None:
    wrong = json.dumps({**json.loads(images("x", mebibytes=2)), "max_tokens": "many"}).encode()
    async with (
        serving(vhost.amqp_url, **settings(tmp_path, most_bytes=3 * MIB)) as worker,
        gate(worker.settings) as url,
    ):
        status, answer = await post(url, wrong)
        assert (status, "max_tokens" in answer["error"]["message"]) == (400, True)
        assert (await post(url, images("x", mebibytes=4)))[0] == 413
        status, answer = await post(url, images("x", mebibytes=2), x_lane_body="file:///etc/passwd")
        assert (status, "x-lane-body" in answer["error"]["message"]) == (400, True)
        assert not (tmp_path / "bodies").exists()


async def test_a_tenant_that_fills_its_share_with_delayed_bodies_is_refused_and_another_is_not(
    vhost: Vhost, tmp_path: Path
) -> None:
    small = settings(tmp_path, in_all_bytes=5 * MIB)
    async with serving(vhost.amqp_url, **small) as worker, gate(worker.settings) as url:
        body = images("next year", mebibytes=2)
        status, _ = await post(
            url, body, path="/v1/requests", x_lane_name="batch", x_lane_delay_ms=str(30 * 86_400_000)
        )
        assert status == 202
        status, answer = await post(url, body)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert "share of the store for large bodies is full" in answer["error"]["message"]
        other = BodyStore(f"file://{tmp_path}/bodies", in_all_bytes=5 * MIB)
        kept = await other.keep([images("now", mebibytes=1)], tenant="other")
        async with requester(vhost.amqp_url) as app:
            assert (await ask(app, kept)).status == "ok"
        other.close()


async def test_the_client_keeps_a_large_body_beside_the_broker(vhost: Vhost, tmp_path: Path) -> None:
    body = images("by client")
    async with (
        serving(vhost.amqp_url, **settings(tmp_path)) as worker,
        Client(vhost.amqp_url, bodies=f"file://{tmp_path}/bodies") as client,
    ):
        assert (await client.request(body, key="critical.tests.ask")).text
        assert (await client.request(json.loads(body), key="critical.tests.ask")).text
        (tmp_path / "file").write_bytes(body)
        with (tmp_path / "file").open("rb") as file:
            assert (await client.request(file, key="critical.tests.ask")).text
        assert [int(call.headers["content-length"]) >= len(body) for call in worker.api.calls] == [True] * 3
        await until(lambda: not list((tmp_path / "bodies").iterdir()))


async def post(url: str, body: bytes, *, path: str = "/v1/messages", **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.post(url + path, data=body, headers=named) as got:
        return got.status, await got.json()
