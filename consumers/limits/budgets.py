"""Keeps the budgets of all accounts at providers: reserves budget before a call, settles the reservation after the
call, and learns limits from responses.

A request waits in one of the account's lines until the account's `BudgetQueue` grants it its budget. A process that has
the account for itself decides by itself (`OwnBudgetQueue`). Processes that share an account let a script in Redis
decide (`consumers/state/redis/shared_budget.py`).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Final, Protocol

import structlog

from consumers.limits import forecast
from consumers.limits.account import Account, Waiter
from consumers.limits.base import (
    REASONS,
    Amounts,
    BudgetSpec,
    Feedback,
    Kind,
    LaneWaiting,
    RateHeaders,
    Reservation,
    Wait,
    WaitTooLong,
)
from lanekeeper.telemetry import signals

LATE_S: Final = 0.0005
"""The time that is added when the timer for the next waiting request is set."""
log = structlog.get_logger()


class BudgetQueue(Protocol):
    """Decides which of the requests that wait for one account gets its budget next, and when. Times are those of the
    event loop."""

    account: Account

    def step(self) -> None:
        """Grant all waiting requests that may be granted now, and set a timer for the next one. It may return before it
        is decided which requests are granted; `decided` waits for the decision."""

    async def decided(self, waiter: Waiter) -> None:
        """Wait until it is decided whether this request gets the account's budget at once."""

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        """After a call, settle its reservation, which must not be settled yet. `used`: None if it used nothing."""

    def learn(self, feedback: Feedback) -> None: ...

    async def aclose(self) -> None:
        """Stop the timer, and send Redis the changes of the budget that it does not know yet."""


class Budgets:
    """The budgets of the providers' accounts that this process calls, by name. `open_queue` creates the queue of an
    account."""

    def __init__(self, spec: BudgetSpec, open_queue: Callable[[str], BudgetQueue]) -> None:
        self._open_queue = open_queue
        self._ranks = {name: rank for rank, name in enumerate(spec.shares)}
        self._known: dict[str, BudgetQueue] = {}
        self._announced: dict[str, RateHeaders] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def queue(self, name: str) -> BudgetQueue:
        if (queue := self._known.get(name)) is None:
            queue = self._known[name] = self._open_queue(name)
            if (rate := self._announced.pop(name, None)) is not None:
                queue.learn(Feedback(kind=Kind.FAILED, rate=rate))
        return queue

    def announce(self, limits: Mapping[str, RateHeaders]) -> None:
        """Limits of accounts that are known before their first call."""
        self._announced |= limits

    async def reserve(
        self,
        name: str,
        *,
        lane: str,
        amounts: Amounts,
        until: float | None,
        request: str = "",
        arrived: float | None = None,
        on_wait: Callable[[Wait], None] | None = None,
    ) -> Reservation:
        """Wait until budget of an account is reserved for a call. `until`: the latest time at which the call may begin.
        `arrived`: if the request was deferred and comes back, the time when it first began to wait, so that it gets its
        old place in the line. If the request has to wait, `on_wait` is called with the forecast of its wait.

        Raises WaitTooLong as soon as known limits show that the request cannot be granted before `until`. If the
        waiting task is cancelled, the request leaves the line.
        """
        queue, now_s = self.queue(name), loop_s()
        account, arrived_s = queue.account, now_s if arrived is None else min(now_s, arrived)
        waiter = Waiter(self._ranks[lane], amounts, arrived_s=arrived_s, request=request)
        account.refill(now_s)  # what has flowed in until now belongs to lanes that waited already
        if account.join(waiter):
            queue.step()
            if waiter.reservation is not None:
                return waiter.reservation
        try:
            if until is not None or on_wait is not None:
                wait = forecast.of(account, waiter, now_s)
                if wait.is_too_late(now_s, until):
                    raise WaitTooLong(wait)
                if on_wait is not None:
                    on_wait(wait)
            waiter.future = asyncio.get_running_loop().create_future()
            async with asyncio.timeout_at(until):
                await waiter.future
        except TimeoutError:
            if waiter.reservation is None:
                _leave(queue, waiter)
                raise WaitTooLong(forecast.first(account, waiter.lane, waiter.amounts, loop_s())) from None
        except BaseException:
            _give_back(queue, waiter)
            raise
        assert waiter.reservation is not None
        return waiter.reservation

    async def try_reserve(self, name: str, *, lane: str, amounts: Amounts, request: str = "") -> Reservation | None:
        queue, now_s = self.queue(name), loop_s()
        waiter = Waiter(self._ranks[lane], amounts, arrived_s=now_s, request=request)
        queue.account.refill(now_s)
        if queue.account.join(waiter):
            queue.step()
        try:
            await queue.decided(waiter)
        except BaseException:
            _give_back(queue, waiter)
            raise
        if waiter.reservation is None:
            _leave(queue, waiter)
        return waiter.reservation

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        if not reservation.is_settled:
            self.queue(reservation.account).settle(reservation, used)

    def learn(self, name: str, feedback: Feedback) -> None:
        self.queue(name).learn(feedback)

    async def predicted_wait(self, name: str, *, lane: str, amounts: Amounts) -> Wait:
        return forecast.wait(self.queue(name).account, self._ranks[lane], amounts, loop_s())

    def known(self) -> Iterator[tuple[str, Account, float]]:
        for name, queue in self._known.items():
            yield name, queue.account, loop_s()

    def waiting(self) -> Mapping[str, Mapping[str, LaneWaiting]]:
        found: dict[str, dict[str, LaneWaiting]] = {}
        for name, queue in self._known.items():
            account, now_s = queue.account, loop_s()
            for lane, rank in self._ranks.items():
                if (head := account.lines.heads[rank]) is not None:
                    reason = account.reason(head, now_s)
                    found.setdefault(name, {})[lane] = LaneWaiting(
                        count=account.lines.count(rank),
                        reason=reason,
                        oldest_s=now_s - head.arrived_s,
                        is_known=reason not in REASONS or not account.guessed[REASONS.index(reason)],
                    )
        return found

    async def aclose(self) -> None:
        for queue in list(self._known.values()):
            await queue.aclose()


