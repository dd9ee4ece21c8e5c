"""Where requests wait for their turn, in one process: whoever knows whose turn it is (`step`) wakes them."""

import asyncio
from collections.abc import Callable, Mapping

from consumers.limits import forecast
from consumers.limits.account import Account
from consumers.limits.amounts import PAUSED, REASONS, Amounts
from consumers.limits.base import NO_NEWS, Heard, Reservation, Wait, Waiting, WaitTooLong
from consumers.limits.order import Waiter
from consumers.limits.spec import BudgetSpec

ACCOUNTS = 256
"""Of more than so many those are forgotten that nobody uses."""


class Sleeper(Waiter):
    """A waiter that has begun to wait; `granted` is cancelled with the task that awaits it."""

    __slots__ = ("granted",)

    def __init__(self, lane: int, amounts: Amounts, *, arrived_s: float, until_s: float | None) -> None:
        super().__init__(lane, amounts, arrived_s=arrived_s, until_s=until_s)
        self.granted: asyncio.Future[None] | None = None


class Desk:
    """The accounts and their lines. `clock`: what the accounts are asked by; `step`: called where somebody may be
    granted now; `give_back`: takes a reservation that nobody wants any more; `learn`: the owner's.
    """

    def __init__(
        self,
        spec: BudgetSpec,
        *,
        clock: Callable[[], float],
        step: Callable[[Account], None],
        give_back: Callable[[Reservation], None],
        learn: Callable[[str, Heard], None],
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._step = step
        self._give_back = give_back
        self._learn = learn
        self._ranks = {name: rank for rank, name in enumerate(spec.lanes)}
        self.accounts: dict[str, Account] = {}

    def books(self, account: str) -> Account:
        """Of an account; opened where there are none."""
        if (books := self.accounts.get(account)) is None:
            if len(self.accounts) >= ACCOUNTS:
                self._forget_idle()
            books = self.accounts[account] = Account(account, self._spec, now_s=self._clock())
        return books

    def _asked(self, account: str) -> Account:
        """The books of an account that somebody wants to use, without what was heard too long ago to keep him out."""
        books = self.books(account)
        if books.is_stale(self._clock()):
            self._learn(account, NO_NEWS)
        return books

    def _forget_idle(self) -> None:
        """Models are named by requests: anything may be."""
        for name, books in list(self.accounts.items()):
            if not len(books.lines) and not books.concurrency.running:
                del self.accounts[name]

    async def reserve(
        self,
        account: str,
        *,
        lane: str,
        amounts: Amounts,
        until: float | None,
        arrived: float | None,
        on_wait: Callable[[Wait], None] | None,
    ) -> Reservation:
        """See `Budgets`. `until` and `arrived` by the event loop's clock."""
        books, now_s = self._asked(account), self._clock()
        offset_s = now_s - asyncio.get_running_loop().time()
        until_s = None if until is None else until + offset_s
        arrived_s = now_s if arrived is None else min(now_s, arrived + offset_s)
        if (paused_s := books.paused_s(now_s)) > 0:
            raise WaitTooLong(Wait(paused_s, PAUSED, paused_s))
        waiter = Sleeper(self._ranks[lane], amounts, arrived_s=arrived_s, until_s=until_s)
        books.refill(now_s)  # what came in before is saved by those who waited then
        if books.join(waiter):
            self._step(books)
            if waiter.reservation is not None:
                return waiter.reservation
        try:
            if until_s is not None or on_wait is not None:
                wait = forecast.of(books, waiter, now_s)
                if until_s is not None and now_s + wait.least_s > until_s:
                    raise WaitTooLong(wait)
                if on_wait is not None:
                    on_wait(wait)
        except BaseException:
            self.leave(books, waiter)
            raise
        return await self._wait(books, waiter, until)

    def join(self, account: str, *, lane: str, amounts: Amounts) -> tuple[Account, Waiter]:
        """For one that will not wait."""
        books, now_s = self._asked(account), self._clock()
        waiter = Waiter(self._ranks[lane], amounts, arrived_s=now_s)
        books.refill(now_s)
        if books.join(waiter):
            self._step(books)
        return books, waiter

    def leave(self, books: Account, waiter: Waiter) -> None:
        """Out of the line, if it is still there."""
        if books.leave(waiter):
            self._step(books)

    def wake(self, waiter: Waiter) -> bool:
        """It has its reservation. False where nobody wants it any more: it was cancelled, and has not run yet."""
        granted = waiter.granted if isinstance(waiter, Sleeper) else None
        if granted is None:
            return True  # still in `reserve`, which looks
        if granted.done():
            return False
        granted.set_result(None)
        return True

    def refuse_hopeless(self, books: Account) -> None:
        """Send those away whose time will be over before their turn."""
        for waiter, wait in list(forecast.hopeless(books, self._clock())):
            self.refuse(books, waiter, wait)

    def refuse(self, books: Account, waiter: Waiter, wait: Wait) -> None:
        books.leave(waiter)
        if isinstance(waiter, Sleeper) and waiter.granted is not None and not waiter.granted.done():
            waiter.granted.set_exception(WaitTooLong(wait))

    def predicted_wait(self, account: str, *, lane: str, amounts: Amounts) -> Wait:
        return forecast.wait(self._asked(account), self._ranks[lane], amounts, self._clock())

    def waiting(self) -> Mapping[str, Mapping[str, Waiting]]:
        now_s = self._clock()
        found: dict[str, dict[str, Waiting]] = {}
        for account, books in self.accounts.items():
            for lane, rank in self._ranks.items():
                if (head := books.lines.heads[rank]) is not None:
                    reason = books.reason(head, now_s)
                    found.setdefault(account, {})[lane] = Waiting(
                        count=books.lines.count(rank),
                        reason=reason,
                        oldest_s=now_s - head.arrived_s,
                        is_known=reason not in REASONS or not books.guessed[REASONS.index(reason)],
                    )
        return found

    def paused(self) -> Mapping[str, float]:
        now_s = self._clock()
        left_s = {name: books.paused_s(now_s) for name, books in self.accounts.items()}
        return {name: seconds for name, seconds in left_s.items() if seconds > 0}

    async def _wait(self, books: Account, waiter: Sleeper, until: float | None) -> Reservation:
        waiter.granted = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(until):
                await waiter.granted
        except TimeoutError:
            if waiter.reservation is None:
                self.leave(books, waiter)
                raise WaitTooLong(forecast.first(books, waiter.lane, waiter.amounts, self._clock())) from None
        except BaseException:
            if waiter.reservation is not None:
                self._give_back(waiter.reservation)
            else:
                self.leave(books, waiter)
            raise
        assert waiter.reservation is not None
        return waiter.reservation
