"""A body or an answer that is too large for a message lies beside the broker, and the message has its address and
digest. Who uses our client, the gateway or the command line sees the same answer as ever; what becomes of it if its
worker dies, its store is away, or it is altered or gone. Where answers have no store, one that is too large ends its
request at once."""

import asyncio
import base64
import hashlib
import json
import os
import shutil
import signal
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr
from yarl import URL

from lanekeeper import BodiesUnavailable, BodyError, Client, Final, Part
from lanekeeper.bodies import BodyStore
from lanekeeper.contract.messages import BodyAddress
from service.simulated.app import SimulatedOptions
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import call, gate
from tests.support.processes import environment, lanekeeper
from tests.support.redis import redis_server
from tests.support.requester import Got, Requester, requester
from tests.support.serving import meeting, serving
from tests.support.waiting import until
from tests.support.web_server import web_server
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
    async with serving(vhost, **settings(tmp_path)) as worker, requester(vhost) as app:
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
    async with meeting(vhost, **settings(tmp_path, most_bytes=3 * MIB)) as (worker, app, _):
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
    async with serving(vhost, **settings(tmp_path)) as worker, requester(vhost) as app:
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
    async with serving(vhost, **settings(tmp_path)), requester(vhost) as app:
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
    async with serving(vhost, **settings(tmp_path)) as worker, gate(worker) as url:
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
    async with serving(vhost, **settings(tmp_path, most_bytes=3 * MIB)) as worker, gate(worker) as url:
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
    async with serving(vhost, **small) as worker, gate(worker) as url:
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
        async with requester(vhost) as app:
            assert (await ask(app, kept)).status == "ok"
        other.close()


