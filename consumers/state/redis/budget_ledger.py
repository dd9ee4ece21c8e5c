"""What a process has to tell Redis of one account with its next step, and what becomes of it where that step fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from consumers.limits import learned
from consumers.limits.account import Account
from consumers.limits.base import Heard
from consumers.limits.learned import Learned
from consumers.limits.order import Waiter


@dataclass(slots=True)
class Sent:
    """What one step has taken along."""

    back: list[dict[str, Any]]
    lower: list[float]
    heard: int
    """So many of what was heard are in `learned`."""
    has_changed: bool


@dataclass(slots=True)
class Ledger:
    """Of one account."""

    books: Account
    back: list[dict[str, Any]] = field(default_factory=list)
    lower: list[float] = field(default_factory=lambda: [inf, inf, inf])
    heard: list[Heard] = field(default_factory=list)
    """Since what we know of what was learned."""
    version: int = 0
    has_changed: bool = False
    is_due: bool = False
    stepped: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    timer: asyncio.Handle | None = None
    fires_s: float = -inf
    """When; uvloop's handle of what is due within half a millisecond does not tell."""
    told_s: float = -inf
    unreadable: str = ""
    """Why what others have learned could not be read, as it was logged last."""
    _written: tuple[Learned, str] | None = None

    def give_back(self, lane: int, over: Sequence[float], own: Sequence[float]) -> None:
        """What was reserved and not used; below 0: used beyond it."""
        self.back.append({"lane": lane + 1, "over": list(over), "own": list(own)})

    def learned(self) -> str:
        """What was learned, as Redis keeps it."""
        known = self.books.learned()
        if self._written is None or self._written[0] != known:
            self._written = known, learned.write(known)
        return self._written[1]

    def lowered(self, before: Sequence[float]) -> bool:
        """Whether the provider turned out to have less than was there before."""
        found = False
        for each, bucket in enumerate(self.books.buckets):
            if bucket.level < before[each]:
                self.lower[each] = min(self.lower[each], max(0.0, bucket.level))
                found = True
        return found

    def asked(self, waiters: Sequence[Waiter], *, room: int, now_s: float) -> tuple[dict[str, Any], Sent]:
        """What the script is told, and from then on is told no more. `room`: so many may be granted."""
        books = self.books
        told = Sent(self.back, self.lower, len(self.heard), self.has_changed)
        self.back, self.lower, self.has_changed = [], [inf, inf, inf], False
        return {
            "limits": list(books.per_minute()),
            "bursts": [bucket.burst for bucket in books.buckets],
            "most": [bucket.most for bucket in books.buckets],
            "guessed": list(books.guessed),
            "stopped_until": max(books.paused_until_s, books.held_until_s, 0.0),
            "version": self.version,
            "changed": told.has_changed,
            "back": told.back,
            "lower": [-1 if each == inf else each for each in told.lower],
            "waiters": [
                {"lane": each.lane + 1, "age": now_s - each.arrived_s, "amounts": list(each.amounts)}
                for each in waiters
            ],
            "sums": [list(books.lines.sums(lane)) for lane in range(len(books.shares))],
            "room": room,
            "turns": books.turns(),
        }, told

    def failed(self, told: Sent) -> None:
        """Whether it was counted is not known: what was given back is given up, what was used beyond is told again."""
        for each in told.back:
            each["over"] = [min(0.0, over) for over in each["over"]]
        self.back = [each for each in told.back if any(each["over"])] + self.back
        self.has_changed = self.has_changed or told.has_changed
