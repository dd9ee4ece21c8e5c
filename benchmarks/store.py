"""Measures a claim and a completion in the store alone, in SQLite and in Redis, with 1, 16 and 64 requests at a time.

CPU is that of this process. It includes SQLite, which runs in this process, but not the Redis server. `./dev bench`
shows the store's part of a whole request.

    ./dev bench store [--steps 4000] [--quick]
"""

import argparse
import asyncio
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from benchmarks.harness.processes import redis
from consumers.state import open_store
from consumers.state.base import DEFAULT, Completion, Fingerprint, Granted, Identity, Store

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
        if redis_url := await stack.enter_async_context(redis(Path(folder))):
            stores["redis"] = redis_url
        else:
            print("no redis-server is installed: Redis is left out")
        print("a claim and a completion of 1 kB")
        for name, url in stores.items():
            namespace = f"bench-{uuid.uuid4().hex[:8]}"
            async with open_store(url, namespace=namespace, spec=DEFAULT) as store:
                for at_once in (1, 16, 64):
                    await measure(store, name, steps=steps if at_once > 1 else steps // 4, at_once=at_once)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--quick", action="store_true", help="400 steps")
    options = parser.parse_args()
    uvloop.run(main(400 if options.quick else options.steps))
