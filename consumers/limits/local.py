"""The budgets of one process: requests wait in order and are woken when it is their turn, by one timer an account."""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from consumers.limits import forecast
from consumers.limits.account import Account
from consumers.limits.amounts import NOTHING, PAUSED, Amounts
from consumers.limits.base import Heard, Kind, Reservation, Wait, Waiting, WaitTooLong
from consumers.limits.order import NEVER, Waiter
from consumers.limits.spec import BudgetSpec
from topology import signals

LATE_S = 0.0005
"""A timer fires so much later than what it waits for is there: a moment too early it would have to fire twice."""
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Sleeper(Waiter):
    """A waiter that has begun to wait; `granted` is cancelled with the task that awaits it."""

    __slots__ = ("granted",)

    def __init__(self, lane: int, amounts: Amounts, *, arrived_s: float, until_s: float | None) -> None:
        super().__init__(lane, amounts, arrived_s=arrived_s, until_s=until_s)
        self.granted: asyncio.Future[None] | None = None


class LocalBudgets:
    """See `Budgets`."""

    def __init__(self, spec: BudgetSpec) -> None:
        self._spec = spec
        self._ranks = {name: rank for rank, name in enumerate(spec.lanes)}
        self._accounts: dict[str, Account] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.wake_ups = 0
        """How often a timer fired."""

    async def reserve(
        self,
        account: str,
        *,
        lane: str,
        amounts: Amounts,
        until: float | None,
        on_wait: Callable[[Wait], None] | None = None,
    ) -> Reservation:
        loop = asyncio.get_running_loop()
        books, now_s = self._books(account), loop.time()
        waiter = Sleeper(self._ranks[lane], amounts, arrived_s=now_s, until_s=until)
        if (paused_s := books.paused_s(now_s)) > 0:
            raise WaitTooLong(Wait(paused_s, PAUSED))
        if books.join(waiter):
            self._step(books)
            if waiter.reservation is not None:
                return waiter.reservation
        if until is not None or on_wait is not None:
            wait = forecast.wait(books, waiter.lane, NOTHING, now_s)  # it is the last of its line
            if until is not None and now_s + wait.seconds > until:
                self._leave(books, waiter)
                raise WaitTooLong(wait)
            if on_wait is not None:
                on_wait(wait)
        waiter.granted = loop.create_future()
        try:
            async with asyncio.timeout_at(until):
                await waiter.granted
        except TimeoutError:
            if waiter.reservation is None:
                self._leave(books, waiter)
                raise WaitTooLong(forecast.wait(books, waiter.lane, amounts, loop.time())) from None
        except BaseException:
            if waiter.reservation is not None:
                self.settle(waiter.reservation, None)
            else:
                self._leave(books, waiter)
            raise
        assert waiter.reservation is not None
        return waiter.reservation

    async def try_reserve(self, account: str, *, lane: str, amounts: Amounts) -> Reservation | None:
        books = self._books(account)
        waiter = Waiter(self._ranks[lane], amounts, arrived_s=asyncio.get_running_loop().time())
        if books.join(waiter):
            self._step(books)
        if waiter.reservation is None:
            self._leave(books, waiter)
        return waiter.reservation

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        books = self._books(reservation.account)
        books.settle(reservation, used, asyncio.get_running_loop().time())
        self._step(books)

    def learn(self, account: str, heard: Heard) -> None:
        books, now_s = self._books(account), asyncio.get_running_loop().time()
        before = books.per_minute()
        is_less = books.learn(heard, now_s)
        if heard.kind is Kind.SPEND_LIMIT:
            log.error(signals.ACCOUNT_PAUSED, account=account, for_s=self._spec.spend_pause_s)
        if (after := books.per_minute()) != before:
            log.info(signals.LIMITS_LEARNED, account=account, kind=str(heard.kind), **after._asdict())
        if is_less:
            for waiter, wait in list(forecast.hopeless(books, now_s)):
                self._refuse(books, waiter, wait)
        self._step(books)

    async def predicted_wait(self, account: str, *, lane: str, amounts: Amounts) -> Wait:
        now_s = asyncio.get_running_loop().time()
        return forecast.wait(self._books(account), self._ranks[lane], amounts, now_s)

    def waiting(self) -> Mapping[str, Mapping[str, Waiting]]:
        now_s = asyncio.get_running_loop().time()
        found: dict[str, dict[str, Waiting]] = {}
        for account, books in self._accounts.items():
            for lane, rank in self._ranks.items():
                if (head := books.lines.heads[rank]) is not None:
                    found.setdefault(account, {})[lane] = Waiting(
                        count=books.lines.count(rank),
                        reason=books.reason(head, now_s),
                        oldest_s=now_s - head.arrived_s,
                    )
        return found

    def _books(self, account: str) -> Account:
        if (books := self._accounts.get(account)) is None:
            now_s = asyncio.get_running_loop().time()
            books = self._accounts[account] = Account(account, self._spec, now_s=now_s)
        return books

    def _leave(self, books: Account, waiter: Waiter) -> None:
        if books.leave(waiter):
            self._step(books)

    def _refuse(self, books: Account, waiter: Waiter, wait: Wait) -> None:
        books.leave(waiter)
        if isinstance(waiter, Sleeper) and waiter.granted is not None and not waiter.granted.done():
            waiter.granted.set_exception(WaitTooLong(wait))

    def _step(self, books: Account) -> None:
        """Grant whatever may be granted, and see to it that somebody looks again when time brings more."""
        now_s = asyncio.get_running_loop().time()
        waiter, in_s = books.turn(now_s)
        while waiter is not None:
            granted = waiter.granted if isinstance(waiter, Sleeper) else None
            if granted is not None and granted.done():  # cancelled, and not yet run: whoever is next gets it
                assert waiter.reservation is not None
                books.settle(waiter.reservation, None, now_s)
            elif granted is not None:
                granted.set_result(None)
            waiter, in_s = books.turn(now_s)
        self._sleep(books, now_s + in_s + LATE_S)

    def _sleep(self, books: Account, when: float) -> None:
        timer = self._timers.get(books.name)
        if timer is not None:
            if abs(timer.when() - when) < LATE_S:
                return
            timer.cancel()
            del self._timers[books.name]
        if when < NEVER:
            self._timers[books.name] = asyncio.get_running_loop().call_at(when, self._wake, books)

    def _wake(self, books: Account) -> None:
        self._timers.pop(books.name, None)
        self.wake_ups += 1
        self._step(books)
