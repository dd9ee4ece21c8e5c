"""Keeps the budgets of all accounts at providers: reserves budget before a call, settles the reservation after the
call, and learns limits from responses.

A request waits in one of the account's lines until the account's `BudgetQueue` grants it its budget. A process that has
the account for itself decides by itself (`OwnBudgetQueue`). Processes that share an account let a script in Redis
decide (`consumers/state/redis/shared_turns.py`).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Final, NamedTuple, Protocol, TypeVar

from cachetools import LRUCache

from consumers.limits import forecast
from consumers.limits.account import Account, Waiter
from consumers.limits.base import (
    NO_FEEDBACK,
    REASONS,
    Amounts,
    BudgetSpec,
    Feedback,
    Reservation,
    Wait,
    Waiting,
    WaitTooLong,
)
from lanekeeper.telemetry import logs, signals

LATE_S: Final = 0.0005
"""The time that is added when the timer for the next waiting request is set."""
log = logs.logger()


class BudgetQueue(Protocol):
    """Decides which of the requests that wait for one account gets its budget next, and when."""

    account: Account

    @property
    def is_idle(self) -> bool:
        """True if the account may be removed: no request waits for its budget, no call runs, and nothing has to be sent
        to Redis."""

    def now_s(self) -> float: ...

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
    """The budgets of the providers' accounts that this process calls, by name. `open_queue` creates the `BudgetQueue`
    of an account."""

    def __init__(self, spec: BudgetSpec, open_queue: Callable[[str], BudgetQueue]) -> None:
        self._open_turns = open_queue
        self._ranks = {name: rank for rank, name in enumerate(spec.shares)}
        self._known: dict[str, BudgetQueue] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def turns(self, name: str) -> BudgetQueue:
        if (turns := self._known.get(name)) is None:
            turns = self._known[name] = self._open_turns(name)
        return turns

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
        turns = self._current_turns(name)
        account, now_s = turns.account, turns.now_s()
        offset_s = now_s - asyncio.get_running_loop().time()
        until_s = None if until is None else until + offset_s
        arrived_s = now_s if arrived is None else min(now_s, arrived + offset_s)
        waiter = Waiter(self._ranks[lane], amounts, arrived_s=arrived_s, until_s=until_s, request=request)
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

    async def try_reserve(self, name: str, *, lane: str, amounts: Amounts, request: str = "") -> Reservation | None:
        turns = self._current_turns(name)
        account, now_s = turns.account, turns.now_s()
        waiter = Waiter(self._ranks[lane], amounts, arrived_s=now_s, request=request)
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
        if not reservation.is_settled:
            self.turns(reservation.account).settle(reservation, used)

    def learn(self, name: str, feedback: Feedback) -> None:
        self.turns(name).learn(feedback)

    async def predicted_wait(self, name: str, *, lane: str, amounts: Amounts) -> Wait:
        turns = self._current_turns(name)
        return forecast.wait(turns.account, self._ranks[lane], amounts, turns.now_s())

    def known(self) -> Iterator[tuple[str, Account, float]]:
        for name, turns in self._known.items():
            yield name, turns.account, turns.now_s()

    def waiting(self) -> Mapping[str, Mapping[str, Waiting]]:
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

    async def aclose(self) -> None:
        for turns in list(self._known.values()):
            await turns.aclose()

    def _current_turns(self, name: str) -> BudgetQueue:
        """The `BudgetQueue` for a new request. Low limits that no response has confirmed for minutes are discarded
        first, because they could block the request."""
        turns = self.turns(name)
        if turns.account.is_stale(turns.now_s()):
            turns.learn(NO_FEEDBACK)
        return turns


def _give_back(turns: BudgetQueue, waiter: Waiter) -> None:
    if waiter.reservation is not None:
        turns.settle(waiter.reservation, None)
    else:
        _leave(turns, waiter)


def _leave(turns: BudgetQueue, waiter: Waiter) -> None:
    if turns.account.leave(waiter):
        turns.step()


def own_budgets(spec: BudgetSpec) -> Budgets:
    """The budgets of all accounts for a process that shares them with no other process."""
    return Budgets(spec, lambda name: OwnBudgetQueue(name, spec))


class OwnBudgetQueue:
    """The `BudgetQueue` of an account that only this process uses."""

    def __init__(self, name: str, spec: BudgetSpec) -> None:
        self.account = Account(name, spec, now_s=self.now_s())
        self._timer: asyncio.Handle | None = None
        self._fires_s = inf
        """When the timer fires. It is kept here, because for delays below 0.5 ms uvloop returns a handle without the
        method `when`."""
        self.wake_ups = 0

    @property
    def is_idle(self) -> bool:
        return self.account.is_idle

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def step(self) -> None:
        account, now_s = self.account, self.now_s()
        waiter, in_s = account.grant_next(now_s)
        while waiter is not None:
            waiter.wake()
            waiter, in_s = account.grant_next(now_s)
        self._step_at(now_s + in_s + LATE_S)

    async def decided(self, waiter: Waiter) -> None: ...

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        self.account.settle(reservation, used, self.now_s())
        self.step()

    def learn(self, feedback: Feedback) -> None:
        if learn(self.account, feedback, self.now_s()):
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


# ---- for both kinds of `BudgetQueue` ---------------------------------------------------------------------------------


def learn(account: Account, feedback: Feedback, now_s: float) -> bool:
    """Learn the account's limits from a response. Returns True if earlier forecasts of waits are too short now."""
    before = account.per_minute()
    is_stopped = account.learn(feedback, now_s)
    if (after := account.per_minute()) == before:
        return is_stopped
    log.info(
        signals.LIMITS_LEARNED,
        account=account.name,
        kind=str(feedback.kind),
        requests=after.requests,
        input_tokens=after.input_tokens,
        output_tokens=after.output_tokens,
    )
    return is_stopped or any(new < old for new, old in zip(after, before, strict=True))


