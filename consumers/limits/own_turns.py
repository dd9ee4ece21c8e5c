"""Decides which waiting request gets the budget of an account next, if only this process uses the account. It does so
after each change, and when a timer fires."""

import asyncio
from math import inf

from consumers.limits.account import Account
from consumers.limits.accounts import Accounts
from consumers.limits.base import Amounts, Feedback, Reservation
from consumers.limits.lines import Waiter
from consumers.limits.spec import BudgetSpec
from consumers.limits.turns import LATE_S, log_learned, refuse_hopeless


def own_accounts(spec: BudgetSpec) -> "Accounts[OwnTurns]":
    """The budgets of all accounts for a process that shares them with no other process."""
    return Accounts(spec, lambda name: OwnTurns(name, spec))


class OwnTurns:
    """Implements `Turns`, which decides which request gets an account's budget next, for an account that only this
    process uses. It decides without asking Redis."""

    def __init__(self, name: str, spec: BudgetSpec) -> None:
        self.account = Account(name, spec, now_s=self.now_s())
        self._timer: asyncio.Handle | None = None
        self._fires_s = inf
        """When the timer that calls `step` fires. It is kept here, because for delays below 0.5 ms uvloop returns a
        handle without the method `when`."""
        self.wake_ups = 0
        """How often the timer has fired; tests read it."""

    @property
    def is_idle(self) -> bool:
        return self.account.is_idle

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def step(self) -> None:
        account, now_s = self.account, self.now_s()
        waiter, in_s = account.grant_next(now_s)
        while waiter is not None:
            if not waiter.wake():  # its task was cancelled: the next waiter gets the amounts
                assert waiter.reservation is not None
                account.settle(waiter.reservation, None, now_s)
            waiter, in_s = account.grant_next(now_s)
        self._step_at(now_s + in_s + LATE_S)

    async def decided(self, waiter: Waiter) -> None:
        """Does nothing, because `step` decides at once which requests are granted."""

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        self.account.settle(reservation, used, self.now_s())
        self.step()

    def learn(self, feedback: Feedback) -> None:
        before = self.account.per_minute()
        is_less = self.account.learn(feedback, self.now_s())
        log_learned(self.account, feedback, before=before)
        if is_less:
            refuse_hopeless(self.account, self.now_s())
        self.step()

    async def aclose(self) -> None:
        self._step_at(inf)

    def _step_at(self, when_s: float) -> None:
        if self._timer is not None:
            if abs(self._fires_s - when_s) < LATE_S:
                return
            self._timer.cancel()
            self._timer = None
        if when_s < inf:
            self._timer, self._fires_s = asyncio.get_running_loop().call_at(when_s, self._on_timer), when_s

    def _on_timer(self) -> None:
        self._timer = None
        self.wake_ups += 1
        self.step()
