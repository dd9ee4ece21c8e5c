"""Applications that send the same request very often."""

import random

from tests.faults.ground import Ground


async def many_of_one(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    return await ground.load.burst(50)
