"""An answer that is too large for a message lies beside the broker, and the reply has its address and digest. Who uses
our client, the gateway or the command line sees the same answer as ever."""

import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from lanekeeper import BodiesUnavailable, Client, Final, Part
from lanekeeper.bodies import BodyStore
from lanekeeper.contract.messages import BodyAddress
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.requester import Got, requester
from tests.support.serving import serving
from topology.lanes import MIB

TOKENS = 600_000
"""Four bytes each."""
KEY = "critical.tests.ask"


def large(words: str = "large", *, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"{words} [[tokens: {tokens}]]"}]
    return {"model": "claude-sonnet-5-5", "max_tokens": tokens, "messages": asked, **more}


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"bodies": {"url": f"file://{folder}/bodies", **more}}


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
        serving(vhost.amqp_url, **settings(tmp_path)) as worker,
        requester(vhost.amqp_url) as app,
        Client(vhost.amqp_url, bodies=store) as client,
        gate(worker.settings) as url,
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
        serving(vhost.amqp_url, **settings(tmp_path)) as worker,
        Client(vhost.amqp_url, bodies=f"file://{tmp_path}/bodies") as client,
        gate(worker.settings) as url,
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
    async with serving(vhost.amqp_url, **settings(tmp_path)) as worker, gate(worker.settings) as url:
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
        serving(vhost.amqp_url, **settings(tmp_path)),
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
