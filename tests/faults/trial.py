"""Runs faults under load, one after the other, and collects the results."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from tests.faults.checker import SLOTS_LOST, Verdict, Violation
from tests.faults.faults import FAULTS, Fault
from tests.faults.ground import SETTLED_S, SLOTS, Ground
from tests.faults.history import Disturbed

Judge = Callable[[Ground], Awaitable[Verdict]]
Made = Callable[..., AbstractAsyncContextManager[Ground]]
"""`ground` for a test (`conftest.py`)."""
ANSWERED_WITHIN_S = 90.0
"""Time after the last fault, before a request without an answer counts as lost."""
CALM_S = 3.0
"""Before and after each fault."""
FETCHED_WITHIN_S = 10.0
HELD_S = 3.0
"""How long each request takes that shows whether all slots work; less than `CALL_TIMEOUT_S` in `ground.PATIENT`."""
TRIES = 3
"""A worker that has just lost a connection may not consume yet, so a second burst may show what the first did not."""


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


async def broken(ground: Ground, *faults: tuple[str, float], judge: Judge | None = None) -> Verdict:
    """Send requests all the time, cause each of the faults (title, seconds), and judge."""
    rng = random.Random(len(faults))
    async with ground.load.asking():
        await asyncio.sleep(SETTLED_S)
        for title, lasts_s in faults:
            await asyncio.sleep(CALM_S)
            await inject(ground, fault(title), lasts_s=lasts_s, rng=rng)
        await asyncio.sleep(CALM_S)
    return await (judge or judged_with_slots)(ground)


async def judged(
    ground: Ground, *, answered_within_s: float = ANSWERED_WITHIN_S, store_was_lost: bool = False
) -> Verdict:
    """After the last request: wait for answers, fetch the results that could not be sent, and judge."""
    await ground.load.answered(within_s=answered_within_s)
    await ground.load.fetched(within_s=FETCHED_WITHIN_S)
    return ground.verdict(store_was_lost=store_was_lost)


async def judged_with_slots(ground: Ground) -> Verdict:
    """Judge, and see whether as many requests can run at once as the workers have slots."""
    await ground.load.answered(within_s=ANSWERED_WITHIN_S)
    lost = await _slots_lost(ground)
    verdict = await judged(ground)
    return replace(verdict, violations=(*verdict.violations, *lost))


async def _slots_lost(ground: Ground) -> list[Violation]:
    await ground.crew.ready()
    wanted = sum(SLOTS.values()) * len(ground.workers)
    most = 0
    for _ in range(TRIES):
        await ground.load.at_once(
            {lane: slots * len(ground.workers) for lane, slots in SLOTS.items()}, latency_s=HELD_S
        )
        end_s = time.monotonic() + 2 * HELD_S
        while most < wanted and time.monotonic() < end_s:
            most = max(most, ground.api.running)
            await asyncio.sleep(0.02)
        await ground.load.answered(within_s=ANSWERED_WITHIN_S)
        if most >= wanted:
            return []
    return [Violation(SLOTS_LOST, "", f"{most} of {wanted} work")]
