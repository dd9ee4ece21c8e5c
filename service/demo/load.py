"""The demo's load: what is sent, when, and the result of each request; for the lanes and for the single queue."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from consumers.capacity.activity import quantile
from topology.lanes import BATCH, CRITICAL, NORMAL

BATCH_JOBS = 500
CHATS = 40
"""The number of chats in each of the two lanes above batch."""
CHAT_EVERY_S = 0.025
FLOOD_FIRST_S = 0.2
"""When the chats begin after the flood: by then it is in the queue."""
FAULT_EVERY = 25
"""One in so many requests finds the provider overloaded, once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the load. Its answer is right if it holds `mark`: the simulated provider echoes the question."""

    lane: str
    number: int

    @property
    def mark(self) -> str:
        return f"request {self.lane} {self.number} of the demo."

    @property
    def prompt(self) -> str:
        fault = " [[fault: overloaded x1]]" if self.number % FAULT_EVERY == FAULT_EVERY // 2 else ""
        return self.mark + fault


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a request: the answer's text and figures, or why there was none."""

    text: str = ""
    wait_ms: int = 0
    attempts: int = 1
    error: str | None = None


Asking = Callable[[Ask], Awaitable[Result]]


@dataclass(slots=True)
class Score:
    """The results of one lane's requests so far."""

    lane: str
    expected: int
    asked: int = 0
    right: int = 0
    retried: int = 0
    waits_ms: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """The requests that were not answered right, and why."""

    def add(self, ask: Ask, result: Result) -> None:
        self.waits_ms.append(result.wait_ms)
        self.retried += result.attempts > 1
        if result.error is None and ask.mark in result.text:
            self.right += 1
        else:
            self.wrong.append(f"{ask.lane} {ask.number}: {result.error or 'the answer is to another question'}")

    def wait_ms(self, share: float) -> int:
        return quantile(sorted(self.waits_ms), share) or 0


@dataclass(slots=True)
class Board:
    """The scores of all lanes, and how long the whole load took."""

    lanes: dict[str, Score]
    total_s: float = 0.0

    @property
    def all_right(self) -> bool:
        return all(score.right == score.expected for score in self.lanes.values())

    @property
    def wrong(self) -> list[str]:
        return [each for score in self.lanes.values() for each in score.wrong]


def board() -> Board:
    """An empty board, the most urgent lane first."""
    expected = {CRITICAL.name: CHATS, NORMAL.name: CHATS, BATCH.name: BATCH_JOBS}
    return Board({lane: Score(lane, count) for lane, count in expected.items()})


async def send(asking: Asking, scores: Board) -> None:
    """Send the flood and the chats. Returns when every request has an outcome."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def ask_one(ask: Ask) -> None:
        scores.lanes[ask.lane].asked += 1
        scores.lanes[ask.lane].add(ask, await asking(ask))

    async with asyncio.TaskGroup() as group:
        for number in range(BATCH_JOBS):
            group.create_task(ask_one(Ask(BATCH.name, number)))
        await asyncio.sleep(FLOOD_FIRST_S)
        for ask in _chats():
            group.create_task(ask_one(ask))
            await asyncio.sleep(CHAT_EVERY_S)
    scores.total_s = loop.time() - began_s


def _chats() -> Iterator[Ask]:
    for number in range(CHATS):
        yield Ask(CRITICAL.name, number)
        yield Ask(NORMAL.name, number)
