"""Measures a claim and a completion in the store alone, in SQLite and in Redis, with 1, 16 and 64 requests at a time.

CPU is that of this process. It includes SQLite, which runs in this process, but not the Redis server. `./dev bench`
shows the store's part of a whole request.

    ./dev bench store [--steps 4000]
"""

import argparse
import asyncio
import tempfile
import time
import uuid
from contextlib import AsyncExitStack

import ground
import uvloop

from consumers.state.base import Completion, Fingerprint, Granted, Identity, Store
from consumers.state.opening import open_store
from consumers.state.spec import DEFAULT

ANSWER = b"x" * 1000


async def measure(store: Store, name: str, *, steps: int, at_once: int) -> None:
    await _together(store, steps // 10, at_once)
    wall, cpu = time.perf_counter(), time.process_time()
    await _together(store, steps, at_once)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    each = f"{1000 * at_once * wall / steps:6.2f} ms each"
    print(f"  {name:<7} {at_once:3} at once  {steps / wall:7.0f}/s  {each}  {1000 * cpu / steps:.3f} CPU-ms")


async def _together(store: Store, steps: int, at_once: int) -> None:
    left = iter(range(steps))

    async def runner() -> None:
        for _ in left:
            await _claim_and_complete(store)

    await asyncio.gather(*(runner() for _ in range(at_once)))


async def _claim_and_complete(store: Store) -> None:
    me = Identity("benchmark", uuid.uuid4().hex)
    fingerprint = Fingerprint(body_hash=b"h" * 16, mark=b"m" * 16, redelivered=False)
    claim = await store.claim(me, fingerprint)
    assert isinstance(claim, Granted)
    headers: dict[str, str | int] = {
        "x-lane-name": "critical",
        "x-lane-model": "model",
        "x-lane-attempt": 1,
        "x-lane-wait-ms": 3,
    }
    completion = Completion(status="ok", body=ANSWER, headers=headers, ended_ms=1)
    assert await store.complete(me, fingerprint, completion, token=claim.token) == completion


async def main(steps: int) -> None:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lanekeeper-bench-"))
        stores = {"sqlite": f"sqlite:///{folder}/store.sqlite"}
        redis = await stack.enter_async_context(ground.redis())
        if redis is None:
            print("no redis-server is installed: Redis is left out")
        else:
            stores["redis"] = redis
        print("a claim and a completion of 1 kB")
        for name, url in stores.items():
            namespace = f"bench-{uuid.uuid4().hex[:8]}"
            async with open_store(url, namespace=namespace, spec=DEFAULT) as store:
                for at_once in (1, 16, 64):
                    await measure(store, name, steps=steps if at_once > 1 else steps // 4, at_once=at_once)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    uvloop.run(main(parser.parse_args().steps))
