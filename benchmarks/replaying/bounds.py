"""For comparison: the waits of a lane that has its own provider account. Pure."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replaying.load import Ask
from benchmarks.replaying.scenarios import LANES, Scenario
from consumers.limits.base import Amounts

TRAVEL_S = 0.011
"""The average time to the provider and back."""


@dataclass(frozen=True)
class Own:
    """An account with the part `part` of each limit. Its buckets hold the part `deep` of what the provider's buckets
    hold."""

    part: float
    deep: float

    @classmethod
    def of(cls, scenario: Scenario, lane: str) -> "Own":
        """The account that corresponds to a lane's share. The top lane's account also gets the part that is no lane's
        share."""
        shares = scenario.spec.shares
        is_first = lane == LANES[0]
        part = 1 - sum(share for name, share in shares.items() if name != lane) if is_first else shares[lane]
        return cls(part, shares[lane])

    def __str__(self) -> str:
        return f"own {100 * self.part:.0f} %, {100 * self.deep:.0f} % deep"


def own_starts_s(asks: Sequence[Ask], own: Own, *, limits: Amounts, bucket_s: float) -> list[float]:
    """When each request of a lane with its own account would start, in the order of arrival. As at the gate, the
    amounts that a request is expected to use are taken when it starts, and corrected when it is answered. A request
    that is larger than a bucket starts when the bucket is full."""
    per_s = [own.part * limit / 60 for limit in limits]
    most = [max(1.0, own.deep * limit * bucket_s / 60) for limit in limits]
    levels, at_s = list(most), 0.0
    settlements: list[tuple[float, Amounts]] = []
    found: list[float] = []

    def forward(to_s: float) -> None:
        nonlocal at_s
        for each in range(3):
            levels[each] = min(most[each], levels[each] + (to_s - at_s) * per_s[each])
        at_s = to_s

    for ask in asks:
        wanted = ask.reserved or ask.used
        now_s = max(ask.arrived_s, at_s)
        while True:
            while settlements and settlements[0][0] <= now_s:
                when_s, back = heapq.heappop(settlements)
                forward(when_s)
                levels[:] = [min(full, level + more) for full, level, more in zip(most, levels, back, strict=True)]
            forward(now_s)
            missing = (
                (min(amount, full) - level) / rate
                for amount, full, level, rate in zip(wanted, most, levels, per_s, strict=True)
            )
            if (in_s := max(missing)) <= 1e-9:
                break
            now_s = min(now_s + in_s, settlements[0][0]) if settlements else now_s + in_s
        levels[:] = [level - amount for level, amount in zip(levels, wanted, strict=True)]
        found.append(now_s)
        back = Amounts(*(amount - used for amount, used in zip(wanted, ask.used, strict=True)))
        heapq.heappush(settlements, (now_s + ask.takes_s + TRAVEL_S, back))
    return found
