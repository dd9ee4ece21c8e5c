"""The turns of an account that several processes share. A script in Redis decides; one step covers all that happened in
this process since the last one.

The next step also sends what was given back and what was learned. While Redis is away, nothing is granted, and the step
is tried again.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from importlib.resources import files
from math import inf
from typing import Any, Final

from consumers.limits import forecast
from consumers.limits.account import Account
from consumers.limits.accounts import Accounts
from consumers.limits.amounts import Amounts
from consumers.limits.base import Heard, Reservation
from consumers.limits.spec import BudgetSpec
from consumers.limits.turns import LATE_S, log_learned, refuse, refuse_hopeless
from consumers.limits.waiter import Waiter
from consumers.state.base import StoreUnavailable
from consumers.state.redis import asking
from consumers.state.redis.client import RedisClient
from consumers.state.redis.knowledge import Knowledge
from consumers.state.redis.script import Script
from consumers.state.redis.unsent import Unsent
from lanekeeper.telemetry import logs, signals

FORM: Final = 2
"""The number of the format in which the script keeps an account. A Lanekeeper with another format has another number
and so another key: while both run, each spends the whole budget, and 429s lower it for both."""
LUA: Final = files("consumers.state.redis")
STEP: Final = Script("".join(LUA.joinpath(name).read_text(encoding="utf-8") for name in ("bucket.lua", "budget.lua")))
LOOK_EVERY_S: Final = 0.5
"""How often a process asks while a request waits. So it notices what others give back, and they know that it still
waits. Redis could notify processes (publish and subscribe), but that takes another connection, and messages may be
lost."""
FORGOTTEN_AFTER_S: Final = 4 * LOOK_EVERY_S
"""A process that says nothing for this long no longer counts as waiting."""
SETTLE_WITHIN_S: Final = 0.05
RETRY_S: Final = 0.5
AT_ONCE_S: Final = 1.0
"""How long a request that does not wait for its turn (`try_reserve`) waits for Redis."""
JUMP_S: Final = 0.5
"""A clock has jumped if Redis's and ours differ by this much more or less than one step before. Smaller differences are
the time that an answer took."""
log = logs.logger()


def shared_accounts(
    client: RedisClient, *, namespace: str, spec: BudgetSpec, clock: Callable[[], float] = time.time
) -> "Accounts[SharedTurns]":
    """The budgets of all processes that share a Redis. The caller closes `client`, after `Accounts.aclose`."""

    def open_turns(name: str) -> SharedTurns:
        key = f"{namespace}:budget:{FORM}:{name}"
        return SharedTurns(client, key, Account(name, spec, now_s=clock()), clock=clock)

    return Accounts(spec, open_turns)


class SharedTurns:
    """Implements `Turns`. `clock`: seconds since 1970, used until Redis's own time is known."""

    def __init__(self, client: RedisClient, key: str, account: Account, *, clock: Callable[[], float]) -> None:
        self.account = account
        self._client = client
        self._key = key
        self._offset_s = clock() - asyncio.get_running_loop().time()
        """Redis's clock minus the event loop's."""
        self._usual = {
            "process": secrets.token_hex(6),
            "form": FORM,
            "expires_s": FORGOTTEN_AFTER_S,
            "shares": account.shares,
        }
        """The part of the question that is the same in each step."""
        self._unsent = Unsent()
        self._version = 0
        """Redis counts the changes to what all processes have learned; this process knows all up to this number."""
        self._knowledge = Knowledge(account)
        self._is_due = False
        self._task: asyncio.Task[None] | None = None
        self._stepped = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._fires_s = -inf
        """When the timer fires. uvloop's handle does not know this for less than half a millisecond."""
        self._told_s = -inf
        self.steps = 0
        """How many round trips there were."""

    @property
    def is_idle(self) -> bool:
        return self.account.is_idle and not self._unsent.back and not self._unsent.has_learned and not self.is_asking

    @property
    def is_asking(self) -> bool:
        """Whether a step is in progress."""
        return self._task is not None

    def now_s(self) -> float:
        """Redis's time, as far as we know it."""
        return asyncio.get_running_loop().time() + self._offset_s

    def step(self) -> None:
        """Ask Redis, as soon as it has answered the step before."""
        self._is_due = True
        if self.now_s() - self._told_s > FORGOTTEN_AFTER_S:
            self.account.nobody_elsewhere()
        if self._task is None:
            # in its own context: it works for all waiters, so its log lines must not name one request
            self._task = asyncio.get_running_loop().create_task(
                self._steps(), name=f"budget {self.account.name}", context=Context()
            )

    async def decided(self, waiter: Waiter) -> None:
        """Returns without a decision if Redis is away or slow."""
        try:
            async with asyncio.timeout(AT_ONCE_S):
                # the step that is under way may have begun before this waiter joined
                while self.account.lines.heads[waiter.lane] is waiter and self._task is not None:
                    was_due = self._is_due
                    await self._stepped.wait()
                    if not was_due:
                        break
        except TimeoutError:
            pass

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        over = [amount - (used[each] if used else 0.0) for each, amount in enumerate(reservation.amounts)]
        self.account.settle(reservation, used, self.now_s())
        if any(over):
            self._unsent.give_back(self.account.lanes.index(reservation.lane), over, reservation.own)
        if any(over) or not self.account.lines.is_empty:
            self._look_in(SETTLE_WITHIN_S)

    def learn(self, heard: Heard) -> None:
        account, now_s = self.account, self.now_s()
        account.refill(now_s)
        before, known = account.per_minute(), account.learned()
        levels = [bucket.level for bucket in account.buckets]
        is_less = account.learn(heard, now_s)
        log_learned(account, heard, before=before)
        if self._unsent.levels_fell(levels, [bucket.level for bucket in account.buckets]):
            self._look_in(SETTLE_WITHIN_S)  # look again soon, because the level changes with time
        if account.learned() != known:
            self._unsent.heard.append(heard)
            self._unsent.has_learned = True
            self.step()
        if is_less:
            refuse_hopeless(account, self.now_s())

    async def aclose(self) -> None:
        """Tell Redis what it was not told yet."""
        if self._timer is not None:
            self._timer.cancel()
        if self._unsent.back or self._unsent.has_learned:
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
                in_s = await self._one()
                self._tell_stepped()
        except StoreUnavailable:  # the waiters keep waiting; `Pausing` reports the reason
            in_s = RETRY_S
        finally:
            self._task = None
            self._tell_stepped()
            if not self.account.lines.is_empty or self._unsent.back:
                self._look_in(min(in_s + LATE_S, LOOK_EVERY_S))

    def _tell_stepped(self) -> None:
        self._stepped.set()
        self._stepped = asyncio.Event()

    def _look_in(self, in_s: float) -> None:
        loop = asyncio.get_running_loop()
        fires_s = loop.time() + in_s
        if self._timer is not None:
            if self._fires_s <= fires_s:
                return
            self._timer.cancel()
        self._fires_s = fires_s
        self._timer = loop.call_later(in_s, self._look)

    def _look(self) -> None:
        # The clock does not show whether the timer has fired: uvloop's timers may fire half a millisecond early.
        self._timer = None
        self.step()

    async def _one(self) -> float:
        """One round trip. Returns in how many seconds to ask again."""
        waiters, room = asking.candidates(self.account, self.now_s())
        sent = self._unsent.take()
        asked = self._usual | asking.question(self.account, waiters, sent, room=room, now_s=self.now_s())
        asked["version"] = self._version
        self.steps += 1
        try:
            said = await self._client.run(STEP, [self._key], json.dumps(asked), self._knowledge.text())
        except BaseException:
            self._unsent.failed(sent)
            raise
        redis_s, reply, text = float(said[0]), json.loads(said[1]), said[2]
        self._set_clock(redis_s)
        self._told_s = redis_s
        self._believe(reply, text, sent.heard, redis_s)
        return self._grant(waiters, reply, redis_s)

    def _set_clock(self, redis_s: float) -> None:
        """Redis's clock may differ from ours, or jump. At a jump, stored times move with it: waits stay the same."""
        offset_s = redis_s - asyncio.get_running_loop().time()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(jump_s) > JUMP_S:
            self.account.shift(jump_s)

    def _believe(self, reply: Mapping[str, Any], text: bytes, heard: int, redis_s: float) -> None:
        """Take over what Redis counts and what other processes have learned."""
        account, unsent = self.account, self._unsent
        if reply["is_forgotten"]:
            error = f"the account is not kept in form {FORM}"
            log.warning(signals.LEARNED_UNREADABLE, account=account.name, error=error)
        if text:
            self._knowledge.load(text)
            for each in unsent.heard:  # Redis does not know yet what this process has learned meanwhile
                account.learn(each, redis_s)
            unsent.has_learned = bool(unsent.heard)
            self._is_due = self._is_due or unsent.has_learned
            refuse_hopeless(account, redis_s)
        else:
            del unsent.heard[:heard]
        self._version = reply["version"]
        for bucket, level, parts in zip(account.buckets, reply["levels"], reply["parts"], strict=True):
            bucket.correct(level, parts, redis_s)
        account.elsewhere = reply["elsewhere"]

    def _grant(self, waiters: Sequence[Waiter], reply: Mapping[str, Any], redis_s: float) -> float:
        account = self.account
        for index, *own in reply["granted"]:
            waiter = waiters[index - 1]
            if not account.begin(waiter, own=Amounts(*own), now_s=redis_s):  # it left its line meanwhile
                self._unsent.give_back(waiter.lane, waiter.amounts, own)
                self._is_due = True
            elif not waiter.wake():
                assert waiter.reservation is not None
                self.settle(waiter.reservation, None)
        if not account.lines.is_empty:
            account.is_pressed = True
            if reply["granted"]:
                self._is_due = True  # waiters behind those that we asked for may also go
        self._refuse_late_firsts(redis_s)
        return float(reply["look_in"]) if reply["look_in"] >= 0 else LOOK_EVERY_S

    def _refuse_late_firsts(self, now_s: float) -> None:
        """Look at the first of each lane again: its forecast may have missed waiters of other processes."""
        for lane, head in enumerate(self.account.lines.heads):
            if head is not None and head.turn is not None and head.until_s is not None:
                wait = forecast.first(self.account, lane, head.amounts, now_s)
                if now_s + wait.least_s > head.until_s:
                    refuse(self.account, head, wait)
                    self._is_due = True
