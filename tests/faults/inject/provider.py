"""The provider refuses calls, hangs, breaks connections, sends nonsense, or cannot be reached."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from tests.faults.ground import Ground


def failing(**shares: float) -> Callable[[Ground, random.Random, float], Awaitable[str]]:
    """Let the simulated API fail this share of its calls."""

    async def fails(ground: Ground, rng: random.Random, lasts_s: float) -> str:
        ground.misbehave(**shares)
        await asyncio.sleep(lasts_s)
        ground.misbehave()
        return "provider"

    return fails


async def limited(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    ground.misbehave(**{"rate_limited retry_after=1": 0.5})
    await asyncio.sleep(lasts_s)
    ground.misbehave()
    return "provider"


async def down(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    await ground.provider_line.refuse()
    ground.provider_line.reset()
    await asyncio.sleep(lasts_s)
    await ground.provider_line.mend()
    return "provider"


async def silent(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    ground.provider_line.freeze()
    await asyncio.sleep(lasts_s)
    await ground.provider_line.mend()
    return "provider"