async def test_the_client_keeps_a_large_body_beside_the_broker(vhost: Vhost, tmp_path: Path) -> None:
    body = images("by client")
    async with (
        serving(vhost, **settings(tmp_path)) as worker,
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


BODY = b'{"prompt": "fetched", "system": "%b"}' % (b"x" * 2_000_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@asynccontextmanager
async def host(asked: list[web.BaseRequest]) -> AsyncIterator[str]:
    """A host with the body, which sends nothing to the first who asks."""

    async def body(request: web.BaseRequest) -> web.Response:
        asked.append(request)
        if len(asked) == 1:
            await asyncio.Event().wait()
        return web.Response(body=BODY)

    async with web_server(body) as url:
        yield f"{url}/bodies"


@pytest.mark.slow
async def test_a_worker_that_is_killed_while_it_fetches_a_body_is_replaced(vhost: Vhost, tmp_path: Path) -> None:
    asked: list[web.BaseRequest] = []
    async with FaultyAPI() as api, host(asked) as url, requester(vhost) as app:
        environ = environment(vhost, api, LANEKEEPER_BODIES__ALLOW=url, LANEKEEPER_BODIES__ALLOW_PRIVATE="true")
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as first:
            await first.ready()
            headers = {"x-lane-body": f"{url}/one", "x-lane-body-sha256": SHA256}
            id = await app.publish(b"", headers=headers, message_id="one")
            await until(lambda: asked)
            first.send(signal.SIGKILL)
            async with lanekeeper("serve", environ=environ, folder=tmp_path):
                reply = await app.final(id)

        assert (reply.status, len(asked), len(api.calls)) == ("ok", 2, 1)


TOKENS = 600_000
"""Four bytes each."""
KEY = "critical.tests.ask"


def large(words: str = "large", *, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"{words} [[tokens: {tokens}]]"}]
    return {"model": "claude-sonnet-5-5", "max_tokens": tokens, "messages": asked, **more}


def kept_of(reply: Got) -> BodyAddress:
    return BodyAddress(reply.headers["x-lane-body"], reply.headers["x-lane-body-sha256"])


async def got(url: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body, headers=named) as found:
        return found.status, await found.read()


async def test_twenty_megabytes_come_by_address_over_amqp_and_whole_by_client_and_http(
    vhost: Vhost, tmp_path: Path
) -> None:
    store = BodyStore(f"file://{tmp_path}/bodies")
    asked = large("twenty", tokens=5_200_000)
    async with (
        serving(vhost, **settings(tmp_path)) as worker,
        requester(vhost) as app,
        Client(vhost.amqp_url, bodies=store) as client,
        gate(worker) as url,
    ):
        reply = await app.ask(asked, message_id="big", within_s=120)
        assert (reply.status, reply.properties.content_type) == ("ok", "application/json")
        answer = await store.fetch(kept_of(reply))
        assert len(json.loads(answer)["content"][0]["text"]) > 20 * 1000 * 1000
        assert reply.json == {
            "type": "urn:lanekeeper:body",
            "address": reply.headers["x-lane-body"],
            "sha256": hashlib.sha256(answer).hexdigest(),
            "bytes": len(answer),
        }
        again = await app.ask(asked, message_id="big")
        assert (again.body, again.headers["x-lane-replayed"]) == (reply.body, True)
        told = await app.control({"result": "big"}, key="result")
        assert (told.body, kept_of(told)) == (reply.body, kept_of(reply))

        assert (await client.result("big")).body == answer
        assert (await client.request(asked, key=KEY, message_id="big")).body == answer
        status, whole = await got(f"{url}/v1/requests/big")
        assert (status, whole.endswith(b'"result": ' + answer + b"}")) == (200, True)
        assert len(worker.api.calls) == 1
        assert not worker.losses


async def test_a_streamed_answer_comes_in_parts_and_at_the_end_by_address(vhost: Vhost, tmp_path: Path) -> None:
    async with (
        serving(vhost, **settings(tmp_path)) as worker,
        Client(vhost.amqp_url, bodies=f"file://{tmp_path}/bodies") as client,
        gate(worker) as url,
    ):
        replies = [each async for each in client.stream(large(), key=KEY, message_id="s")]
        final = replies[-1]
        assert isinstance(final, Final)
        assert final.kept is not None
        assert "".join(each.text for each in replies if isinstance(each, Part)) == final.text
        assert len(final.text) > 2 * MIB

        fresh = await got(f"{url}/v1/messages", large("by http", stream=True))
        stored = await got(f"{url}/v1/messages", large("by http", stream=True), idempotency_key="stored")
        again = await got(f"{url}/v1/messages", large("by http", stream=True), idempotency_key="stored")
        texts = {text_of(each[1]) for each in (fresh, stored, again)}
        assert [len(each) > 2 * MIB for each in texts] == [True]
        assert len(worker.calls("by http")) == 2


async def test_every_way_over_http_gives_the_whole_answer(vhost: Vhost, tmp_path: Path) -> None:
    async with serving(vhost, **settings(tmp_path)) as worker, gate(worker) as url:
        status, answer = await got(f"{url}/v1/messages", large("way"), idempotency_key="way")
        assert (status, len(answer) > 2 * MIB, json.loads(answer)["type"]) == (200, True, "message")
        assert await got(f"{url}/v1/messages", large("way"), idempotency_key="way") == (200, answer)

        status, polled = await got(f"{url}/v1/requests/way?wait=10s")
        assert (status, polled.endswith(b'"result": ' + answer + b"}")) == (200, True)
        status, events = await got(f"{url}/v1/requests/way/events")
        assert events.endswith(b"data: " + polled + b"\n\n")
        assert events.count(b"event: completed") == 1
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/ws", max_msg_size=0) as ws:
            await ws.send_json({"type": "subscribe", "id": "way"})
            entries = [json.loads(await ws.receive_str()) for _ in range(2)]
        assert entries[-1]["kind"] == "completed"
        assert entries[-1]["data"] == json.loads(polled)
        async with Client(url) as client:
            assert (await client.result("way")).body == answer
            final = await client.request(large("by client"), key=KEY)
            assert len(final.text) > 2 * MIB
        assert len(worker.api.calls) == 2


async def test_a_client_without_the_store_is_told_where_the_answer_lies_or_gets_its_address(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with (
        serving(vhost, **settings(tmp_path)),
        Client(vhost.amqp_url) as without,
        Client(vhost.amqp_url, fetches_answers=False) as other,
    ):
        with pytest.raises(BodiesUnavailable, match=f"file://{tmp_path}/bodies/answer-.*bodies"):
            await without.request(large(), key=KEY, message_id="without")
        final = await other.result("without")
        assert final.kept is not None
    assert size_of(final.kept) == final.message["bytes"]


def size_of(kept: BodyAddress) -> int:
    return Path(URL(kept.address).path).stat().st_size


def text_of(events: bytes) -> str:
    """The text of a stream of Server-Sent Events, which must have come to its end."""
    data = [line.removeprefix(b"data: ") for line in events.split(b"\n") if line.startswith(b"data: ")]
    said = [json.loads(each) for each in data]
    assert said[-1]["type"] == "message_stop"
    return "".join(each.get("delta", {}).get("text", "") for each in said)


FEW_TOKENS = 20_000
"""Four bytes each, where the limit is 4 KiB."""
ASKED = {"prompt": f"a long one [[tokens: {FEW_TOKENS}]]", "max_tokens": FEW_TOKENS}


def low_limit(folder: Path, **more: Any) -> dict[str, Any]:
    return {"bodies": {"url": f"file://{folder}/bodies", "answers_over_bytes": 4096}, **more}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "calls", "left"), [("after_keep", 2, 2), ("after_store", 1, 1)])
