"""What ends a large request drops its body at once. An error in a local variable of the frame that raised it is a
circle, in which the body stays until Python's next collection of garbage; the event loop keeps cancelled timers, and
they the context of their request. A few such requests would fill the memory. So here the collector is off, and of many
bodies not even one may stay."""

import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lanekeeper import Client
from lanekeeper.bodies import BodyStore
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.contract.problems import LanekeeperError
from tests.support.brokers import Vhost
from tests.support.gate import gate
from tests.support.malicious import Asked, MaliciousProvider, Piece, error_body, head, sse, streamed, well
from tests.support.requester import Requester, requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until
from topology.lanes import MIB

pytestmark = pytest.mark.slow

BYTES = 3 * MIB
ROUNDS = 6
HELLO = {"role": "user", "content": "hello"}


def large(says: str, **fields: Any) -> dict[str, Any]:
    prompt = {"role": "user", "content": f"{says} " + "a" * BYTES}
    return {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": [HELLO, prompt], **fields}


def answer(asked: Asked) -> Iterator[Piece]:
    """The prompt says how the provider refuses it; a probe, which says nothing, is answered."""
    body = asked.body[:200]
    if b"forbidden" in body:  # perhaps the account's error: a call of our own has to find out
        yield head(403, body=error_body("no", type="permission_error"))
    elif b"rejected" in body:
        yield head(400, body=error_body("no"))
    elif b"overloaded" in body:
        yield head(529, body=error_body("later", type="overloaded_error"))
    elif b"breaks off" in body:
        yield from streamed([sse(error_body("later", type="overloaded_error"))])
    else:
        yield from well(asked)


@dataclass
class Ground:
    worker: RunningWorker
    url: str
    app: Requester
    client: Client
    store: BodyStore
    provider: MaliciousProvider

    async def post(self, path: str, body: bytes, *, status: int, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with aiohttp.ClientSession() as session, session.post(self.url + path, data=body, headers=named) as got:
            assert got.status == status, await got.text()

    async def fetched(self, kept: BodyAddress, *, code: str) -> None:
        reply = await self.app.ask(b"", headers=dict(kept.headers), within_s=60)
        assert reply.code == code


@asynccontextmanager
async def ground(vhost: Vhost, folder: Path) -> AsyncIterator[Ground]:
    bodies = {"url": f"file://{folder}/bodies"}
    store = BodyStore(bodies["url"])
    lanes = {"critical": {"max_attempts": 1}, "normal": {"max_attempts": 1}}
    async with (
        MaliciousProvider(answer) as provider,
        serving(vhost, base_url=provider.base_url, bodies=bodies, lanes=lanes, speakers=(vhost.user,)) as worker,
        gate(worker) as url,
        requester(vhost) as app,
        Client(vhost.amqp_url, bodies=bodies["url"]) as client,
    ):
        yield Ground(worker, url, app, client, store, provider)
    store.close()


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


Refuse = Callable[[Ground], Awaitable[None]]


async def item_of_a_message_batch(these: Ground) -> None:
    items = [{"custom_id": "right", "params": large("fine")}, {"custom_id": "wrong", "params": {"model": "m"}}]
    await these.post("/v1/messages/batches", json.dumps({"requests": items}).encode(), status=400)


async def body_that_the_gateway_parses_in_a_thread(these: Ground) -> None:
    await these.post("/v1/messages", json.dumps(large("fine", stream="yes")).encode(), status=400)


async def body_that_is_no_json(these: Ground) -> None:
    await these.post("/v1/messages", json.dumps(large("fine")).encode()[:-1], status=400)


async def submitted_body(these: Ground) -> None:
    await these.post("/v1/requests", json.dumps(large("fine", max_tokens=-1)).encode(), status=400)


async def call_that_the_provider_rejects(these: Ground) -> None:
    await these.post("/v1/messages", json.dumps(large("rejected")).encode(), status=400)


async def call_whose_error_is_judged(these: Ground) -> None:
    await these.post("/v1/messages", json.dumps(large("forbidden")).encode(), status=403)


async def call_that_fails_until_its_last_attempt(these: Ground) -> None:
    await these.post("/v1/messages", json.dumps(large("overloaded")).encode(), status=529)


async def call_whose_stream_breaks_off(these: Ground) -> None:
    body = json.dumps(large("breaks off", stream=True)).encode()
    async with aiohttp.ClientSession() as session, session.post(f"{these.url}/v1/messages", data=body) as got:
        assert b"overloaded_error" in await got.read()


async def call_that_is_answered(these: Ground) -> None:
    await these.post("/v1/messages", json.dumps(large("fine")).encode(), status=200)


async def clients_final_error(these: Ground) -> None:
    with pytest.raises(LanekeeperError):
        await these.client.request(large("rejected"), key="normal.tests.ask", timeout_s=30)


async def body_of_another_digest(these: Ground) -> None:
    kept = await these.store.keep([json.dumps(large("fine")).encode()])
    await these.fetched(BodyAddress(kept.address, "0" * 64), code="invalid_request")


async def fetched_body_that_is_no_json(these: Ground) -> None:
    await these.fetched(await these.store.keep([b"x" * BYTES]), code="invalid_request")


async def fetched_body_that_the_provider_rejects(these: Ground) -> None:
    await these.fetched(await these.store.keep([json.dumps(large("rejected")).encode()]), code="provider_rejected")


ALL: Mapping[str, Refuse] = {
    refuse.__name__: refuse
    for refuse in (
        item_of_a_message_batch,
        body_that_the_gateway_parses_in_a_thread,
        body_that_is_no_json,
        submitted_body,
        call_that_the_provider_rejects,
        call_whose_error_is_judged,
        call_that_fails_until_its_last_attempt,
        call_whose_stream_breaks_off,
        call_that_is_answered,
        clients_final_error,
        body_of_another_digest,
        fetched_body_that_is_no_json,
        fetched_body_that_the_provider_rejects,
    )
}


async def test_no_body_stays_until_the_next_collection(vhost: Vhost, tmp_path: Path) -> None:
    kept: dict[str, str] = {}
    async with ground(vhost, tmp_path) as these:
        for name, refuse in ALL.items():
            await refuse(these)
            with without_collector():
                for _ in range(ROUNDS):
                    await refuse(these)
                    these.provider.asked.clear()
                try:
                    await until(lambda: tracemalloc.get_traced_memory()[0] < BYTES, within_s=3)
                except (AssertionError, TimeoutError):
                    kept[name] = f"{tracemalloc.get_traced_memory()[0] / BYTES:.1f} bodies"
    assert kept == {}