def refuse(account: Account, waiter: Waiter, wait: Wait) -> None:
    """Refuse a request that waits for budget: its task gets the exception WaitTooLong."""
    account.leave(waiter)
    waiter.refuse(wait)


def refuse_hopeless(account: Account, now_s: float) -> None:
    """Refuse the waiting requests that would certainly get their budget too late for their deadline."""
    for waiter, wait in list(forecast.hopeless(account, now_s)):
        refuse(account, waiter, wait)


# ---- what a request will use -----------------------------------------------------------------------------------------

KINDS = 4096
WEIGHT = 0.1
SPREAD = 1.0
Key = TypeVar("Key")


class UsageClass(NamedTuple):
    """A kind of requests, which are likely to use similar numbers of tokens."""

    lane: str
    task: str
    model: str


def task_of(routing_key: str) -> str:
    """The task of a routing key: `support.chat` for `critical.support.chat.eu`."""
    return ".".join(routing_key.split(".", 3)[1:3])


class _Average:
    def __init__(self, first: float) -> None:
        self.mean = first
        self.deviation = first / 2

    @property
    def expected(self) -> float:
        return self.mean + SPREAD * self.deviation

    def add(self, value: float) -> None:
        off = value - self.mean
        self.mean += WEIGHT * off
        self.deviation += WEIGHT * (abs(off) - self.deviation)


class Estimates:
    """Estimates how many tokens a request will use and how long its call will take."""

    def __init__(self, *, first_output_tokens: float, first_bytes_per_token: float) -> None:
        self._first_output = first_output_tokens
        self._first_ratio = 1 / first_bytes_per_token
        self._outputs: LRUCache[UsageClass, _Average] = LRUCache(KINDS)
        self._runs: LRUCache[UsageClass, _Average] = LRUCache(KINDS)
        self._tokens_per_byte: LRUCache[str, _Average] = LRUCache(KINDS)

    def input_tokens(self, model: str, text_bytes: int, media_tokens: int = 0) -> float:
        known = self._tokens_per_byte.get(model)
        return max(1.0, media_tokens + text_bytes * (self._first_ratio if known is None else known.mean))

    def output_tokens(self, kind: UsageClass, *, max_tokens: int) -> float:
        known = self._outputs.get(kind)
        expected = self._first_output if known is None else known.expected
        return max(1.0, min(float(max_tokens), expected))

    def run_s(self, kind: UsageClass) -> float:
        known = self._runs.get(kind)
        return 0.0 if known is None else known.expected

    def learn_run(self, kind: UsageClass, run_s: float, *, was_cut: bool) -> None:
        """Learn from a call how long it took. `was_cut`: True if the deadline ended the call, which would have taken
        longer."""
        if not was_cut or run_s > self.run_s(kind):
            _learn_value(self._runs, kind, run_s)

    def learn(
        self, kind: UsageClass, *, text_bytes: int, media_tokens: int = 0, input_tokens: float, output_tokens: float
    ) -> None:
        """Learn how many tokens one answer has used. `input_tokens`: only those that count against the limit, so not
        those read from the cache. If the request had images or documents, its text is taken to have its part of them;
        if these are more than the text, the answer teaches nothing about text."""
        _learn_value(self._outputs, kind, output_tokens)
        expected = self.input_tokens(kind.model, text_bytes)
        if text_bytes > 0 and media_tokens < expected:
            part = expected / (expected + media_tokens)
            _learn_value(self._tokens_per_byte, kind.model, part * input_tokens / text_bytes)


def _learn_value(averages: LRUCache[Key, _Average], key: Key, value: float) -> None:
    if (known := averages.get(key)) is None:
        averages[key] = _Average(value)
    else:
        known.add(value)
