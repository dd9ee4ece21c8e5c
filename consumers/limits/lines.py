"""The requests that wait for the budget of an account: one line for each lane, by arrival. Without I/O.

A request that was deferred and comes back gets its old place in the line. Which lane's first request gets the budget is
decided in `account.py`.
"""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter

from consumers.limits.base import Amounts, Reservation, Wait, WaitTooLong


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for the budget of an account. `lane`: the rank of its lane, 0 for the most urgent.
    `until_s`: the latest time at which its call may begin."""

    lane: int
    amounts: Amounts
    _: KW_ONLY
    arrived_s: float
    """When the request first began to wait for the account's budget. If it was deferred and came back, this is before
    the deferral."""
    until_s: float | None = None
    reservation: Reservation | None = None
    """The request's reservation; None until it is granted."""
    future: "asyncio.Future[None] | None" = None
    """The future that the request's task awaits. It is None before the task waits, and for a request that takes budget
    only if it needs not wait (`try_reserve`)."""

    def wake(self) -> bool:
        """Wake the task of this request, because it was granted its budget. Returns False if the task was cancelled, so
        that the caller must settle the reservation."""
        if self.future is None:
            return True  # its task is not waiting yet, and will find `reservation` set
        if self.future.done():
            return False
        self.future.set_result(None)
        return True

    def refuse(self, wait: Wait) -> None:
        """End the request's wait for budget: its task gets the exception WaitTooLong."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(WaitTooLong(wait))


_arrival = attrgetter("arrived_s")


class Lines:
    """The requests that wait for the budget of one account: one line for each lane, in the order of arrival."""

    def __init__(self, lanes: int) -> None:
        self._lines: list[list[Waiter]] = [[] for _ in range(lanes)]
        self._sums = [[0.0, 0.0, 0.0] for _ in range(lanes)]
        self.heads: list[Waiter | None] = [None for _ in range(lanes)]
        """For each lane: the request that has waited longest for budget, the first of its line; None if none waits."""

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines)

    def __contains__(self, waiter: Waiter) -> bool:
        return self._at(waiter) is not None

    def __iter__(self) -> Iterator[Waiter]:
        """All requests that wait for the account's budget: those of the most urgent lane first, and within a lane by
        arrival."""
        for line in self._lines:
            yield from line

    @property
    def is_empty(self) -> bool:
        """True if no request waits for the account's budget."""
        return not any(self.heads)

    def count(self, lane: int) -> int:
        return len(self._lines[lane])

    def firsts(self, lane: int, most: int) -> Sequence[Waiter]:
        """The first requests of a lane's line, in order; at most `most`."""
        return self._lines[lane][:most]

    def sums(self, lane: int) -> Sequence[float]:
        """The requests and tokens that all waiting requests of a lane need together."""
        return self._sums[lane]

    def before(self, waiter: Waiter) -> tuple[Sequence[float], int]:
        """Returns what the requests before this one in its lane's line need together, and how many they are."""
        line = self._lines[waiter.lane]
        if line[-1] is waiter:
            sums = self._sums[waiter.lane]
            return [total - amount for total, amount in zip(sums, waiter.amounts, strict=True)], len(line) - 1
        before = line[: self._at(waiter)]
        sums = [0.0, 0.0, 0.0]
        for other in before:
            for index, amount in enumerate(other.amounts):
                sums[index] += amount
        return sums, len(before)

    def join(self, waiter: Waiter) -> bool:
        """Put a waiting request in its lane's line, sorted by arrival. Returns True if it is now the first of the
        line."""
        line, sums = self._lines[waiter.lane], self._sums[waiter.lane]
        insort(line, waiter, key=_arrival)
        for index, amount in enumerate(waiter.amounts):
            sums[index] += amount
        self.heads[waiter.lane] = line[0]
        return line[0] is waiter

    def leave(self, waiter: Waiter) -> bool:
        """Take a waiting request out of its line, if it is there. Returns True if it was the first of the line."""
        at = self._at(waiter)
        if at is None:
            return False
        line, sums = self._lines[waiter.lane], self._sums[waiter.lane]
        del line[at]
        if not line:  # set to exactly 0, to clear rounding errors
            sums[:] = (0.0, 0.0, 0.0)
        else:
            for index, amount in enumerate(waiter.amounts):
                sums[index] -= amount
        self.heads[waiter.lane] = line[0] if line else None
        return at == 0

    def shift(self, jump_s: float) -> None:
        """Add `jump_s` to all times of the waiting requests, because the clock has jumped by so many seconds."""
        for line in self._lines:
            for waiter in line:
                waiter.arrived_s += jump_s
                if waiter.until_s is not None:
                    waiter.until_s += jump_s

    def _at(self, waiter: Waiter) -> int | None:
        line = self._lines[waiter.lane]
        try:
            return line.index(waiter, bisect_left(line, waiter.arrived_s, key=_arrival))
        except ValueError:
            return None
