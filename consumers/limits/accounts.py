"""Keeps the budgets of all accounts at providers: reserves budget before a call, settles the reservation after the
call, and learns limits from responses.

A request waits in one of the account's lines (there is one for each lane) until the account's `Turns` object grants it
its budget. Several processes may share an account.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from consumers.limits import forecast
from consumers.limits.base import NO_FEEDBACK, REASONS, Amounts, Feedback, Reservation, Wait, Waiting, WaitTooLong
from consumers.limits.lines import Waiter
from consumers.limits.spec import BudgetSpec
from consumers.limits.turns import Turns

MOST: Final = 256
"""If a process keeps the budgets of this many accounts (an account is a provider with a class of models), it removes
those that are not in use before it adds a further one."""
AnyTurns = TypeVar("AnyTurns", bound=Turns)


class Accounts(Generic[AnyTurns]):
    """The budgets of the providers' accounts that this process calls, by name. `open_turns` creates the `Turns` object
    of an account, which holds the budget and decides which waiting request gets it next. Times are those of the event
    loop's clock."""

    def __init__(self, spec: BudgetSpec, open_turns: Callable[[str], AnyTurns]) -> None:
        self._open_turns = open_turns
        self._ranks = {name: rank for rank, name in enumerate(spec.shares)}
        self._known: dict[str, AnyTurns] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def turns(self, name: str) -> AnyTurns:
        """The `Turns` object of the account with this name, which holds the account's budget and decides which request
        gets it next. The object is created if the account is new."""
        if (turns := self._known.get(name)) is None:
            if len(self._known) >= MOST:
                self._forget_idle()
            turns = self._known[name] = self._open_turns(name)
        return turns

    async def reserve(
        self,
        name: str,
        *,
        lane: str,
        amounts: Amounts,
        until: float | None,
        arrived: float | None = None,
        on_wait: Callable[[Wait], None] | None = None,
    ) -> Reservation:
        """Wait until budget of an account is reserved for a call. `amounts`: the requests and tokens that the call is
        expected to use. `until`: the latest time at which the call may begin. `arrived`: if the request was deferred
        and comes back, the time when it first began to wait, so that it gets its old place in the line. If the request
        has to wait, `on_wait` is called with the forecast of its wait.

        Raises WaitTooLong if the account is paused because its spend limit is reached, or as soon as known limits show
        that the request cannot be granted before `until`. If the waiting task is cancelled, the request leaves the
        line.
        """
        turns = self._current_turns(name)
        account, now_s = turns.account, turns.now_s()
        offset_s = now_s - asyncio.get_running_loop().time()
        until_s = None if until is None else until + offset_s
        arrived_s = now_s if arrived is None else min(now_s, arrived + offset_s)
        if account.paused_s(now_s) > 0:
            raise WaitTooLong(forecast.first(account, self._ranks[lane], amounts, now_s))
        waiter = Waiter(self._ranks[lane], amounts, arrived_s=arrived_s, until_s=until_s)
        account.refill(now_s)  # what has flowed in until now belongs to lanes that waited already
        if account.join(waiter):
            turns.step()
            if waiter.reservation is not None:
                return waiter.reservation
        try:
            if until_s is not None or on_wait is not None:
                wait = forecast.of(account, waiter, now_s)
                if until_s is not None and now_s + wait.least_s > until_s:
                    raise WaitTooLong(wait)
                if on_wait is not None:
                    on_wait(wait)
            waiter.future = asyncio.get_running_loop().create_future()
            async with asyncio.timeout_at(until):
                await waiter.future
        except TimeoutError:
            if waiter.reservation is None:
                _leave(turns, waiter)
                raise WaitTooLong(forecast.first(account, waiter.lane, waiter.amounts, turns.now_s())) from None
        except BaseException:
            _give_back(turns, waiter)
            raise
        assert waiter.reservation is not None
        return waiter.reservation

    async def try_reserve(self, name: str, *, lane: str, amounts: Amounts) -> Reservation | None:
        """Reserve budget of an account for a call, without waiting. Returns None if the account has not enough budget
        now."""
        turns = self._current_turns(name)
        account, now_s = turns.account, turns.now_s()
        waiter = Waiter(self._ranks[lane], amounts, arrived_s=now_s)
        account.refill(now_s)
        if account.join(waiter):
            turns.step()
        try:
            await turns.decided(waiter)
        except BaseException:
            _give_back(turns, waiter)
            raise
        if waiter.reservation is None:
            _leave(turns, waiter)
        return waiter.reservation

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        """After a call: return to the account's budget what was reserved and not used, and take from it what was used
        beyond the reservation. `used`: what the call used; None if it used nothing, so that the whole reservation is
        returned."""
        if not reservation.is_settled:
            self.turns(reservation.account).settle(reservation, used)

    def learn(self, name: str, feedback: Feedback) -> None:
        """Learn an account's limits from a provider's response, which may be an error."""
        self.turns(name).learn(feedback)

    async def predicted_wait(self, name: str, *, lane: str, amounts: Amounts) -> Wait:
        """How long a request of this lane would wait for budget of an account, if it began to wait now."""
        turns = self._current_turns(name)
        return forecast.wait(turns.account, self._ranks[lane], amounts, turns.now_s())

    def waiting(self) -> Mapping[str, Mapping[str, Waiting]]:
        """For each account and lane that has waiting requests in this process: how many they are, and for which limit
        they wait."""
        found: dict[str, dict[str, Waiting]] = {}
        for name, turns in self._known.items():
            account, now_s = turns.account, turns.now_s()
            for lane, rank in self._ranks.items():
                if (head := account.lines.heads[rank]) is not None:
                    reason = account.reason(head, now_s)
                    found.setdefault(name, {})[lane] = Waiting(
                        count=account.lines.count(rank),
                        reason=reason,
                        oldest_s=now_s - head.arrived_s,
                        is_known=reason not in REASONS or not account.guessed[REASONS.index(reason)],
                    )
        return found

    def paused(self) -> Mapping[str, float]:
        """For each account that is paused because its spend limit is reached: the seconds until the pause ends."""
        left_s = {name: turns.account.paused_s(turns.now_s()) for name, turns in self._known.items()}
        return {name: seconds for name, seconds in left_s.items() if seconds > 0}

    async def aclose(self) -> None:
        """Stop all timers, and send Redis the changes of the budgets that it does not know yet. Call it when no request
        waits for budget any more."""
        for turns in list(self._known.values()):
            await turns.aclose()

    def _current_turns(self, name: str) -> AnyTurns:
        """The `Turns` object of an account, for a new request. Low limits that no response has confirmed for minutes
        are discarded first, because they could block the request."""
        turns = self.turns(name)
        if turns.account.is_stale(turns.now_s()):
            turns.learn(NO_FEEDBACK)
        return turns

    def _forget_idle(self) -> None:
        """Remove the accounts for which no request waits and no call runs. Without this their number would grow for
        ever, because requests can name any number of models, each with an account of its own."""
        for name, turns in list(self._known.items()):
            if turns.is_idle:
                del self._known[name]


Budgets = Accounts[Any]
"""The budgets of all accounts, either used by one process only or shared with other processes through Redis (the two
implementations of `Turns`)."""


def _give_back(turns: Turns, waiter: Waiter) -> None:
    """End a wait that was cancelled or refused: return the request's reservation if it has one, or else take the
    request out of its line."""
    if waiter.reservation is not None:
        turns.settle(waiter.reservation, None)
    else:
        _leave(turns, waiter)


def _leave(turns: Turns, waiter: Waiter) -> None:
    """Take a waiting request out of its line, if it is still there."""
    if turns.account.leave(waiter):
        turns.step()
