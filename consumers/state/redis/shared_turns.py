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
from math import inf
from typing import Any, Final

from consumers.limits import forecast, learned
from consumers.limits.account import Account
from consumers.limits.accounts import Accounts
from consumers.limits.base import Amounts, Feedback, Reservation
from consumers.limits.lines import Waiter
from consumers.limits.spec import BudgetSpec
from consumers.limits.turns import LATE_S, log_learned, refuse, refuse_hopeless
from consumers.state.base import StoreUnavailable
from consumers.state.redis.asking import Changes, argument, candidates
from consumers.state.redis.client import RedisClient
from consumers.state.redis.script import BUDGET
from lanekeeper.telemetry import logs, signals

FORM: Final = 2
"""The version of the format in which the script stores an account. It is part of the Redis key, so processes with
different versions of the format do not share an account. While both versions run, each group of processes assumes that
it has the whole budget, until 429s lower the limits of both groups."""
LOOK_EVERY_S: Final = 0.5
"""The seconds between two runs of the script in Redis while a request of this process waits for budget. By a run this
process learns what other processes have returned to the budget, and they learn that its request still waits. (Redis's
publish/subscribe would need another connection, and can lose messages.)"""
FORGOTTEN_AFTER_S: Final = 4 * LOOK_EVERY_S
"""If a process has not run the script in Redis for this many seconds, other processes no longer count its waiting
requests."""
SETTLE_WITHIN_S: Final = 0.05
"""The longest time, in seconds, until the unused budget of a call is sent to Redis. It is not sent at once, so that one
run of the script can send the unused budget of several calls."""
RETRY_S: Final = 0.5
"""The pause, in seconds, after a run of the script in Redis that failed because Redis is unavailable."""
AT_ONCE_S: Final = 1.0
"""The longest time, in seconds, for which `try_reserve` waits for the answer of Redis, because it takes budget only if
that is possible at once."""
JUMP_S: Final = 0.5
"""If the difference between Redis's clock and this machine's clock has changed by more seconds than this since the last
run of the script, one of the clocks has jumped. A smaller change is due to the time that Redis's answer took."""
SHOWN: Final = 200
"""The maximum number of characters of an error's text that are written to the log."""
log = logs.logger()


def shared_accounts(
    client: RedisClient, *, namespace: str, spec: BudgetSpec, clock: Callable[[], float] = time.time
) -> "Accounts[SharedTurns]":
    """The budgets of all accounts for processes that share a Redis. The caller closes `client`, after
    `Accounts.aclose`."""

    def open_turns(name: str) -> SharedTurns:
        key = f"{namespace}:budget:{FORM}:{name}"
        return SharedTurns(client, key, Account(name, spec, now_s=clock()), clock=clock)

    return Accounts(spec, open_turns)


