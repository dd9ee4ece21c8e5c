"""What the store costs: a claim and a completion by themselves, and whole requests with the store and without.

By themselves: each engine at 1, 16 and 64 at once. Whole requests: requester and worker in this process, a simulated
provider that answers at once in another; "none" is a store that grants everything and keeps nothing. Its rounds are
made in turns, because machines are noisy. CPU is this process's alone: SQLite's is in it, Redis's own is not.

    .venv/bin/python benchmarks/store.py [--rounds 5] [--requests 1500] [--at-once 50] [--steps 4000]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self
from unittest.mock import patch

import ground
import uvloop
from overhead import PROMPT, Round, measured

from consumers.state.base import Completion, Copy, Granted, Held, Identity, Store
from consumers.state.opening import open_store
from consumers.state.spec import DEFAULT
from lanekeeper import Client
from service.worker import running as worker
from service.worker.assembly import assemble

ANSWER = b"x" * 1000
NONE = "none"


class Forgetful:
    """What it costs to have no store: grants everything, keeps nothing."""

    trouble = None

    async def claim(self, identity: Identity, copy: Copy) -> Granted:
        return Granted(token=1)

    async def complete(
        self, identity: Identity, copy: Copy, completion: Completion, *, token: int | None
    ) -> Completion:
        return completion

    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Any]:
        return {}

    async def hold(self, name: str, owner: str, *, for_s: float) -> None:
        return None

    async def probe(self) -> None:
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


async def by_itself(name: str, url: str, steps: int) -> None:
    async with open_store(url, namespace=f"bench-{uuid.uuid4().hex[:8]}", spec=DEFAULT) as store:
        for at_once in (1, 16, 64):
            await measured(steps // 10, at_once, lambda: _claim_and_complete(store))
            found = await measured(steps if at_once > 1 else steps // 4, at_once, lambda: _claim_and_complete(store))
            each = f"{1000 * at_once / found.per_s:6.2f} ms each"
            print(f"  {name:<7} {at_once:3} at once  {found.per_s:7.0f}/s  {each}  {found.cpu_ms:.3f} CPU-ms")


async def _claim_and_complete(store: Store) -> None:
    me = Identity("benchmark", uuid.uuid4().hex)
    copy = Copy(body_hash=b"h" * 16, mark=b"m" * 16, redelivered=False)
    claim = await store.claim(me, copy)
    assert isinstance(claim, Granted)
    headers: dict[str, str | int] = {
        "x-lane-name": "critical",
        "x-lane-model": "model",
        "x-lane-attempt": 1,
        "x-lane-wait-ms": 3,
    }
    completion = Completion(status="ok", body=ANSWER, headers=headers, ended_ms=1)
    assert await store.complete(me, copy, completion, token=claim.token) == completion


@asynccontextmanager
async def a_house(broker_url: str, base_url: str, store_url: str, at_once: int) -> AsyncIterator[Any]:
    """One worker on that store, and what sends it a request."""
    settings = ground.settings(
        broker_url, base_url, lanes={"critical": {"slots": at_once}}, namespace=f"bench-{uuid.uuid4().hex[:8]}"
    )
    opened = Forgetful() if store_url == NONE else open_store(store_url, namespace=settings.namespace, spec=DEFAULT)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        with patch("service.worker.assembly.open_store", lambda *_, **__: opened):
            parts = await stack.enter_async_context(assemble(settings, declares=True))
        client = await stack.enter_async_context(Client(broker_url, names=parts.names))
        working = asyncio.create_task(worker.run(parts, stop=stop, grace_s=5))
        body = json.dumps(
            {"model": "claude-haiku-5-5", "max_tokens": 100, "messages": [{"role": "user", "content": PROMPT}]}
        ).encode()

        async def request() -> None:
            await client.request(body, key="critical.benchmark.store")

        yield request
        stop.set()
        await working


async def whole(stores: Mapping[str, str], *, rounds: int, requests: int, at_once: int) -> None:
    found: dict[str, list[Round]] = {name: [] for name in stores}
    async with AsyncExitStack() as stack:
        broker_url = await stack.enter_async_context(ground.broker())
        base_url = await stack.enter_async_context(ground.provider())
        houses = {
            name: await stack.enter_async_context(a_house(broker_url, base_url, url, at_once))
            for name, url in stores.items()
        }
        for request in houses.values():
            await measured(requests // 4, at_once, request)
        for _ in range(rounds):
            for name, request in houses.items():
                found[name].append(await measured(requests, at_once, request))
    without = statistics.median(each.cpu_ms for each in found[NONE])
    for name, made in found.items():
        per_s = statistics.median(each.per_s for each in made)
        cpu_ms = statistics.median(each.cpu_ms for each in made)
        print(f"  {name:<7} {per_s:6.0f} requests/s  {cpu_ms:.3f} CPU-ms each, of it the store {cpu_ms - without:+.3f}")


async def main(options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lanekeeper-bench-"))
        stores = {NONE: NONE, "sqlite": f"sqlite:///{folder}/store.sqlite"}
        redis = await stack.enter_async_context(ground.redis())
        if redis is None:
            print("no redis-server is installed: without it")
        else:
            stores["redis"] = redis
        print("a claim and a completion of 1 kB")
        for name, url in stores.items():
            if url != NONE:
                await by_itself(name, url.replace("store.sqlite", "alone.sqlite"), options.steps)
        print(f"whole requests, {options.at_once} at once, {options.rounds} rounds of {options.requests}; medians")
        await whole(stores, rounds=options.rounds, requests=options.requests, at_once=options.at_once)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4000)
    uvloop.run(main(parser.parse_args()))
