"""Shares the budget of an account among several processes: a script in Redis decides which of their waiting requests is
granted next.

One run of the script (a step) gets this process's first waiting requests, and what this process has returned to the
budget and learned since the step before. While Redis is unavailable, no request gets budget, and the step is tried
again.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from consumers.limits import forecast, learned
from consumers.limits.account import Account, Waiter
from consumers.limits.base import Amounts, BudgetSpec, Feedback, Reservation
from consumers.limits.budgets import LATE_S, Budgets, learn, refuse, refuse_hopeless
from consumers.state.base import StoreUnavailable
from consumers.state.redis.client import BUDGET, QUOTED_CHARS, RedisClient
from lanekeeper.telemetry import logs, signals

FORM: Final = 3
"""The version of the format in which the script stores an account. It is part of the Redis key, so processes with
different versions of the format do not share an account. While both versions run, each group of processes assumes that
it has the whole budget, until 429s lower the limits of both groups."""
LOOK_EVERY_S: Final = 0.5
"""The pause between two steps while a request of this process waits. By a step this process learns what others have
returned, and they learn that its request still waits. (Redis's publish/subscribe would need another connection, and can
lose messages.)"""
FORGOTTEN_AFTER_S: Final = 4 * LOOK_EVERY_S
"""Others no longer count the waiting requests of a process that has run no step for this long."""
SETTLE_WITHIN_S: Final = 0.05
RETRY_S: Final = 0.5
AT_ONCE_S: Final = 1.0
"""How long `try_reserve` waits for the answer of Redis, because it takes budget only if that is possible at once."""
JUMP_S: Final = 0.5
"""If Redis's clock has moved against ours by more than this since the last step, one of them has jumped."""
TOGETHER: Final = 16
log = logs.logger()


@dataclass(slots=True)
class Changes:
    """Changes of an account's budget that this process has made since the last step."""

    back: list[dict[str, Any]] = field(default_factory=list)
    lower: list[float] = field(default_factory=lambda: [inf, inf, inf])
    feedback: list[Feedback] = field(default_factory=list)
    """Responses that changed what was learned. If another process was first, its limits replace those of this process,
    which then learns from these responses again."""

    @property
    def must_be_sent(self) -> bool:
        return bool(self.back or self.feedback)

    def give_back(self, lane: int, unused: Sequence[float], from_savings: Sequence[float]) -> None:
        """Note what to return after a call. `unused`: for each bucket, the amount that was reserved and not used; a
        negative amount was used beyond the reservation. `from_savings`: the part of the reservation that came from the
        lane's savings."""
        self.back.append({"lane": lane + 1, "over": list(unused), "own": list(from_savings)})

    def levels_fell(self, before: Sequence[float], after: Sequence[float]) -> bool:
        """Note to which levels the buckets were lowered. Returns True if a level fell."""
        found = False
        for index, (was, now) in enumerate(zip(before, after, strict=True)):
            if now < was:
                self.lower[index] = min(self.lower[index], max(0.0, now))
                found = True
        return found

    def add_failed(self, sent: "Changes") -> None:
        """Add the changes that were sent with a failed step. It is unknown whether Redis has counted them. Amounts used
        beyond a reservation are sent again. Amounts given back are not: if they were counted twice, more would be spent
        than the limits allow."""
        for change in sent.back:
            change["over"] = [min(0.0, unused) for unused in change["over"]]
        self.back = [change for change in sent.back if any(change["over"])] + self.back
        self.feedback = sent.feedback + self.feedback


def candidates(account: Account, now_s: float) -> tuple[Sequence[Waiter], int]:
    """Returns the waiting requests that one step may grant, and how many of them at most."""
    calls = account.concurrency
    calls.tick(now_s)
    if account.stopped_s(now_s) > 0:
        return (), 0
    waiters: list[Waiter] = []
    for lane in range(len(account.lanes)):
        if calls.may_begin(lane, now_s):
            waiters += account.lines.firsts(lane, TOGETHER)
        elif account.lines.heads[lane] is not None:
            calls.is_wanted = True
    if not calls.is_limited:
        return waiters, len(waiters)
    return waiters, 1 if any(account.due_for_a_call()) else max(1, int(calls.limit) - calls.running)


