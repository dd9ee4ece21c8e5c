"""The load of the contest, the same for every contestant: which requests are sent when, and the result of each.

Times in a `Load` and on a `Board` are scaled: with `speed` 10, one second of them takes 0.1 s of real time. All rates
and intervals are scaled in the same way.
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
"""When the first critical request is sent: all batch jobs are waiting by then."""
_WORDS = "the quick brown fox jumps over the lazy dog and thinks of lanes again "
_CHARACTERS_PER_TOKEN = 4  # as the simulated API counts


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of a run, and the provider's limits."""

    window_s: float = 60.0
    speed: float = 1.0
    requests_per_minute: int = 60
    input_tokens_per_minute: int = 40_000
    burst_s: float = 10.0
    """How many seconds' worth of each limit the provider's buckets hold."""
    latency_s: float = 1.0
    """How long the provider takes for an answer."""
    jobs: int = 500
    tokens: tuple[int, int] = (400, 900)
    """The smallest and the largest input of a request. At these sizes, requests and tokens run out at about the same
    time."""
    critical_every_s: float | None = 2.0
    finish_s: float = 0.0
    """How long to wait for the remaining answers after the window; 0: do not wait."""
    seed: int = 1

    @property
    def real_s(self) -> float:
        """The length of the window in real time."""
        return self.window_s / self.speed


@dataclass(slots=True)
class Ask:
    """One request and its result."""

    lane: str
    body: bytes
    asked_s: float
    answered_s: float | None = None
    attempts: int = 1
    """Calls made, as the contestant reports: the provider does not count calls that did not reach it."""
    failed: str | None = None

    def wait_s(self, end_s: float, latency_s: float) -> float:
        """The time from sending to the answer, or to `end_s` without an answer, minus the provider's own time."""
        return max(0.0, (end_s if self.answered_s is None else self.answered_s) - self.asked_s - latency_s)


Asking = Callable[[Ask], Awaitable[None]]
"""Sends a request through a contestant. Returns when it is answered; raises if the contestant gave up."""


@dataclass(slots=True)
class Board:
    """All requests that were sent through one contestant."""

    load: Load
    asks: list[Ask] = field(default_factory=list)

    def waits_s(self, lane: str) -> list[float]:
        """The sorted waits of a lane's requests."""
        return sorted(ask.wait_s(self.load.window_s, self.load.latency_s) for ask in self.asks if ask.lane == lane)

    def answered(self, lane: str | None = None) -> int:
        """How many requests were answered, of one lane or of all."""
        return sum(ask.answered_s is not None for ask in self.asks if lane in (None, ask.lane))

    def failed(self) -> int:
        """How many requests the contestant gave up."""
        return sum(ask.failed is not None for ask in self.asks)


async def send(asking: Asking, load: Load) -> Board:
    """Send all batch jobs at once, and critical requests one by one until the window is over."""
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
    characters = tokens * _CHARACTERS_PER_TOKEN - 110  # the JSON around the text
    text = f"Request {number}: " + _WORDS * (characters // len(_WORDS) + 1)
    messages = [{"role": "user", "content": text[: max(20, characters)]}]
    return json.dumps({"model": MODEL, "max_tokens": MAX_TOKENS, "messages": messages}).encode()
