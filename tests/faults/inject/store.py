"""The store is locked, full or unreachable."""

import asyncio
import random

from tests.faults.ground import Ground
from tests.faults.store import FileStore, RedisStore


async def locked(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    await _file(ground).lock(lasts_s)
    return "store"


async def full(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    await _file(ground).fill(lasts_s)
    return "store"


async def gone(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    line = _redis(ground).line
    await line.refuse()
    line.reset()
    await asyncio.sleep(lasts_s)
    await line.mend()
    return "Redis"


async def silent(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    line = _redis(ground).line
    line.freeze()
    await asyncio.sleep(lasts_s)
    await line.mend()
    return "Redis"


def _file(ground: Ground) -> FileStore:
    assert isinstance(ground.store, FileStore)
    return ground.store


def _redis(ground: Ground) -> RedisStore:
    assert isinstance(ground.store, RedisStore)
    return ground.store