def argument(
    account: Account, waiters: Sequence[Waiter], changes: Changes, *, max_grants: int, now_s: float
) -> dict[str, Any]:
    """Returns what the script is asked, before it is turned into JSON."""
    return {
        "limits": account.per_minute(),
        "lanes": account.lanes,
        "ranks": account.ranks,
        "shares": account.shares,
        "bursts": [bucket.burst for bucket in account.buckets],
        "most": [bucket.most for bucket in account.buckets],
        "guessed": account.guessed,
        "stopped_until": max(account.held_until_s, 0.0),
        "changed": bool(changes.feedback),
        "back": changes.back,
        "lower": [-1 if level == inf else level for level in changes.lower],
        "waiters": [
            {"lane": waiter.lane + 1, "age": now_s - waiter.arrived_s, "amounts": waiter.amounts} for waiter in waiters
        ],
        "sums": [account.lines.sums(lane) for lane in range(len(account.lanes))],
        "room": max_grants,
        "turns": account.due_for_a_call(),
    }


def shared_budgets(
    client: RedisClient, *, namespace: str, spec: BudgetSpec, clock: Callable[[], float] = time.time
) -> "Budgets":
    """The budgets of processes that share a Redis. The caller closes `client`, after `Budgets.aclose`."""

    def open_queue(name: str) -> SharedBudgetQueue:
        key = f"{namespace}:budget:{FORM}:{name}"
        return SharedBudgetQueue(client, key, Account(name, spec, now_s=clock()), clock=clock)

    return Budgets(spec, open_queue)


