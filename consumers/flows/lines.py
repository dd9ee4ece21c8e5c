"""Decides which posts to webhooks run now, which wait in memory, and which go back to the broker for a while.

Each endpoint of each tenant has a line of its own, so that a slow endpoint holds back its own posts alone. Of the
places for posts, and of the memory for those that wait, a tenant gets one more only while more than it has are free:
there is always room for the next tenant.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cachetools import LRUCache

from topology.lanes import MIB

PLACES: Final = 128
"""How many posts a process makes at a time."""
SLOW_PLACES: Final = 64
"""How many of them may go to endpoints that are not known to be quick."""
AT_ONCE: Final = 4
"""How many of them may go to one endpoint."""
QUICK_AT_ONCE: Final = 16
"""The same for an endpoint whose last answer came within `QUICK_S`."""
QUICK_S: Final = 2.0
WAITING: Final = 128
WAITING_BYTES: Final = 32 * MIB
"""How many posts wait in memory, and of which size together."""
WAITING_IN_LINE: Final = 16
WAITS_S: Final = 30.0
"""So long a post waits in memory."""
LEAST_S: Final = 0.5
LONGEST_S: Final = 300.0
"""So long a post goes back to the broker. An endpoint that is quick again is found out after the longest time."""
HELD: Final = PLACES + WAITING
"""How many messages a process takes at most."""
KNOWN: Final = 10_000


class Line(NamedTuple):
    """The posts of one tenant to one endpoint (scheme, host and port)."""

    tenant: str
    endpoint: str


@dataclass(slots=True, eq=False)
class PostPlace:
    """The right to make one post, until `leave`."""

    line: Line
    is_quick: bool
    is_left: bool = False


@dataclass(slots=True, eq=False)
class _WaitingPost:
    line: Line
    turn: "asyncio.Future[PostPlace | float | None]"


def _has_come(waiter: _WaitingPost) -> bool:
    return waiter.turn.done() and not waiter.turn.cancelled()


class _Shared:
    """Something of which there is a limited amount, shared by tenants."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used: Counter[str] = Counter()
        self.total = 0

    def has_room(self, tenant: str, amount: int = 1) -> bool:
        return self.used[tenant] + amount <= self._limit - self.total

    def take(self, tenant: str, amount: int = 1) -> None:
        self.used[tenant] += amount
        self.total += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        self.used[tenant] -= amount
        self.total -= amount
        if not self.used[tenant]:
            del self.used[tenant]