async def test_a_worker_that_dies_before_its_reply_is_replaced(
    vhost: Vhost, tmp_path: Path, place: str, calls: int, left: int
) -> None:
    """Before the outcome is stored, the call is paid again; what was kept then is removed when its time is over."""
    async with FaultyAPI() as api, requester(vhost) as app:
        environ = environment(
            vhost, api, LANEKEEPER_BODIES__URL=f"file://{tmp_path}/bodies", LANEKEEPER_BODIES__ANSWERS_OVER_BYTES="4096"
        )
        async with lanekeeper(
            "serve", environ={**environ, "LANEKEEPER_FAILPOINTS": f"{place}:1"}, folder=tmp_path
        ) as it:
            await it.ready()
            asked = await app.publish(ASKED, message_id="one")
            await until(lambda: it.has_ended, within_s=60)
        assert not app.finals(asked)
        async with lanekeeper("serve", environ=environ, folder=tmp_path):
            reply = await app.final(asked)
            assert (reply.status, len(api.calls)) == ("ok", calls)
            async with Client(vhost.amqp_url, bodies=f"file://{tmp_path}/bodies") as client:
                assert len((await client.result("one", wait_s=60)).text) > 4 * FEW_TOKENS - 100
        assert len(list((tmp_path / "bodies").iterdir())) == left


async def test_while_its_store_is_away_an_answer_that_the_broker_takes_comes_in_the_reply(
    vhost: Vhost, tmp_path: Path
) -> None:
    (tmp_path / "bodies").write_bytes(b"no folder")
    async with serving(vhost, **low_limit(tmp_path)), requester(vhost) as app:
        reply = await app.ask(ASKED, within_s=60)

    assert (reply.status, "x-lane-body" in reply.headers) == ("ok", False)
    assert len(reply.text) > 4 * FEW_TOKENS - 100


async def test_an_answer_that_is_altered_or_gone_is_an_error_and_not_called_again(vhost: Vhost, tmp_path: Path) -> None:
    async with (
        serving(vhost, **low_limit(tmp_path)) as worker,
        gate(worker) as url,
        Client(vhost.amqp_url, bodies=f"file://{tmp_path}/bodies") as client,
    ):
        await client.request(ASKED, key=KEY, message_id="lost")
        (body,) = (tmp_path / "bodies").iterdir()
        body.write_bytes(b"{}")
        await is_lost(client, url, why="SHA-256")
        body.unlink()
        await is_lost(client, url, why="nothing is there")
        assert len(worker.api.calls) == 1


async def is_lost(client: Client, url: str, *, why: str) -> None:
    with pytest.raises(BodyError, match=why):
        await client.result("lost")
    for path in ("/v1/requests/lost", "/v1/requests/lost/events"):
        found = await call("GET", url + path)
        assert (found.status, why in found["detail"]) == (410, True)
    found = await call("POST", f"{url}/v1/messages", ASKED, idempotency_key="lost")
    assert (found.status, found["type"]) == (410, "error")
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/ws") as ws:
        await ws.send_json({"type": "subscribe", "id": "lost"})
        while (said := json.loads(await ws.receive_str()))["type"] != "problem":
            pass
    assert why in said["problem"]["detail"]


