"""The demo's load: which requests are sent, when they are sent, and their results. The same load is sent twice: to the
three lanes, and then, for comparison, to a single queue."""

import asyncio
from dataclasses import dataclass, field

from consumers.capacity.activity import quantile
from lanekeeper import Client
from lanekeeper.contract.problems import LanekeeperError
from service.demo.working import ANSWER_WITHIN_S
from topology.lanes import BATCH, CRITICAL, NORMAL

BATCH_JOBS = 500
CHATS = 40
"""The number of chats in each of the lanes critical and normal."""
SENT = {CRITICAL.name: CHATS, NORMAL.name: CHATS, BATCH.name: BATCH_JOBS}
CHAT_EVERY_S = 0.025
FLOOD_FIRST_S = 0.2
"""The seconds between the first batch job and the first chat: by then all batch jobs are in the queue."""
FAULT_EVERY = 25
"""In each lane, one of this many requests fails at its first call, because the provider is overloaded."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the demo's load. Its answer is right if it contains `mark`, because the simulated provider echoes
    the prompt."""

    lane: str
    number: int

    @property
    def mark(self) -> str:
        return f"request {self.lane} {self.number} of the demo."

    @property
    def prompt(self) -> str:
        fault = " [[fault: overloaded x1]]" if self.number % FAULT_EVERY == FAULT_EVERY // 2 else ""
        return self.mark + fault


@dataclass(slots=True)
class Score:
    """The results so far of the demo's requests in one lane."""

    expected: int
    asked: int = 0
    right: int = 0
    retried: int = 0
    waits_ms: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """The requests that were not answered right, and why."""

    def wait_ms(self, share: float) -> int:
        return quantile(sorted(self.waits_ms), share) or 0


@dataclass(slots=True)
class Board:
    """The results of the demo's load: the score of each lane, and how long the whole load took."""

    lanes: dict[str, Score] = field(default_factory=lambda: {lane: Score(count) for lane, count in SENT.items()})
    total_s: float = 0.0

    @property
    def all_right(self) -> bool:
        return all(score.right == score.expected for score in self.lanes.values())

    @property
    def wrong(self) -> list[str]:
        return [request for score in self.lanes.values() for request in score.wrong]


async def send(client: Client, scores: Board, *, lane: str | None = None) -> None:
    """Send the demo's load, batch jobs and chats, and add the results to `scores`. Returns when every request has an
    outcome. `lane`: the lane to which all requests are sent; None: each request goes to its own lane."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(BATCH_JOBS):
            group.create_task(_ask(client, Ask(BATCH.name, number), scores, lane=lane))
        await asyncio.sleep(FLOOD_FIRST_S)
        for number in range(CHATS):
            for chat in (CRITICAL, NORMAL):
                group.create_task(_ask(client, Ask(chat.name, number), scores, lane=lane))
                await asyncio.sleep(CHAT_EVERY_S)
    scores.total_s = loop.time() - began_s


async def _ask(client: Client, ask: Ask, scores: Board, *, lane: str | None) -> None:
    score = scores.lanes[ask.lane]
    score.asked += 1
    key = f"{lane or ask.lane}.demo.load"
    try:
        final = await client.request({"prompt": ask.prompt}, key=key, timeout_s=ANSWER_WITHIN_S)
    except LanekeeperError as error:
        score.waits_ms.append(0)
        score.wrong.append(f"{ask.lane} {ask.number}: {error}")
        return
    score.waits_ms.append(final.wait_ms)
    score.retried += final.attempt > 1
    if ask.mark in final.text:
        score.right += 1
    else:
        score.wrong.append(f"{ask.lane} {ask.number}: the answer is to another question")
