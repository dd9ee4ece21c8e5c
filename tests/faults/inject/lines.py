"""The connections between workers and broker."""

import asyncio
import random

from tests.faults.ground import Ground
from tests.faults.proxy import FROM


async def blackhole(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    worker = rng.choice(ground.workers)
    for line in ground.lines_of(worker):
        line.freeze()
    await _held(ground, lasts_s)
    return f"worker {worker.number}"


async def blackhole_for_all(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.freeze()
    await _held(ground, lasts_s)
    return "all workers"


async def half_open(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    worker = rng.choice(ground.workers)
    for line in ground.lines_of(worker):
        line.freeze(FROM)
    await _held(ground, lasts_s)
    return f"worker {worker.number}"


async def slow(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.slow(delay_s=0.4, jitter_s=0.3, bytes_per_s=64_000)
    await _held(ground, lasts_s)
    return "all workers"


async def reset(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.reset()
    await asyncio.sleep(0)
    return "all workers"


async def garbled(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.garble()
    await asyncio.sleep(0)
    return "all workers"


async def cut(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.cut(after_bytes=rng.randrange(1, 500))
    await _held(ground, 0.5)
    return "all workers"


async def _held(ground: Ground, lasts_s: float) -> None:
    try:
        await asyncio.sleep(lasts_s)
    finally:
        for line in ground.every_line:
            await line.mend()
