"""A simulated provider account with its own limits: it refuses calls that our budget gate should have held back."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from consumers.dialects.anthropic import read_rate
from consumers.limits.account import Account
from consumers.limits.base import NOTHING, AccountCaps, Amounts, BudgetSpec, Feedback, Kind
from consumers.limits.budgets import Budgets
from service.simulated.buckets import Limits
from service.simulated.faults import Refusal

ACCOUNT = "simulated/model"
PLENTY = 10_000_000

Tokens = Callable[[random.Random], int]
"""Chooses the input tokens of a request."""


def spec(
    *,
    requests: float | None = 60,
    input_tokens: float = 40_000,
    output_tokens: float = PLENTY,
    concurrency: int | None = None,
    **more: Any,
) -> BudgetSpec:
    caps = AccountCaps(
        requests=requests, input_tokens=input_tokens, output_tokens=output_tokens, concurrency=concurrency
    )
    return BudgetSpec(accounts={ACCOUNT: caps}, **more)


def with_buckets_of(seconds: float, account: Account) -> Account:
    """As if a response had shown that the provider's buckets hold that many seconds' worth of their limits."""
    account.learned.shown = [limit * seconds / 60 for limit in account.per_minute()]
    account.resize(fills=True)
    return account


@dataclass
class Traffic:
    """Calls through `budgets` to an account that enforces the same limits and burst by itself."""

    budgets: Budgets
    requests: int = 60
    input_tokens: int = 40_000
    burst_s: float = 10.0
    call_s: tuple[float, float] = (0.5, 2.0)
    travel_s: tuple[float, float] = (0.0, 0.0)
    """Range of a call's travel time to the provider."""
    waits_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    used: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    refused: int = 0
    refused_at_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.began_s = self.loop.time()
        self._rng = random.Random(4)
        self._tasks: set[asyncio.Task[None]] = set()
        self.judge: Limits = Limits(
            requests=self.requests,
            input_tokens=self.input_tokens,
            output_tokens=PLENTY,
            burst_s=self.burst_s,
            clock=self.loop.time,
        )

    async def call(self, lane: str, tokens: int) -> None:
        """A call that is refused is made again."""
        asked_s = self.loop.time()
        while True:
            reservation = await self.budgets.reserve(ACCOUNT, lane=lane, amounts=Amounts(1, tokens, 100), until=None)
            began_s = self.loop.time()
            await asyncio.sleep(self._rng.uniform(*self.travel_s))
            estimated = tokens * 4 // 3  # like Anthropic: a higher estimate at first, corrected at the end
            try:
                self.judge.enter(estimated)
            except Refusal as refusal:
                self._learn(Kind.RATE_LIMITED, began_s, refusal.headers)
                self.budgets.settle(reservation, Amounts(1, 0, 0))
                self.refused += 1
                self.refused_at_s.append(self.loop.time())
                continue
            told = self.judge.headers()
            self.waits_s[lane].append(self.loop.time() - asked_s)
            self.used[lane][0] += 1
            self.used[lane][1] += tokens
            await asyncio.sleep(self._rng.uniform(*self.call_s))
            self.judge.settle(input_tokens=tokens - estimated, output_tokens=50)
            self._learn(Kind.ANSWERED, began_s, told, counted=Amounts(1, tokens, 0))
            self.budgets.settle(reservation, Amounts(1, tokens, 50))
            return

    def _learn(self, kind: Kind, began_s: float, told: Mapping[str, str], *, counted: Amounts = NOTHING) -> None:
        rate = read_rate(told, now_s=time.time())
        retry_after_s = float(told["retry-after"]) if "retry-after" in told else None
        took_s = self.loop.time() - began_s
        heard = Feedback(kind=kind, rate=rate, retry_after_s=retry_after_s, counted=counted, took_s=took_s)
        self.budgets.learn(ACCOUNT, heard)

    def slots(self, lane: str, count: int, tokens: Tokens) -> None:
        """Keep `count` requests of a lane running at all times."""
        for _ in range(count):
            self._start(self._always(lane, tokens))

    def every(self, seconds: float, lane: str, tokens: int) -> None:
        self._start(self._now_and_then(seconds, lane, tokens))

    async def run(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.took_s = self.loop.time() - self.began_s

    def p99_s(self, lane: str) -> float:
        ordered = sorted(self.waits_s[lane])
        return ordered[int(0.99 * (len(ordered) - 1))]

    def shares(self) -> tuple[float, float]:
        """The shares of the available requests and input tokens (first burst plus refill) that were used."""
        passed_min = (self.took_s + self.burst_s) / 60
        requests, tokens = (sum(used[each] for used in self.used.values()) for each in (0, 1))
        return requests / (self.requests * passed_min), tokens / (self.input_tokens * passed_min)

    async def _always(self, lane: str, tokens: Tokens) -> None:
        while True:
            await self.call(lane, tokens(self._rng))

    async def _now_and_then(self, seconds: float, lane: str, tokens: int) -> None:
        while True:
            self._start(self.call(lane, tokens))
            await asyncio.sleep(seconds)

    def _start(self, story: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(story)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