def loop_s() -> float:
    """The time by the event loop's clock."""
    return asyncio.get_running_loop().time()


def _give_back(queue: BudgetQueue, waiter: Waiter) -> None:
    if waiter.reservation is not None:
        queue.settle(waiter.reservation, None)
    else:
        _leave(queue, waiter)


def _leave(queue: BudgetQueue, waiter: Waiter) -> None:
    if queue.account.leave(waiter):
        queue.step()


def own_budgets(spec: BudgetSpec) -> Budgets:
    """The budgets of all accounts for a process that shares them with no other process."""
    return Budgets(spec, lambda name: OwnBudgetQueue(Account(name, spec, now_s=loop_s())))


class OwnBudgetQueue:
    """The `BudgetQueue` of an account that only this process uses."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._timer: asyncio.Handle | None = None
        self._fires_s = inf
        """When the timer fires. It is kept here, because for delays below 0.5 ms uvloop returns a handle without the
        method `when`."""

    def step(self) -> None:
        account, now_s = self.account, loop_s()
        waiter, in_s = account.grant_next(now_s)
        while waiter is not None:
            waiter.wake()
            waiter, in_s = account.grant_next(now_s)
        self._step_at(now_s + in_s + LATE_S)

    async def decided(self, waiter: Waiter) -> None: ...

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        self.account.settle(reservation, used, loop_s())
        self.step()

    def learn(self, feedback: Feedback) -> None:
        with learning(self.account, feedback.kind):
            self.account.learn(feedback, loop_s())
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
        self.step()


# ---- for both kinds of queues ----------------------------------------------------------------------------------------


@contextmanager
def learning(account: Account, kind: str) -> Iterator[None]:
    """Around what changes an account's limits: if they change, that is logged."""
    before = account.per_minute()
    yield
    if (after := account.per_minute()) != before:
        limits = {"requests": after.requests, "input_tokens": after.input_tokens, "output_tokens": after.output_tokens}
        log.info(signals.LIMITS_LEARNED, account=account.name, kind=str(kind), **limits)
