"""Worker processes are killed, stopped or paused, and die between any two steps."""

import asyncio
import random
import signal

from tests.faults.ground import Ground


async def killed(ground: Ground, rng: random.Random, _: float) -> str:
    worker = rng.choice(ground.workers)
    worker.send(signal.SIGKILL)
    return f"worker {worker.number}"


async def told_to_stop(ground: Ground, rng: random.Random, _: float) -> str:
    worker = rng.choice(ground.workers)
    worker.send(signal.SIGTERM)
    await worker.ended()
    return f"worker {worker.number}"


async def told_twice(ground: Ground, rng: random.Random, _: float) -> str:
    worker = rng.choice(ground.workers)
    worker.send(signal.SIGTERM)
    await asyncio.sleep(0.2)
    worker.send(signal.SIGTERM)
    await worker.ended()
    return f"worker {worker.number}"


async def frozen(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    worker = rng.choice(ground.workers)
    worker.send(signal.SIGSTOP)
    await asyncio.sleep(lasts_s)
    worker.send(signal.SIGCONT)
    return f"worker {worker.number}"


async def all_killed(ground: Ground, rng: random.Random, _: float) -> str:
    for worker in ground.workers:
        worker.send(signal.SIGKILL)
    await asyncio.sleep(0)
    return "all workers"


async def dying_between_steps(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    """One worker dies again and again, between any two of: store, publish, confirm, acknowledge."""
    worker = rng.choice(ground.workers)
    places = ("before_claim", "after_claim", "after_call", "after_store", "after_publish", "after_confirm", "after_ack")
    worker.environ["LANEKEEPER_FAILPOINTS"] = ",".join(f"{place}:0.01" for place in places)
    worker.send(signal.SIGKILL)
    await asyncio.sleep(lasts_s)
    del worker.environ["LANEKEEPER_FAILPOINTS"]
    worker.send(signal.SIGKILL)
    return f"worker {worker.number}"
