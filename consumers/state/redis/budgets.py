"""The budgets of all processes, in Redis: one script a step, for all that happened in this process since the last one.

Requests wait here as they do in one process (`Desk`); whose turn it is the script decides. What is given back and what
was learned goes along with the next step. Where Redis is away nobody is granted anything, and it is tried again.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import Any

from consumers.limits import forecast, learned
from consumers.limits.account import Account
from consumers.limits.amounts import Amounts
from consumers.limits.base import Heard, Reservation, Wait, Waiting
from consumers.limits.desk import Desk, Sleeper
from consumers.limits.local import LATE_S, tell
from consumers.limits.order import Waiter
from consumers.limits.spec import BudgetSpec
from consumers.state.base import StoreUnavailable
from consumers.state.redis.budget_ledger import Ledger
from consumers.state.redis.budget_script import STEP
from consumers.state.redis.client import RedisClient
from lanekeeper.telemetry import logs, signals

FORM = 2
"""Of the account as the script keeps it. A version of Lanekeeper that keeps it otherwise has another number, and so
another key: while both run, each spends the whole budget, and 429s lower it for both."""
LOOK_EVERY_S = 0.5
"""While somebody waits: what other processes give back is noticed, and they know that we wait still. Redis could tell
(publish and subscribe), at the price of a connection more and of what is lost with it."""
FORGOTTEN_AFTER_S = 4 * LOOK_EVERY_S
SETTLE_WITHIN_S = 0.05
RETRY_S = 0.5
TOGETHER = 16
"""So many of each lane may be granted in one step."""
AT_ONCE_S = 1.0
"""Whoever will not wait has waited long enough then."""
JUMP_S = 0.5
"""What the two clocks differ by from one step to the next is the time that the answer took, and less."""


log = logs.logger()


class RedisBudgets:
    """See `Budgets`. `client` is its caller's to close, after `aclose`."""

    def __init__(self, client: RedisClient, *, namespace: str, spec: BudgetSpec) -> None:
        self._client = client
        self._namespace = namespace
        self._spec = spec
        self._offset_s = 0.0
        """Redis's clock less the event loop's; by our own clock until it has told."""
        self._lanes = tuple(spec.lanes)
        self._usual = {
            "process": secrets.token_hex(6),
            "form": FORM,
            "expires_s": FORGOTTEN_AFTER_S,
            "shares": [lane.share for lane in spec.lanes.values()],
            "boosts": [-1 if lane.boost_s is None else lane.boost_s for lane in spec.lanes.values()],
        }
        """What every step tells."""
        self._desk = Desk(
            spec,
            clock=self._now_s,
            step=self._step,
            give_back=lambda unwanted: self.settle(unwanted, None),
            learn=self.learn,
        )
        self._ledgers: dict[str, Ledger] = {}
        self.steps = 0
        """Round trips."""

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
        """Nothing where Redis is away, or slow."""
        books, waiter = self._desk.join(account, lane=lane, amounts=amounts)
        ledger = self._ledger(books)
        try:
            async with asyncio.timeout(AT_ONCE_S):
                # the step that is under way may have begun before we joined
                while books.lines.heads[waiter.lane] is waiter and ledger.task is not None:
                    was_due = ledger.is_due
                    await ledger.stepped.wait()
                    if not was_due:
                        break
        except TimeoutError:
            pass
        except BaseException:
            if waiter.reservation is not None:
                self.settle(waiter.reservation, None)
            raise
        finally:
            if waiter.reservation is None:
                self._desk.leave(books, waiter)
        return waiter.reservation

    def settle(self, reservation: Reservation, used: Amounts | None) -> None:
        if reservation.is_settled:
            return
        ledger = self._ledger(self._desk.books(reservation.account))
        over = [amount - (used[each] if used else 0.0) for each, amount in enumerate(reservation.amounts)]
        ledger.books.settle(reservation, used, self._now_s())
        if any(over):
            ledger.give_back(self._lanes.index(reservation.lane), over, reservation.own)
        if any(over) or len(ledger.books.lines):
            self._look_in(ledger, SETTLE_WITHIN_S)

    def learn(self, account: str, heard: Heard) -> None:
        ledger = self._ledger(self._desk.books(account))
        books = ledger.books
        books.refill(self._now_s())
        before, known, levels = books.per_minute(), books.learned(), [bucket.level for bucket in books.buckets]
        is_less = books.learn(heard, self._now_s())
        tell(account, heard, before=before, after=books.per_minute(), pause_s=self._spec.spend_pause_s)
        if ledger.lowered(levels):
            self._look_in(ledger, SETTLE_WITHIN_S)  # later it would not be true any more
        if books.learned() != known:
            ledger.heard.append(heard)
            ledger.has_changed = True
            self._step(books)
        if is_less:
            self._desk.refuse_hopeless(books)

    async def predicted_wait(self, account: str, *, lane: str, amounts: Amounts) -> Wait:
        """By what Redis told last."""
        return self._desk.predicted_wait(account, lane=lane, amounts=amounts)

    def waiting(self) -> Mapping[str, Mapping[str, Waiting]]:
        return self._desk.waiting()

    def paused(self) -> Mapping[str, float]:
        return self._desk.paused()

    async def aclose(self) -> None:
        """Tell Redis what it has not been told; whoever waits must have gone."""
        for ledger in list(self._ledgers.values()):
            if ledger.timer is not None:
                ledger.timer.cancel()
            if ledger.back or ledger.has_changed:
                self._step(ledger.books)
            if ledger.task is not None:
                await ledger.task
            if ledger.timer is not None:
                ledger.timer.cancel()

    # ---- stepping ----------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        """Redis's time, as far as we know it."""
        loop_s = asyncio.get_running_loop().time()
        if not self._offset_s:
            self._offset_s = time.time() - loop_s
        return loop_s + self._offset_s

    def _set_clock(self, redis_s: float) -> None:
        """By what Redis says. Its clock may be another than ours, or jump: whoever waits has waited no longer by it."""
        offset_s = redis_s - asyncio.get_running_loop().time()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(jump_s) > JUMP_S:
            for books in self._desk.accounts.values():
                books.shift(jump_s)

    def _ledger(self, books: Account) -> Ledger:
        ledger = self._ledgers.get(books.name)
        if ledger is None or ledger.books is not books:  # forgotten meanwhile, and opened again
            for name in self._ledgers.keys() - self._desk.accounts.keys():
                del self._ledgers[name]
            ledger = self._ledgers[books.name] = Ledger(books)
        return ledger

    def _step(self, books: Account) -> None:
        """Ask Redis, as soon as it has answered what was asked before."""
        if self._desk.accounts.get(books.name) is not books:  # forgotten: nobody waits for it
            return
        ledger = self._ledger(books)
        ledger.is_due = True
        if self._now_s() - ledger.told_s > FORGOTTEN_AFTER_S:
            books.elsewhere = [(0.0, 0.0, 0.0) for _ in self._lanes]
        if ledger.task is None:
            # in a context of its own: it works for all who wait, and its log lines are about none of them
            ledger.task = asyncio.get_running_loop().create_task(
                self._steps(ledger), name=f"budget {books.name}", context=Context()
            )

    async def _steps(self, ledger: Ledger) -> None:
        in_s = RETRY_S
        try:
            while ledger.is_due:
                ledger.is_due = False
                in_s = await self._one(ledger)
                ledger.stepped.set()
                ledger.stepped = asyncio.Event()
        except StoreUnavailable:  # whoever waits goes on waiting; `Pausing` tells why
            in_s = RETRY_S
        finally:
            ledger.task = None
            ledger.stepped.set()
            ledger.stepped = asyncio.Event()
            if len(ledger.books.lines) or ledger.back:
                self._look_in(ledger, min(in_s + LATE_S, LOOK_EVERY_S))

    def _look_in(self, ledger: Ledger, in_s: float) -> None:
        loop = asyncio.get_running_loop()
        fires_s = loop.time() + in_s
        if ledger.timer is not None:
            if ledger.fires_s <= fires_s:
                return
            ledger.timer.cancel()
        ledger.fires_s = fires_s
        ledger.timer = loop.call_later(in_s, self._look, ledger)

    def _look(self, ledger: Ledger) -> None:
        # not told by the time: uvloop's timers may fire half a millisecond early
        ledger.timer = None
        self._step(ledger.books)

    async def _one(self, ledger: Ledger) -> float:
        """One round trip; in how many seconds to ask again."""
        books = ledger.books
        waiters, room = self._candidates(books)
        asked, told = ledger.asked(waiters, room=room, now_s=self._now_s())
        key = f"{self._namespace}:budget:{FORM}:{books.name}"
        self.steps += 1
        try:
            said = await self._client.run(STEP, [key], json.dumps(self._usual | asked), ledger.learned())
        except BaseException:
            ledger.failed(told)
            raise
        redis_s, reply, text = float(said[0]), json.loads(said[1]), said[2]
        self._set_clock(redis_s)
        ledger.told_s = redis_s
        self._believe(ledger, reply, text, told.heard, redis_s)
        return self._grant(ledger, waiters, reply, redis_s)

    def _candidates(self, books: Account) -> tuple[Sequence[Waiter], int]:
        """Who may be granted in one step, in order by lane, and how many of them."""
        calls = books.concurrency
        calls.regain(self._now_s())
        if books.stopped_s(self._now_s()) > 0 or calls.is_full:
            return (), 0
        waiters = [each for lane in range(len(self._lanes)) for each in books.lines.firsts(lane, TOGETHER)]
        if not calls.is_limited:
            return waiters, len(waiters)
        return waiters, 1 if any(books.turns()) else max(1, int(calls.limit) - calls.running)

    def _believe(self, ledger: Ledger, reply: Mapping[str, Any], text: bytes, heard: int, redis_s: float) -> None:
        """What Redis counts, and what others have learned."""
        books = ledger.books
        if reply["is_forgotten"]:
            log.warning(signals.LEARNED_UNREADABLE, account=books.name, error=f"the account is not of form {FORM}")
        if text:
            self._load(ledger, text)
            for each in ledger.heard:  # what we have learned meanwhile is not there yet
                books.learn(each, redis_s)
            ledger.has_changed = bool(ledger.heard)
            ledger.is_due = ledger.is_due or ledger.has_changed
            self._desk.refuse_hopeless(books)
        else:
            del ledger.heard[:heard]
        ledger.version = reply["version"]
        for bucket, level, parts in zip(books.buckets, reply["levels"], reply["parts"], strict=True):
            bucket.correct(level, parts, redis_s)
        books.elsewhere = reply["elsewhere"]

    def _load(self, ledger: Ledger, text: bytes) -> None:
        """What others have learned; what cannot be read is forgotten, and what this process knows stands."""
        try:
            ledger.books.load(learned.read(text))
            ledger.unreadable = ""
        except learned.UnreadableError as error:
            if str(error) != ledger.unreadable:  # another version writes every few seconds: said once
                ledger.unreadable = str(error)
                log.warning(signals.LEARNED_UNREADABLE, account=ledger.books.name, error=str(error)[:200])

    def _grant(self, ledger: Ledger, waiters: Sequence[Waiter], reply: Mapping[str, Any], redis_s: float) -> float:
        books = ledger.books
        for index, *own in reply["granted"]:
            waiter = waiters[index - 1]
            reservation = Reservation(
                account=books.name,
                lane=self._lanes[waiter.lane],
                amounts=waiter.amounts,
                own=Amounts(*own),
                at_s=redis_s,
            )
            if not books.begin(waiter, reservation):  # gone while we asked
                ledger.give_back(waiter.lane, waiter.amounts, own)
                ledger.is_due = True
            elif not self._desk.wake(waiter):
                self.settle(reservation, None)
        if len(books.lines):
            books.is_pressed = True
        if reply["granted"] and len(books.lines):
            ledger.is_due = True  # there may be more behind those that we asked for
        self._refuse_late_firsts(ledger, redis_s)
        return float(reply["look_in"]) if reply["look_in"] >= 0 else LOOK_EVERY_S

    def _refuse_late_firsts(self, ledger: Ledger, now_s: float) -> None:
        """Those that nobody of this process is before: what was predicted when they came was known by others only."""
        books = ledger.books
        for lane, head in enumerate(books.lines.heads):
            if isinstance(head, Sleeper) and head.until_s is not None:
                wait = forecast.first(books, lane, head.amounts, now_s)
                if now_s + wait.least_s > head.until_s:
                    self._desk.refuse(books, head, wait)
                    ledger.is_due = True
