"""Many requests on one WebSocket: submitted, followed from any number on, cancelled."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.held_provider import HeldProvider
from tests.support.http_calls import call, submit
from tests.support.serving import serving

SLOW = "[[latency: 60s]] slow"
LONG = "a word " * 30


class Socket:
    """A connection, and what came on it."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.found: list[dict[str, Any]] = []

    async def say(self, type: str, **fields: Any) -> None:
        await self.ws.send_json({"type": type, **fields})

    async def submit(self, prompt: str, *, stream: bool = True, **fields: Any) -> None:
        body = {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": prompt}]}
        await self.say("submit", body={**body, "stream": stream}, **fields)

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Read until a message for which this holds."""
        async with asyncio.timeout(60):
            while True:
                found: dict[str, Any] = json.loads(await self.ws.receive_str())
                self.found.append(found)
                if holds(found):
                    return found

    async def ends(self, *ids: str) -> None:
        """Read until all these requests have ended."""
        missing = set(ids)
        while missing:
            found = await self.until(lambda each: each.get("kind") in ("completed", "failed", "cancelled"))
            missing -= {found["id"]}

    def entries(self, id: str) -> list[dict[str, Any]]:
        return [each for each in self.found if each["type"] == "entry" and each["id"] == id]

    def text(self, id: str) -> str:
        said = [each["data"]["delta"].get("text", "") for each in self.entries(id) if "delta" in each["data"]]
        return "".join(said)


@asynccontextmanager
async def socket(url: str, **headers: str) -> AsyncIterator[Socket]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/v1/ws", headers=named) as ws:
        yield Socket(ws)


async def test_many_requests_on_one_connection_each_get_their_own_entries_in_order(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url, socket(url) as own:
        ids = [f"w-{number}" for number in range(20)]
        for id in ids:
            await own.submit(f"request {id}.", id=id, ref=f"ref {id}", stream=id != "w-7")
        await own.ends(*ids)

        for id in ids:
            entries = own.entries(id)
            assert [each["number"] for each in entries] == list(range(1, len(entries) + 1))
            assert entries[-1]["data"]["result"]["content"][0]["text"] == f"echo: request {id}."
            assert own.text(id) == ("" if id == "w-7" else f"echo: request {id}.")
        refs = {each["ref"]: each["id"] for each in own.found if each["type"] == "submitted"}
        assert refs == {f"ref {id}": id for id in ids}


async def test_a_request_is_followed_on_another_connection_of_another_gateway_from_where_it_was(vhost: Vhost) -> None:
    async with (
        HeldProvider(parts=2) as provider,
        serving(vhost.amqp_url, base_url=provider.base_url) as worker,
        gate(worker.settings) as second,
    ):
        async with gate(worker.settings) as first, socket(first) as own:
            await own.submit(LONG, id="long")
            await own.until(lambda each: each.get("number") == 6)
        async with socket(second) as other:
            await other.say("subscribe", id="long", after=6)
            await other.until(lambda each: each.get("number") == 7)
            provider.go_on()
            await other.ends("long")

        entries = own.entries("long") + other.entries("long")
        assert [each["number"] for each in entries] == list(range(1, len(entries) + 1))
        assert own.text("long") + other.text("long") == entries[-1]["data"]["result"]["content"][0]["text"]


async def test_a_request_is_cancelled_and_one_that_is_left_is_followed_no_more(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url, socket(url) as own:
        await own.submit(SLOW, id="slow", subscribe=False)
        submitted = await submit(url, "[[held]] left")
        await own.say("subscribe", id=submitted["id"])
        await own.until(lambda each: each["type"] == "entry")
        await own.say("unsubscribe", id=submitted["id"])
        await own.until(lambda each: each["type"] == "unsubscribed")
        await worker.api.until(lambda: worker.api.running == 2)
        worker.api.release("left")
        await call("GET", f"{url}{submitted['status_url']}?wait=30s")
        await own.say("cancel", id="slow", ref="c")
        cancelling = await own.until(lambda each: each["type"] == "cancelling")
        assert (cancelling["ref"], cancelling["id"]) == ("c", "slow")
        assert cancelling["outcome"] in ("told", "recorded")
        await worker.api.until(lambda: worker.api.running == 0)

        await own.say("subscribe", id="slow")
        await own.ends("slow")
        assert own.entries("slow")[-1]["kind"] == "cancelled"
        assert own.entries(submitted["id"])[-1]["kind"] != "completed"


@pytest.mark.parametrize(
    ("rubbish", "code"), [(b"\x00\x01", 1003), ("nonsense", 1007), ('{"type": "shout"}', 1008), ("x" * 1_100_000, 1009)]
)
async def test_rubbish_closes_the_connection_with_a_reason(vhost: Vhost, rubbish: str | bytes, code: int) -> None:
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url, socket(url) as own:
        if isinstance(rubbish, bytes):
            await own.ws.send_bytes(rubbish)
        else:
            await own.ws.send_str(rubbish)
        closed = await own.ws.receive()

        assert closed.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        assert own.ws.close_code == code
        assert closed.extra or code == 1009  # of the library, without a reason


async def test_origin_and_key_are_checked_at_the_upgrade(vhost: Vhost) -> None:
    keys = {hash_of("lane-crm"): {"tenant": "crm"}}
    async with serving(vhost.amqp_url) as worker, gate(worker.settings) as url:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with socket(url, origin="https://evil.example"):
                pass
        assert refused.value.status == 403
        assert (await call("GET", f"{url}/v1/ws")).status == 426
        async with gate(worker.settings, keys=keys) as guarded:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with socket(guarded):
                    pass
            assert refused.value.status == 401
