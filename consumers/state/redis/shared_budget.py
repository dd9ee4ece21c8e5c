"""Shares the budget of an account among several processes: a script in Redis decides which of their waiting requests is
granted next.

One run of the script (a step) gets this process's first waiting requests, and what this process has returned to the
budget and heard from the provider since the step before. It answers with the budget as it is then, of which this
process keeps a copy for forecasts. While Redis is unavailable, no request gets budget, and the step is tried again.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from contextvars import Context
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Final

from consumers.limits import account
from consumers.limits.account import Account, News, Waiter
from consumers.limits.base import Amounts, BudgetSpec, Feedback, Reservation
from consumers.limits.budgets import LATE_S, Budgets, learning, loop_s
from consumers.state.base import StoreUnavailable
from consumers.state.redis.client import BUDGET, RedisClient

FORM: Final = 4
"""The version of the format in which the script stores an account. It is part of the Redis key, so processes with
different versions of the format do not share an account. While both versions run, each group of processes assumes that
it has the whole budget, until 429s lower the limits of both groups."""
LOOK_EVERY_S: Final = 0.5
"""The pause between two steps while a request of this process waits. By a step this process learns what others have
returned, and they learn that its request still waits. (Redis's publish/subscribe would need another connection, and can
lose messages.)"""
FORGOTTEN_AFTER_S: Final = 4 * LOOK_EVERY_S
"""Others no longer count the waiting requests of a process that has run no step for this long."""
SEND_WITHIN_S: Final = 0.05
LEAST_LOOK_S: Final = 0.01
"""The shortest pause between two steps that look whether a request may be granted."""
AT_ONCE_S: Final = 1.0
"""How long `try_reserve` waits for the answer of Redis, because it takes budget only if that is possible at once."""
TOGETHER: Final = 16
"""How many waiting requests of a lane one step may grant."""


@dataclass(slots=True)
class Changes:
    """What this process has returned to the budget, and heard from the provider, since the last step."""

    back: list[dict[str, Any]] = field(default_factory=list)
    news: News = field(default_factory=News)
    kind: str = ""
    """The kind of the last response."""

    def add_failed(self, sent: "Changes") -> None:
        """Add the changes that were sent with a failed step. It is unknown whether Redis has counted them. Amounts used
        beyond a reservation are sent again. Amounts given back are not: if they were counted twice, more would be spent
        than the limits allow."""
        for change in sent.back:
            change["over"] = [min(0.0, unused) for unused in change["over"]]
        self.back = [change for change in sent.back if any(change["over"])] + self.back
        sent.news.add(self.news)
        self.news, self.kind = sent.news, self.kind or sent.kind


def shared_budgets(client: RedisClient, *, namespace: str, spec: BudgetSpec) -> Budgets:
    """The budgets of processes that share a Redis. The caller closes `client`, after `Budgets.aclose`."""

    def open_queue(name: str) -> SharedBudgetQueue:
        return SharedBudgetQueue(client, f"{namespace}:budget:{FORM}:{name}", Account(name, spec, now_s=loop_s()))

    return Budgets(spec, open_queue)


class SharedBudgetQueue:
    """Implements `BudgetQueue` for an account that several processes share."""

    def __init__(self, client: RedisClient, key: str, account: Account) -> None:
        self.account = account
        self._client = client
        self._key = key
        self._process = secrets.token_hex(6)
        self._unsent = Changes()
        self._is_due = False
        self._task: asyncio.Task[None] | None = None
        self._stepped = asyncio.Event()
        self._timer: asyncio.Handle | None = None
        self._fires_s = -inf
        """Kept here, because for delays below 0.5 ms uvloop returns a handle without the method `when`."""
        self._answered_s = -inf

    @property
    def is_asking(self) -> bool:
        return self._task is not None

    def step(self) -> None:
        """Run the script, in a task of its own. If it runs already, it runs again after that."""
        self._is_due = True
        if loop_s() - self._answered_s > FORGOTTEN_AFTER_S:
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
        unused, lane = self.account.settle(reservation, used, loop_s()), self.account.lanes.index(reservation.lane)
        if any(unused):
            self._give_back(lane, unused, reservation.from_savings)
        if any(unused) or not self.account.lines.is_empty:
            self._step_in(SEND_WITHIN_S)

    def learn(self, feedback: Feedback) -> None:
        news = self.account.read(feedback)
        self._unsent.news.add(news)
        self._unsent.kind = feedback.kind
        is_urgent = news.is_refused or news.stop_s > 0 or self.account.announces(news)
        self._step_in(0.0 if is_urgent else SEND_WITHIN_S)  # soon, because levels rise with time

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._unsent != Changes():
            self.step()
        if self._task is not None:
            await self._task
        if self._timer is not None:
            self._timer.cancel()

    # ---- stepping ----------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        in_s = LOOK_EVERY_S
        try:
            while self._is_due:
                self._is_due = False
                in_s = await self._run_step()
                self._tell_stepped()
        except StoreUnavailable:  # the waiters keep waiting; `Pausing` reports the reason
            in_s = LOOK_EVERY_S
        finally:
            self._task = None
            self._tell_stepped()
            if not self.account.lines.is_empty or self._unsent != Changes():
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
        waiters, sent = self._candidates(), self._unsent
        self._unsent = Changes()
        try:
            answer = await self._client.run(BUDGET, [self._key], json.dumps(self._argument(waiters, sent)))
        except BaseException:
            self._unsent.add_failed(sent)
            raise
        self._answered_s = loop_s()
        with learning(self.account, sent.kind):
            self._take_over(reply := json.loads(answer))
        return self._grant(waiters, reply)

    def _candidates(self) -> Sequence[Waiter]:
        """The waiting requests that one step may grant."""
        lines = self.account.lines
        if not self.account.calls.may_begin:
            return ()
        return [waiter for lane in range(len(self.account.lanes)) for waiter in lines.firsts(lane, TOGETHER)]

    def _argument(self, waiters: Sequence[Waiter], changes: Changes) -> dict[str, Any]:
        of, now_s, news = self.account, loop_s(), changes.news
        due, most = of.lanes_due(), of.calls.most - of.calls.running
        return {
            "process": self._process,
            "form": FORM,
            "expires_s": FORGOTTEN_AFTER_S,
            "lanes": of.lanes,
            "ranks": of.ranks,
            "shares": of.shares,
            "caps": [1e18 if cap is None else cap for cap in of.caps],
            "start": of.start,
            "burst_s": of.burst_s,
            "first_burst_s": account.FIRST_BURST_S,
            "least_factor": account.LEAST_FACTOR,
            "refused_within_s": account.REFUSED_WITHIN_S,
            "step": account.STEP,
            "step_every_s": account.STEP_EVERY_S,
            "news": asdict(news)
            | {"announced": [limit or 0 for limit in news.announced]}
            | {"left": [-1 if left is None else left for left in news.left]},
            "back": changes.back,
            "waiters": [
                {"lane": waiter.lane + 1, "age": now_s - waiter.arrived_s, "amounts": waiter.amounts}
                for waiter in waiters
            ],
            "sums": [of.lines.sums(lane) for lane in range(len(of.lanes))],
            "room": 1 if any(due) else min(len(waiters), most),
            "due": due,
        }

    def _take_over(self, reply: Mapping[str, Any]) -> None:
        """Copy the account as it is in Redis."""
        of, now_s = self.account, loop_s()
        known = of.learned
        known.announced = [limit or None for limit in reply["announced"]]
        known.shown, known.factor, known.growth = reply["shown"], reply["factor"], reply["growth"]
        known.is_silent, known.stopped_until_s = reply["silent"], now_s + reply["stopped_s"]
        of.resize()
        of.waiting_elsewhere = reply["elsewhere"]
        for bucket, level, savings, wants in zip(
            of.buckets, reply["levels"], reply["parts"], reply["wants"], strict=True
        ):
            bucket.set(level, savings, now_s)
            for lane, amount in enumerate(wants):
                bucket.want(lane, amount)

    def _grant(self, waiters: Sequence[Waiter], reply: Mapping[str, Any]) -> float:
        """Wake the requests that were granted. Returns the seconds after which the next one may be."""
        of, now_s = self.account, loop_s()
        for index, *from_savings in reply["granted"]:
            waiter = waiters[index - 1]
            if of.begin(waiter, from_savings=Amounts(*from_savings), now_s=now_s):
                waiter.wake()
            else:  # it has gone meanwhile
                self._give_back(waiter.lane, waiter.amounts, from_savings)
                self._is_due = True
        if reply["granted"] and not of.lines.is_empty:
            self._is_due = True  # waiters behind those that were sent may be granted as well
        if (stopped_s := of.stopped_s(now_s)) > 0 or not of.calls.may_begin:
            return stopped_s or LOOK_EVERY_S
        return max(LEAST_LOOK_S, min((of.wait_s(head) for head in of.lines.heads if head is not None), default=inf))

    def _give_back(self, lane: int, unused: Sequence[float], from_savings: Sequence[float]) -> None:
        """Note what to return. `unused`: for each bucket, the amount that was reserved and not used; a negative amount
        was used beyond the reservation. `from_savings`: the part of the reservation that came from the savings."""
        self._unsent.back.append({"lane": lane + 1, "over": list(unused), "own": list(from_savings)})
