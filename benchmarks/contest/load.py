"""The load of the contest: who asks what, and when; the same for every contestant, and how each request fared.

All times in a `Load` and on a `Board` are the contest's own: with `speed` 10 a second of it takes 0.1 s of the clock,
and every rate and interval is scaled alike.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

MODEL = "claude-haiku-5-5"
MAX_TOKENS = 400
OUTPUT_TOKENS = 200
FIRST_CRITICAL_S = 2.0
"""The batch jobs are all waiting by then."""
_WORDS = "the quick brown fox jumps over the lazy dog and thinks of lanes again "
_CHARACTERS_PER_TOKEN = 4  # as the simulated API counts


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked, and what the provider allows."""

    window_s: float = 60.0
    speed: float = 1.0
    requests_per_minute: int = 60
    input_tokens_per_minute: int = 40_000
    burst_s: float = 10.0
    """What the provider's buckets hold."""
    latency_s: float = 1.0
    """How long the provider takes for an answer."""
    jobs: int = 500
    tokens: tuple[int, int] = (400, 900)
    """Of a request's input, from and to: as many requests as tokens, so that either may be what is short."""
    critical_every_s: float | None = 2.0
    finish_s: float = 0.0
    """After the window, for what has not been answered; 0: it is cut off."""
    seed: int = 1

    @property
    def real_s(self) -> float:
        """By the clock."""
        return self.window_s / self.speed


@dataclass(slots=True)
class Ask:
    """One request and what became of it."""

    lane: str
    body: bytes
    asked_s: float
    answered_s: float | None = None
    attempts: int = 1
    """As the contestant tells; calls that did not reach the provider are in no other books."""
    failed: str | None = None

    def wait_s(self, end_s: float, latency_s: float) -> float:
        """Without the provider's own time; of one that has no answer, how long it has waited so far."""
        return max(0.0, (end_s if self.answered_s is None else self.answered_s) - self.asked_s - latency_s)


Asking = Callable[[Ask], Awaitable[None]]
"""A contestant: returns when the request is answered, raises where it gave up."""


@dataclass(slots=True)
class Board:
    """Every request of one contestant."""

    load: Load
    asks: list[Ask] = field(default_factory=list)

    def waits_s(self, lane: str) -> list[float]:
        """Sorted."""
        return sorted(ask.wait_s(self.load.window_s, self.load.latency_s) for ask in self.asks if ask.lane == lane)

    def answered(self, lane: str | None = None) -> int:
        return sum(ask.answered_s is not None for ask in self.asks if lane in (None, ask.lane))

    def failed(self) -> int:
        """Given up before the end."""
        return sum(ask.failed is not None for ask in self.asks)


async def send(asking: Asking, load: Load) -> Board:
    """All batch jobs at once, critical requests one by one, until the window is over."""
    board, rng, loop = Board(load), random.Random(load.seed), asyncio.get_running_loop()
    began = loop.time()

    def now_s() -> float:
        return (loop.time() - began) * load.speed

    async def one(ask: Ask) -> None:
        board.asks.append(ask)
        try:
            await asking(ask)
        except Exception as error:  # a contestant's failure is a figure of the table
            ask.failed = f"{type(error).__name__}: {error}"
        else:
            ask.answered_s = now_s()

    tasks = [
        asyncio.create_task(one(Ask("batch", _body(rng.randint(*load.tokens), number), 0.0)))
        for number in range(load.jobs)
    ]
    at_s, number = FIRST_CRITICAL_S, load.jobs
    while load.critical_every_s is not None and at_s < load.window_s:
        await asyncio.sleep(began + at_s / load.speed - loop.time())
        tasks.append(asyncio.create_task(one(Ask("critical", _body(rng.randint(*load.tokens), number), now_s()))))
        at_s, number = at_s + load.critical_every_s, number + 1
    await asyncio.sleep(began + load.real_s - loop.time())
    if load.finish_s:
        await asyncio.wait(tasks, timeout=load.finish_s / load.speed)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return board


def _body(tokens: int, number: int) -> bytes:
    characters = tokens * _CHARACTERS_PER_TOKEN - 110  # what stands around it
    text = f"Request {number}: " + _WORDS * (characters // len(_WORDS) + 1)
    messages = [{"role": "user", "content": text[: max(20, characters)]}]
    return json.dumps({"model": MODEL, "max_tokens": MAX_TOKENS, "messages": messages}).encode()