async def test_while_the_store_is_away_a_stored_answer_is_refused_for_a_while_and_names_no_path(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with serving(vhost, **low_limit(tmp_path)) as worker, gate(worker) as url:
        whole = await call("POST", f"{url}/v1/messages", ASKED, idempotency_key="away")
        folder = tmp_path / "bodies"
        folder.rename(tmp_path / "moved")
        folder.write_bytes(b"no folder")
        away = await call("GET", f"{url}/v1/requests/away")
        assert (away.status, away.headers["retry-after"]) == (503, "2")
        assert str(tmp_path) not in json.dumps(away.body)
        folder.unlink()
        shutil.move(tmp_path / "moved", folder)
        assert (await call("GET", f"{url}/v1/requests/away"))["result"] == whole.body


MANY_TOKENS = 4_400_000
"""Four bytes each: more than the 16 MiB that RabbitMQ 4 accepts as one message."""
MANY = 128 * MIB
"""Allowed size of answers, so high that the broker's limit is the one that applies."""
LANES = {"normal": {"slots": 8}}


def huge(name: str) -> dict[str, object]:
    return {"prompt": f"{name} [[tokens: {MANY_TOKENS}]]", "max_tokens": MANY_TOKENS}


@pytest.fixture
def store_url(tmp_path: Path) -> Iterator[SecretStr]:
    """Redis, with which large bodies have no store unless one is set."""
    with redis_server(tmp_path) as redis:
        yield SecretStr(redis.url)


def takes_it(version: str) -> bool:
    return int(version.split(".")[0]) < 4


@pytest.mark.every_version
@pytest.mark.parametrize(("stream", "deltas"), [(False, 8), (True, 8), (True, 1)], ids=["whole", "parts", "one part"])
async def test_an_answer_over_the_brokers_limit_ends_the_request_at_once_and_is_parked(
    vhost: Vhost, store_url: SecretStr, stream: bool, deltas: int
) -> None:
    """Also if a single event of its stream is over the limit."""
    simulated, results = SimulatedOptions(stream_deltas=deltas), {"answer_bytes": MANY}
    async with meeting(vhost, simulated=simulated, results=results, store_url=store_url) as (worker, app, _):
        await app.read_dead()
        reply = await app.ask(huge("too much"), headers={"x-lane-stream": stream}, message_id="big", within_s=60)
        if takes_it(vhost.version):
            assert reply.status == "ok"
            return
        assert (reply.code, reply.json["status"], reply.json["attempts"]) == ("answer_too_large", 502, 1)
        assert str(16 * MIB) in reply.json["detail"]
        assert "max_tokens" in reply.json["detail"]
        assert "LANEKEEPER_BODIES__URL" in reply.json["detail"]
        dead = await app.buried("big")
        assert dead.headers["x-lane-dead-code"] == "answer_too_large"
        again = await app.ask(huge("too much"), message_id="big")
        assert (again.code, len(worker.calls("too much"))) == ("answer_too_large", 1), "told again, not called again"
        assert not worker.losses


async def test_an_answer_over_our_own_limit_ends_the_same_way_on_every_broker(vhost: Vhost) -> None:
    async with serving(vhost, results={"answer_bytes": MIB}) as worker, requester(vhost) as app:
        reply = await app.ask({"prompt": "x [[tokens: 300000]]", "max_tokens": 300_000}, within_s=60)
        assert reply.code == "answer_too_large"
        assert str(MIB) in reply.json["detail"]
        assert "LANEKEEPER_RESULTS__ANSWER_BYTES" in reply.json["detail"]
        fits = await app.ask({"prompt": "y [[tokens: 250000]]", "max_tokens": 300_000}, within_s=60)
        assert (fits.status, len(fits.body) > 999_000) == ("ok", True)
        assert not worker.losses


async def test_eight_too_large_answers_occupy_no_slot_and_affect_no_other_request(
    vhost: Vhost, store_url: SecretStr
) -> None:
    """Afterwards their lane answers others, the publish connection is open, and no part of another stream is lost."""
    quick = {"prompt": "quick"}
    async with (
        serving(vhost, lanes=LANES, results={"answer_bytes": MANY}, store_url=store_url) as worker,
        requester(vhost) as app,
        requester(vhost) as other,
    ):
        await other.ask(quick)
        usual = await other.waits_s(5, pause_s=0.05)
        ids = [await app.publish(huge(f"n {n}"), key="normal.tests.ask", message_id=f"big-{n}") for n in range(8)]
        during = asyncio.create_task(other.waits_s(20, pause_s=0.05))
        streamed = await other.publish({"prompt": "a story [[tokens: 400]]"}, headers={"x-lane-stream": True})
        for each in ids:
            await until(lambda each=each: app.finals(each), within_s=90)
            assert takes_it(vhost.version) or app.finals(each)[0].code == "answer_too_large"
        print(f"waits of others: usual {max(usual):.3f} s, meanwhile {sorted(await during)[-3:]} s")
        assert statistics.median(await during) < max(2, 10 * max(usual))
        assert (await app.ask(quick, key="normal.tests.ask")).status == "ok"
        await until(lambda: other.finals(streamed))
        parts = [each for each in other.replies[streamed] if each.headers.get("x-lane-part") == "event"]
        assert [each.headers["x-lane-seq"] for each in parts] == list(range(len(parts)))
        assert json.loads(parts[-1].body)["type"] == "message_stop"
        assert not worker.losses
