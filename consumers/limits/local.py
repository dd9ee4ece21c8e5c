"""The budgets of one process: requests wait in order and are woken when it is their turn, by one timer an account."""

import asyncio
from collections.abc import Callable, Mapping

from consumers.limits.account import Account
from consumers.limits.amounts import Amounts
from consumers.limits.base import Heard, Kind, Reservation, Wait, Waiting
from consumers.limits.desk import Desk
from consumers.limits.order import NEVER
from consumers.limits.spec import BudgetSpec
from lanekeeper.telemetry import logs, signals

LATE_S = 0.0005
"""A timer fires so much later than what it waits for is there: a moment too early it would have to fire twice."""
log = logs.logger()


class LocalBudgets:
    """See `Budgets`."""

    def __init__(self, spec: BudgetSpec) -> None:
        self._spec = spec
        self._desk = Desk(
            spec,
            clock=_now_s,
            step=self._step,
            give_back=lambda unwanted: self.settle(unwanted, None),
            learn=self.learn,
        )
        self._timers: dict[str, tuple[float, asyncio.Handle]] = {}
        """When each fires, and what ends it: uvloop's handle of what is due within half a millisecond does not tell."""
        self.wake_ups = 0
        """How often a timer fired."""

    async def reserve(
        self,
        account: str,
        *,
        lane: str,
        amounts: Amounts,
        until: float | None,
        arrived: float | None = None,
        on_wait: Callable[[Wait], None] | None = None,
    ) -> Reservation:
        return await self._desk.reserve(
            account, lane=lane, amounts=amounts, until=until, arrived=arrived, on_wait=on_wait
        )

    async def try_reserve(self, account: str, *, lane: str, amounts: Amounts) -> Reservation | None:
        books, waiter = self._desk.join(account, lane=lane, amounts=amounts)
        if waiter.reservation is None:
            self._desk.leave(books, waiter)
        return waiter.reservation

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        books = self._desk.books(reservation.account)
        books.settle(reservation, used, _now_s())
        self._step(books)

    def learn(self, account: str, heard: Heard) -> None:
        books = self._desk.books(account)
        before = books.per_minute()
        is_less = books.learn(heard, _now_s())
        tell(account, heard, before=before, after=books.per_minute(), pause_s=self._spec.spend_pause_s)
        if is_less:
            self._desk.refuse_hopeless(books)
        self._step(books)

    async def predicted_wait(self, account: str, *, lane: str, amounts: Amounts) -> Wait:
        return self._desk.predicted_wait(account, lane=lane, amounts=amounts)

    def waiting(self) -> Mapping[str, Mapping[str, Waiting]]:
        return self._desk.waiting()

    def paused(self) -> Mapping[str, float]:
        return self._desk.paused()

    def _step(self, books: Account) -> None:
        """Grant whatever may be granted, and see to it that somebody looks again when time brings more."""
        now_s = _now_s()
        waiter, in_s = books.turn(now_s)
        while waiter is not None:
            if not self._desk.wake(waiter):  # whoever is next gets it
                assert waiter.reservation is not None
                books.settle(waiter.reservation, None, now_s)
            waiter, in_s = books.turn(now_s)
        self._sleep(books, now_s + in_s + LATE_S)

    def _sleep(self, books: Account, when: float) -> None:
        if (timer := self._timers.get(books.name)) is not None:
            fires_s, handle = timer
            if abs(fires_s - when) < LATE_S:
                return
            handle.cancel()
            del self._timers[books.name]
        if when < NEVER:
            self._timers[books.name] = when, asyncio.get_running_loop().call_at(when, self._wake, books.name)

    def _wake(self, account: str) -> None:
        self._timers.pop(account, None)
        self.wake_ups += 1
        if (books := self._desk.accounts.get(account)) is not None:  # else nobody uses it any more
            self._step(books)


def tell(account: str, heard: Heard, *, before: Amounts, after: Amounts, pause_s: float) -> None:
    """Log what a response changed."""
    if heard.kind is Kind.SPEND_LIMIT:
        log.error(signals.ACCOUNT_PAUSED, account=account, for_s=pause_s)
    if after != before:
        log.info(
            signals.LIMITS_LEARNED,
            account=account,
            kind=str(heard.kind),
            requests=after.requests,
            input_tokens=after.input_tokens,
            output_tokens=after.output_tokens,
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