class SharedTurns:
    """Implements `Turns`, which decides which request gets an account's budget next, for an account that several
    processes share. The decision is made by a script in Redis. `clock`: seconds since 1970, used until Redis's own time
    is known."""

    def __init__(self, client: RedisClient, key: str, account: Account, *, clock: Callable[[], float]) -> None:
        self.account = account
        self._client = client
        self._key = key
        self._offset_s = clock() - asyncio.get_running_loop().time()
        """Redis's clock minus the event loop's clock, in seconds."""
        self._process = secrets.token_hex(6)
        """A random name, by which the script in Redis distinguishes this process from others."""
        self._unsent = Changes()
        self._version = 0
        """Redis numbers the changes of the limits that processes have learned. This is the number of the latest change
        that this process has taken over."""
        self._unreadable = ""
        """The error that was logged last because limits that another process has learned could not be read. It is kept
        so that the same error is not logged again."""
        self._is_due = False
        self._task: asyncio.Task[None] | None = None
        self._stepped = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._fires_s = -inf
        """When the timer for the next run of the script fires. It is kept here, because for delays below 0.5 ms uvloop
        returns a handle without the method `when`."""
        self._answered_s = -inf
        """When Redis last answered."""

    @property
    def is_idle(self) -> bool:
        return self.account.is_idle and not self._unsent.must_be_sent and not self.is_asking

    @property
    def is_asking(self) -> bool:
        """True while a run of the script in Redis for this account is in progress."""
        return self._task is not None

    def now_s(self) -> float:
        """Redis's time, computed from this machine's clock and the difference of the two clocks at the last run of the
        script."""
        return asyncio.get_running_loop().time() + self._offset_s

    def step(self) -> None:
        """Start a run of the script in Redis, in a task of its own. If a run is in progress, another one begins when it
        has ended."""
        self._is_due = True
        if self.now_s() - self._answered_s > FORGOTTEN_AFTER_S:
            self.account.forget_elsewhere()
        if self._task is None:
            # The task works for all waiters. A context of its own keeps the id of one request out of its log lines.
            self._task = asyncio.get_running_loop().create_task(
                self._steps(), name=f"budget {self.account.name}", context=Context()
            )

    async def decided(self, waiter: Waiter) -> None:
        """Wait until the script in Redis has decided whether a new request gets the account's budget at once
        (`Turns.decided`). Returns without a decision if Redis does not answer within `AT_ONCE_S`."""
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
        before, known = account.per_minute(), account.learned()
        levels = [bucket.level for bucket in account.buckets]
        is_less = account.learn(feedback, now_s)
        log_learned(account, feedback, before=before)
        if self._unsent.levels_fell(levels, [bucket.level for bucket in account.buckets]):
            self._step_in(SETTLE_WITHIN_S)  # send the lower levels soon, because levels rise with time
        if account.learned() != known:
            self._unsent.feedback.append(feedback)
            self.step()
        if is_less:
            refuse_hopeless(account, self.now_s())

    async def aclose(self) -> None:
        """Send Redis the changes that it does not have yet, and stop the timer."""
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
        """Run the script in Redis once, and carry out its decision. Returns the seconds until the script should run
        again."""
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
        """Compare Redis's clock with ours. If one of them has jumped, add the jump to all times of the account, so that
        waits stay as long as they were."""
        offset_s = redis_s - asyncio.get_running_loop().time()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(jump_s) > JUMP_S:
            self.account.shift(jump_s)

    def _take_over(self, reply: Mapping[str, Any], learned_text: bytes, sent: Changes, redis_s: float) -> None:
        """Take over the buckets' levels that Redis has computed, and the limits that other processes have learned
        (`learned_text`, empty if there is nothing new)."""
        account, unsent = self.account, self._unsent
        if reply["is_forgotten"]:
            error = f"the account is not kept in form {FORM}"
            log.warning(signals.LEARNED_UNREADABLE, account=account.name, error=error)
        if learned_text:
            self._load(learned_text)
            unsent.feedback = sent.feedback + unsent.feedback
            for feedback in unsent.feedback:  # it replaced what this process has learned since, so learn that again
                account.learn(feedback, redis_s)
            self._is_due = self._is_due or bool(unsent.feedback)
            refuse_hopeless(account, redis_s)
        self._version = reply["version"]
        for bucket, level, savings in zip(account.buckets, reply["levels"], reply["parts"], strict=True):
            bucket.correct(level, savings, redis_s)
        account.waiting_elsewhere = reply["elsewhere"]

    def _load(self, learned_text: bytes) -> None:
        """Take over what other processes have learned about the account's limits. A text that cannot be read changes
        nothing. The error is logged only once, because a process of another version may write such a text every few
        seconds."""
        try:
            self.account.load(learned.read(learned_text))
            self._unreadable = ""
        except learned.UnreadableError as error:
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                log.warning(signals.LEARNED_UNREADABLE, account=self.account.name, error=str(error)[:SHOWN])

    def _grant(self, waiters: Sequence[Waiter], reply: Mapping[str, Any], redis_s: float) -> float:
        """Give the waiting requests that Redis has granted their reservations, and wake their tasks. Returns the
        seconds until the script should run again."""
        account = self.account
        for index, *from_savings in reply["granted"]:
            waiter = waiters[index - 1]
            if not account.begin(waiter, from_savings=Amounts(*from_savings), now_s=redis_s):
                # the waiter has left its line meanwhile
                self._unsent.give_back(waiter.lane, waiter.amounts, from_savings)
                self._is_due = True
            elif not waiter.wake():
                assert waiter.reservation is not None
                self.settle(waiter.reservation, None)
        if not account.lines.is_empty:
            account.is_pressed = True
            if reply["granted"]:
                self._is_due = True  # waiters behind those that were sent may be granted as well
        self._refuse_late_firsts(redis_s)
        return float(reply["look_in"]) if reply["look_in"] >= 0 else LOOK_EVERY_S

    def _refuse_late_firsts(self, now_s: float) -> None:
        """Compute the forecast of each lane's first waiting request again, because the forecast that was made when the
        request began to wait may not have counted the requests of other processes. Refuse the request if it will
        certainly get its budget too late for its deadline."""
        for lane, head in enumerate(self.account.lines.heads):
            if head is not None and head.future is not None and head.until_s is not None:
                wait = forecast.first(self.account, lane, head.amounts, now_s)
                if now_s + wait.least_s > head.until_s:
                    refuse(self.account, head, wait)
                    self._is_due = True
