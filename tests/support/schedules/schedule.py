"""A schedule is a string of bytes that says what happens in a world: the same each time.

    run(schedule)       raises Violation, with what happened, where a promise was not kept

Each turn takes two bytes. The first says what happens next: below `FAULTS_FROM` one of the things that would happen
anyway (an operation takes effect, a frame arrives, a message is delivered, time passes), chosen among those that are
possible; above, a fault. All zeros is a world without faults, so that a failing schedule shrinks towards it. After the
last byte there are no more faults, and everything has to come to its end.
"""

import random
from collections.abc import Mapping

from consumers.settle import Settler
from consumers.state.sqlite.requests import Requests
from tests.support.schedules.faults import FAULTS, publishes
from tests.support.schedules.world import Move, World

FAULTS_FROM = 196


def run(
    schedule: bytes, *, settler: type[Settler] = Settler, rows: type[Requests] = Requests, counts: bool = True
) -> World:
    """Let two requests go their way through it. Raises Violation."""
    before = random.getstate()
    random.seed(1)  # what is drawn to spread retries
    world = World(settler=settler, rows=rows, counts=counts)
    try:
        for _ in range(2):
            world.publish(world.request())
        for first, second in zip(schedule[::2], schedule[1::2], strict=True):
            world.happen(*_next(world, first, second))
        world.end()
    finally:
        world.close()
        random.setstate(before)
    return world


def with_faults(faults: Mapping[int, tuple[int, int]]) -> bytes:
    """A schedule in which all goes well, but for a fault (its place in `FAULTS`, and what it chooses) at some turns."""
    length = max(faults, default=-1) + 1
    turns = [(FAULTS_FROM + fault[0], fault[1]) if (fault := faults.get(at)) else (0, 0) for at in range(length)]
    return bytes(byte for turn in turns for byte in turn)


def _next(world: World, first: int, second: int) -> Move:
    if first >= FAULTS_FROM:
        return FAULTS[(first - FAULTS_FROM) % len(FAULTS)](world, second)
    if moves := world.moves():
        return moves[first % len(moves)]
    return publishes(world, second) if first else Move("nothing", lambda: None)