@dataclass(slots=True, eq=False)
class PostLines:
    """The lines of one process."""

    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)
    running: Counter[Line] = field(default_factory=Counter, init=False)
    _places: _Shared = field(default_factory=lambda: _Shared(PLACES), init=False)
    _slow_places: _Shared = field(default_factory=lambda: _Shared(SLOW_PLACES), init=False)
    _memory: _Shared = field(default_factory=lambda: _Shared(WAITING), init=False)
    _memory_bytes: _Shared = field(default_factory=lambda: _Shared(WAITING_BYTES), init=False)
    _waiting: list[_WaitingPost] = field(default_factory=list, init=False)
    _quick: LRUCache[Line, bool] = field(default_factory=lambda: LRUCache(KNOWN), init=False)
    _not_before_s: LRUCache[Line, float] = field(default_factory=lambda: LRUCache(KNOWN), init=False)
    _took_s: LRUCache[Line | str, float] = field(default_factory=lambda: LRUCache(KNOWN), init=False)
    """How long posts of a line, and of a tenant, take."""
    _next_s: LRUCache[Line | str, float] = field(default_factory=lambda: LRUCache(KNOWN), init=False)
    """When the last post that went back to the broker has its turn."""
    _is_closed: bool = field(default=False, init=False)

    async def enter(self, line: Line, size: int) -> PostPlace | float | None:
        """A place, which the caller gives to `leave`. A number: the post goes back to the broker for so many
        seconds. None: this process stops."""
        if self._is_closed:
            return None
        if not self._waiting_in(line) and self._may_run(line):
            return self._begin(line)
        tenant = line.tenant
        has_memory = self._memory.has_room(tenant) and self._memory_bytes.has_room(tenant, size)
        if not has_memory or self._waiting_in(line) >= WAITING_IN_LINE or self._is_held(line):
            return self._turn_s(line)
        waiter = _WaitingPost(line, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._memory.take(tenant)
        self._memory_bytes.take(tenant, size)
        try:
            async with asyncio.timeout(WAITS_S):
                return await waiter.turn
        except TimeoutError:
            # its turn may have come at the same moment
            return waiter.turn.result() if _has_come(waiter) else self._turn_s(line)
        except asyncio.CancelledError:
            if _has_come(waiter) and isinstance(place := waiter.turn.result(), PostPlace):
                self.leave(place)
            raise
        finally:
            self._waiting.remove(waiter)
            self._memory.give_back(tenant)
            self._memory_bytes.give_back(tenant, size)

    def learn(self, line: Line, *, took_s: float, is_answered: bool, not_for_s: float = 0) -> None:
        """How a post ended. `not_for_s`: the endpoint has asked for no post within this time."""
        if is_answered and took_s < QUICK_S:
            self._quick[line] = True
        else:
            self._quick.pop(line, None)
        for key in (line, line.tenant):
            self._took_s[key] = took_s + 0.8 * (self._took_s.get(key, took_s) - took_s)
        if not_for_s > 0:
            self._not_before_s[line] = self.clock() + not_for_s
            for waiter in self._waiting:
                if waiter.line == line and not waiter.turn.done():
                    waiter.turn.set_result(self._turn_s(line))

    def leave(self, place: PostPlace) -> None:
        """May be called again."""
        if place.is_left:
            return
        place.is_left, line = True, place.line
        self.running -= Counter({line: 1})  # removes it at 0
        self._places.give_back(line.tenant)
        if not place.is_quick:
            self._slow_places.give_back(line.tenant)
        for waiter in self._waiting:  # in the order in which they came
            if not waiter.turn.done() and self._may_run(waiter.line):
                waiter.turn.set_result(self._begin(waiter.line))

    def close(self) -> None:
        self._is_closed = True
        for waiter in self._waiting:
            if not waiter.turn.done():
                waiter.turn.set_result(None)

    def _waiting_in(self, line: Line) -> int:
        return sum(waiter.line == line and not waiter.turn.done() for waiter in self._waiting)

    def _is_held(self, line: Line) -> bool:
        return self._not_before_s.get(line, 0) > self.clock()

    def _at_once(self, line: Line) -> int:
        return QUICK_AT_ONCE if line in self._quick else AT_ONCE

    def _may_run(self, line: Line) -> bool:
        return (
            self.running[line] < self._at_once(line)
            and not self._is_held(line)
            and self._places.has_room(line.tenant)
            and (line in self._quick or self._slow_places.has_room(line.tenant))
        )

    def _begin(self, line: Line) -> PostPlace:
        place = PostPlace(line, line in self._quick)
        self.running[line] += 1
        self._places.take(line.tenant)
        if not place.is_quick:
            self._slow_places.take(line.tenant)
        return place

    def _turn_s(self, line: Line) -> float:
        """When a post that finds no place has its turn: after those that went back before it, if they take as long as
        the last ones did. So each goes round seldom, however many there are."""
        is_full = self.running[line] >= self._at_once(line) or self._is_held(line)
        key, at_once = (line, self._at_once(line)) if is_full else (line.tenant, SLOW_PLACES // 2)
        now_s = self.clock()
        first_s = max(now_s + LEAST_S, self._next_s.get(key, 0), self._not_before_s.get(line, 0))
        wait_s = first_s + self._took_s.get(key, QUICK_S) / at_once - now_s
        if wait_s > LONGEST_S:
            return LONGEST_S * self.rng.uniform(0.5, 1)
        self._next_s[key] = now_s + wait_s
        return wait_s
