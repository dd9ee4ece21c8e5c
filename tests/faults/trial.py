"""Runs faults under load, one after the other, and collects the results."""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from tests.faults.checker import Verdict
from tests.faults.faults import FAULTS, Fault
from tests.faults.ground import SETTLED_S, Ground
from tests.faults.history import Disturbed

Made = Callable[..., AbstractAsyncContextManager[Ground]]
"""`ground` for a test (`conftest.py`)."""
ANSWERED_WITHIN_S = 90.0
"""Time after the last fault, before a request without an answer counts as lost."""
FETCHED_WITHIN_S = 10.0


def fault(title: str) -> Fault:
    """The fault with that name."""
    return next(each for each in FAULTS if each.title == title)


async def inject(ground: Ground, found: Fault, *, lasts_s: float, rng: random.Random) -> Disturbed:
    """Cause one fault and record it; waits first until all workers run, so that it affects them."""
    await ground.crew.ready()
    in_flight, at_s = ground.load.in_flight, time.monotonic()
    against = await found.inject(ground, rng, lasts_s)
    made = Disturbed(
        at_s=at_s,
        healed_s=time.monotonic(),
        code=found.code,
        title=found.title,
        against=against,
        in_flight=in_flight,
    )
    ground.history.add(made)
    return made


async def broken(
    ground: Ground, *faults: tuple[str, float], calm_s: float = 3.0, answered_within_s: float = ANSWERED_WITHIN_S
) -> Verdict:
    """Send requests all the time, cause each of the faults (title, seconds), and judge. `calm_s`: before and after
    each."""
    rng = random.Random(len(faults))
    async with ground.load.asking():
        await asyncio.sleep(SETTLED_S)
        for title, lasts_s in faults:
            await asyncio.sleep(calm_s)
            await inject(ground, fault(title), lasts_s=lasts_s, rng=rng)
        await asyncio.sleep(calm_s)
    return await judged(ground, answered_within_s=answered_within_s)


async def judged(
    ground: Ground, *, answered_within_s: float = ANSWERED_WITHIN_S, store_was_lost: bool = False
) -> Verdict:
    """After the last request: wait for answers, fetch the results that could not be sent, and judge."""
    await ground.load.answered(within_s=answered_within_s)
    await ground.load.fetched(within_s=FETCHED_WITHIN_S)
    return ground.verdict(store_was_lost=store_was_lost)
