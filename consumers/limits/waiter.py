"""One request that waits for the budget of an account, and how its task is resumed."""

import asyncio
from dataclasses import KW_ONLY, dataclass

from consumers.limits.amounts import Amounts
from consumers.limits.base import Reservation, Wait, WaitTooLong


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
    number: int = 0
    """The number of this waiter among all that have joined a line of the account."""
    reservation: Reservation | None = None
    """The request's reservation; None until it is granted."""
    turn: "asyncio.Future[None] | None" = None
    """The future that the request's task awaits. None before the task waits, and for a request that does not wait."""

    def wake(self) -> bool:
        """Wake the task of this request, because it was granted its budget. Returns False if the task was cancelled:
        the caller must then settle the reservation."""
        if self.turn is None:
            return True  # its task is not waiting yet, and will find `reservation` set
        if self.turn.done():
            return False
        self.turn.set_result(None)
        return True

    def refuse(self, wait: Wait) -> None:
        """End the request's wait for budget: its task gets the exception WaitTooLong."""
        if self.turn is not None and not self.turn.done():
            self.turn.set_exception(WaitTooLong(wait))
