"""A simulated account beside our books: it refuses what our gate should not have let through."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from consumers.limits.amounts import Amounts
from consumers.limits.base import Budgets
from consumers.limits.local import LocalBudgets
from consumers.limits.spec import BudgetSpec, Caps
from service.simulated.buckets import Limits, make_limits
from service.simulated.errors import Refusal

ACCOUNT = "simulated/model"
PLENTY = 10_000_000


def spec(
    *,
    requests: float | None = 60,
    input_tokens: float = 40_000,
    output_tokens: float = PLENTY,
    concurrency: int | None = None,
    **more: object,
) -> BudgetSpec:
    caps = Caps(requests=requests, input_tokens=input_tokens, output_tokens=output_tokens, concurrency=concurrency)
    return BudgetSpec(accounts={ACCOUNT: caps}, **more)  # type: ignore[arg-type]


@dataclass
class Traffic:
    """Calls through `budgets` to an account that enforces its own limits, with the same burst as ours."""

    budgets: Budgets
    requests: int = 60
    input_tokens: int = 40_000
    burst_s: float = 10.0
    call_s: tuple[float, float] = (0.5, 2.0)
    waits_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    used: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    refused: int = 0

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.began_s = self.loop.time()
        self._rng = random.Random(4)
        self._tasks: set[asyncio.Task[None]] = set()
        self.judge: Limits = make_limits(
            requests=self.requests,
            input_tokens=self.input_tokens,
            output_tokens=PLENTY,
            burst_s=self.burst_s,
            clock=self.loop.time,
        )

    async def call(self, lane: str, tokens: int) -> None:
        began_s = self.loop.time()
        reservation = await self.budgets.reserve(ACCOUNT, lane=lane, amounts=Amounts(1, tokens, 100), until=None)
        self.waits_s[lane].append(self.loop.time() - began_s)
        try:
            self.judge.enter(tokens)
        except Refusal:
            self.refused += 1
        self.used[lane][0] += 1
        self.used[lane][1] += tokens
        await asyncio.sleep(self._rng.uniform(*self.call_s))
        self.judge.settle(input_tokens=0, output_tokens=50)
        self.budgets.settle(reservation, Amounts(1, tokens, 50))

    def slots(self, lane: str, count: int, tokens: Callable[[random.Random], int]) -> None:
        """So many requests of a lane at any time."""
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

    def shares(self, *lanes: str) -> tuple[float, float]:
        """How much of all requests and input tokens that there were (the first burst, and what came in) were used."""
        passed_min = (self.took_s + self.burst_s) / 60
        requests, tokens = (sum(self.used[lane][each] for lane in lanes or self.used) for each in (0, 1))
        return requests / (self.requests * passed_min), tokens / (self.input_tokens * passed_min)

    async def _always(self, lane: str, tokens: Callable[[random.Random], int]) -> None:
        while True:
            await self.call(lane, tokens(self._rng))

    async def _now_and_then(self, seconds: float, lane: str, tokens: int) -> None:
        while True:
            self._start(self.call(lane, tokens))
            await asyncio.sleep(seconds)

    def _start(self, story: object) -> None:
        task = asyncio.ensure_future(story)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def traffic(**given: object) -> Traffic:
    """On books that know the account's limits."""
    return Traffic(LocalBudgets(spec()), **given)  # type: ignore[arg-type]
