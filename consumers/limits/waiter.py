"""One request that waits for its turn, and the wake-up of its task."""

import asyncio

from consumers.limits.amounts import Amounts
from consumers.limits.base import Reservation, Wait, WaitTooLong


class Waiter:
    """`lane` is the lane's rank: 0 goes first."""

    __slots__ = ("amounts", "arrived_s", "lane", "number", "reservation", "turn", "until_s")

    def __init__(self, lane: int, amounts: Amounts, *, arrived_s: float, until_s: float | None = None) -> None:
        self.lane = lane
        self.amounts = amounts
        self.arrived_s = arrived_s
        """When it first asked; before now if it was deferred and came back."""
        self.until_s = until_s
        self.number = 0
        """Counts up in the order of joining, over all lanes."""
        self.reservation: Reservation | None = None
        """The waiter's reservation, set when it is granted."""
        self.turn: asyncio.Future[None] | None = None
        """What its task awaits. None before the task waits, and for a request that does not wait."""

    def wake(self) -> bool:
        """Tell its task that it is granted. False: the task was cancelled and nobody takes the reservation."""
        if self.turn is None:
            return True  # its task is not waiting yet, and will find `reservation` set
        if self.turn.done():
            return False
        self.turn.set_result(None)
        return True

    def refuse(self, wait: Wait) -> None:
        """Tell its task that it cannot be granted in time."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_exception(WaitTooLong(wait))
