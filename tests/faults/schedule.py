"""Which fault happens when, and for how long: derived from a seed, so that it can be repeated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.faults import Fault

CALM_S = (3.0, 6.0)
"""The time between the end of one fault and the next, so that their effects can be told apart."""


@dataclass(frozen=True, slots=True)
class Planned:
    fault: Fault
    calm_s: float
    """The calm time before it."""
    lasts_s: float
    seed: int
    """The seed of the fault's own choices."""

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.fault.code} {self.fault.title}{lasts}, after {self.calm_s:.1f} s of calm"


def plan(faults: Sequence[Fault], *, seed: int, seconds: float, part: tuple[int, int] = (0, 1)) -> tuple[Planned, ...]:
    """Faults for at least so many seconds, in random order, each once before any comes again.

    `part`: the number of this run among several: each begins with another fault, so that together they inject every
    fault.
    Restarts take longer than is planned; whoever carries it out stops when its time is over.
    """
    rng = random.Random(seed)
    at, of = part
    first = [fault for n, fault in enumerate(faults) if n % of == at]
    others = [fault for n, fault in enumerate(faults) if n % of != at]
    found: list[Planned] = []
    planned_s = 0.0
    while planned_s < seconds:
        for bag in (first, others):
            for fault in rng.sample(bag, len(bag)):
                found.append(Planned(fault, rng.uniform(*CALM_S), rng.uniform(*fault.lasts_s), rng.randrange(2**32)))
                planned_s += found[-1].calm_s + found[-1].lasts_s
    return tuple(found)
