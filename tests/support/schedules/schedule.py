"""A schedule is a string of bytes that determines what happens in a world: the same bytes, the same course.

    run(schedule)       raises Violation, with what happened, if a promise was broken

Each turn takes two bytes. The first chooses what happens next: below `FAULTS_FROM`, one of the normal moves that are
possible (an operation takes effect, a frame arrives, a message is delivered, time passes); from there on, a fault. All
zeros means no faults, so a failing schedule shrinks towards a normal course. After the last byte there are no more
faults, and everything must complete.
"""

import random
from collections.abc import Mapping

from consumers.settle import Settler
from consumers.state.sqlite.tables import Tables
from tests.support.schedules.faults import FAULTS, publishes
from tests.support.schedules.world import Move, World

FAULTS_FROM = 196


def run(
    schedule: bytes, *, settler: type[Settler] = Settler, rows: type[Tables] = Tables, counts: bool = True
) -> World:
    """Run a schedule that begins with two requests. Raises Violation."""
    before = random.getstate()
    random.seed(1)  # fixes the random pauses of retries
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
    """A schedule with only these faults. Keys: turns; values: the fault's index in `FAULTS`, and its choice byte."""
    length = max(faults, default=-1) + 1
    turns = [(FAULTS_FROM + fault[0], fault[1]) if (fault := faults.get(at)) else (0, 0) for at in range(length)]
    return bytes(byte for turn in turns for byte in turn)


def _next(world: World, first: int, second: int) -> Move:
    if first >= FAULTS_FROM:
        return FAULTS[(first - FAULTS_FROM) % len(FAULTS)](world, second)
    if moves := world.moves():
        return moves[first % len(moves)]
    return publishes(world, second) if first else Move("nothing", lambda: None)