class SharedBudgetQueue:
    """Implements `BudgetQueue` for an account that several processes share. `clock`: seconds since 1970, used until
    Redis's own time is known."""

    def __init__(self, client: RedisClient, key: str, account: Account, *, clock: Callable[[], float]) -> None:
        self.account = account
        self._client = client
        self._key = key
        self._offset_s = clock() - asyncio.get_running_loop().time()
        self._process = secrets.token_hex(6)
        self._unsent = Changes()
        self._version = 0
        self._unreadable = ""
        self._is_due = False
        self._task: asyncio.Task[None] | None = None
        self._stepped = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._fires_s = -inf
        """Kept here, because for delays below 0.5 ms uvloop returns a handle without the method `when`."""
        self._answered_s = -inf

    @property
    def is_idle(self) -> bool:
        return self.account.is_idle and not self._unsent.must_be_sent and not self.is_asking

    @property
    def is_asking(self) -> bool:
        return self._task is not None

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self._offset_s

    def step(self) -> None:
        """Run the script, in a task of its own. If it runs already, it runs again after that."""
        self._is_due = True
        if self.now_s() - self._answered_s > FORGOTTEN_AFTER_S:
            self.account.forget_elsewhere()
        if self._task is None:
            # The task works for all waiters. A context of its own keeps the id of one request out of its log lines.
            self._task = asyncio.get_running_loop().create_task(
                self._steps(), name=f"budget {self.account.name}", context=Context()
            )

    async def decided(self, waiter: Waiter) -> None:
        try:
            async with asyncio.timeout(AT_ONCE_S):
                # The running step may have begun before this waiter joined the line; then wait for the next one.
                while self.account.lines.heads[waiter.lane] is waiter and self._task is not None:
                    was_due = self._is_due
                    await self._stepped.wait()
                    if not was_due:
                        break
        except TimeoutError:
            pass

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        unused = [amount - (used[index] if used else 0.0) for index, amount in enumerate(reservation.amounts)]
        self.account.settle(reservation, used, self.now_s())
        if any(unused):
            lane = self.account.lanes.index(reservation.lane)
            self._unsent.give_back(lane, unused, reservation.from_savings)
        if any(unused) or not self.account.lines.is_empty:
            self._step_in(SETTLE_WITHIN_S)

    def learn(self, feedback: Feedback) -> None:
        account, now_s = self.account, self.now_s()
        account.refill(now_s)
        known = account.learned()
        levels = [bucket.level for bucket in account.buckets]
        is_less = learn(account, feedback, now_s)
        if self._unsent.levels_fell(levels, [bucket.level for bucket in account.buckets]):
            self._step_in(SETTLE_WITHIN_S)  # send the lower levels soon, because levels rise with time
        if account.learned() != known:
            self._unsent.feedback.append(feedback)
            self.step()
        if is_less:
            refuse_hopeless(account, self.now_s())

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._unsent.must_be_sent:
            self.step()
        if self._task is not None:
            await self._task
        if self._timer is not None:
            self._timer.cancel()

    # ---- stepping ----------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        in_s = RETRY_S
        try:
            while self._is_due:
                self._is_due = False
                in_s = await self._run_step()
                self._tell_stepped()
        except StoreUnavailable:  # the waiters keep waiting; `Pausing` reports the reason
            in_s = RETRY_S
        finally:
            self._task = None
            self._tell_stepped()
            if not self.account.lines.is_empty or self._unsent.back:
                self._step_in(min(in_s + LATE_S, LOOK_EVERY_S))

    def _tell_stepped(self) -> None:
        self._stepped.set()
        self._stepped = asyncio.Event()

    def _step_in(self, in_s: float) -> None:
        loop = asyncio.get_running_loop()
        fires_s = loop.time() + in_s
        if self._timer is not None:
            if self._fires_s <= fires_s:
                return
            self._timer.cancel()
        self._fires_s = fires_s
        self._timer = loop.call_later(in_s, self._on_timer)

    def _on_timer(self) -> None:
        # The clock does not show whether the timer has fired: uvloop's timers may fire half a millisecond early.
        self._timer = None
        self.step()

    async def _run_step(self) -> float:
        account, now_s = self.account, self.now_s()
        waiters, max_grants = candidates(account, now_s)
        sent, self._unsent = self._unsent, Changes()
        state = {"process": self._process, "form": FORM, "expires_s": FORGOTTEN_AFTER_S, "version": self._version}
        asked = state | argument(account, waiters, sent, max_grants=max_grants, now_s=now_s)
        try:
            answer = await self._client.run(BUDGET, [self._key], json.dumps(asked), learned.to_json(account.learned()))
        except BaseException:
            self._unsent.add_failed(sent)
            raise
        redis_s, reply, learned_text = float(answer[0]), json.loads(answer[1]), answer[2]
        self._set_clock(redis_s)
        self._answered_s = redis_s
        self._take_over(reply, learned_text, sent, redis_s)
        return self._grant(waiters, reply, redis_s)

    def _set_clock(self, redis_s: float) -> None:
        """If a clock has jumped, add the jump to all times of the account, so that waits stay as long as they were."""
        offset_s = redis_s - asyncio.get_running_loop().time()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(jump_s) > JUMP_S:
            self.account.shift(jump_s)

    def _take_over(self, reply: Mapping[str, Any], learned_text: bytes, sent: Changes, redis_s: float) -> None:
        """Take over the buckets' levels, and what other processes have learned (empty: nothing new)."""
        account, unsent = self.account, self._unsent
        if reply["is_forgotten"]:
            error = f"the account is not kept in form {FORM}"
            log.warning(signals.LEARNED_UNREADABLE, account=account.name, error=error)
        if learned_text:
            self._load(learned_text)
            unsent.feedback = sent.feedback + unsent.feedback
            for feedback in unsent.feedback:  # it replaced what this process has learned since, so learn that again
                account.learn_limits(feedback, redis_s)
            self._is_due = self._is_due or bool(unsent.feedback)
            refuse_hopeless(account, redis_s)
        self._version = reply["version"]
        for bucket, level, savings in zip(account.buckets, reply["levels"], reply["parts"], strict=True):
            bucket.correct(level, savings, redis_s)
        account.waiting_elsewhere = reply["elsewhere"]

    def _load(self, learned_text: bytes) -> None:
        try:
            self.account.load(learned.from_json(learned_text))
            self._unreadable = ""
        except learned.UnreadableError as error:
            if str(error) != self._unreadable:  # a process of another version may write it every few seconds
                self._unreadable = str(error)
                log.warning(signals.LEARNED_UNREADABLE, account=self.account.name, error=str(error)[:QUOTED_CHARS])

    def _grant(self, waiters: Sequence[Waiter], reply: Mapping[str, Any], redis_s: float) -> float:
        account = self.account
        for index, *from_savings in reply["granted"]:
            waiter = waiters[index - 1]
            if not account.begin(waiter, from_savings=Amounts(*from_savings), now_s=redis_s):
                # the waiter has gone meanwhile
                self._unsent.give_back(waiter.lane, waiter.amounts, from_savings)
                self._is_due = True
            else:
                waiter.wake()
        if not account.lines.is_empty:
            account.is_pressed = True
            if reply["granted"]:
                self._is_due = True  # waiters behind those that were sent may be granted as well
        self._refuse_late_firsts(redis_s)
        return float(reply["look_in"]) if reply["look_in"] >= 0 else LOOK_EVERY_S

    def _refuse_late_firsts(self, now_s: float) -> None:
        """Refuse each lane's first request if it will get its budget too late."""
        for lane, head in enumerate(self.account.lines.heads):
            if head is not None and head.future is not None and head.until_s is not None:
                wait = forecast.first(self.account, lane, head.amounts, now_s)
                if now_s + wait.least_s > head.until_s:
                    refuse(self.account, head, wait)
                    self._is_due = True
