"""A long story of one account, chosen at random once, with all that came of it: limits-are-guessed.txt.

A change of the arithmetic changes it, be it a millisecond or a token. Whether that is right other tests say, by what is
promised. If it is meant, write the story anew and read what has changed:

    .venv/bin/python -m tests.consumers.limits.test_story
"""

import asyncio
import random
from pathlib import Path

from consumers.limits.accounts import own_accounts
from consumers.limits.base import (
    DEFAULT_SHARES,
    Amounts,
    BucketHeaders,
    BudgetSpec,
    Feedback,
    Kind,
    RateHeaders,
    Reservation,
    Wait,
    WaitTooLong,
)
from tests.support.budget import ACCOUNT
from tests.support.virtual_time import virtually

STEPS = 160
LANES = tuple(DEFAULT_SHARES)
PATH = Path(__file__).with_name("limits-are-guessed.txt")


class Story:
    """What happens, as lines of text."""

    def __init__(self) -> None:
        self._chosen = random.Random("limits-are-guessed")
        self._loop = asyncio.get_running_loop()
        self._budgets = own_accounts(BudgetSpec())
        self._troubles = (Kind.OVERLOADED, Kind.OVERLOADED, Kind.FAILED, Kind.OVERLOADED)
        self._running: list[Reservation] = []
        self._asked: dict[int, asyncio.Task[None]] = {}
        self.lines: list[str] = []

    async def run(self) -> None:
        for number in range(STEPS):
            await asyncio.sleep(self._chosen.choice((0, 0, 0, 0.01, 0.2, 0.9)))
            (step,) = self._chosen.choices(
                (self._ask, self._end, self._answer, self._refusal, self._trouble, self._look, self._leave),
                (60, 25, 8, 4, 3, 5, 3),
            )
            await step(number)
        await asyncio.sleep(1000)  # as long as any stop lasts
        await self._look(STEPS)
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)

    def _note(self, text: str) -> None:
        self.lines.append(f"{self._loop.time() - 1000:9.4f} {text}")

    def _amounts(self) -> Amounts:
        return Amounts(1, self._chosen.choice((50, 400, 2_000, 7_000)), self._chosen.choice((20, 300, 900)))

    async def _ask(self, number: int) -> None:
        lane, amounts = self._chosen.choice(LANES), self._amounts()
        now_s = self._loop.time()
        until = self._chosen.choice((None, None, now_s + 5, now_s + 60))
        arrived = self._chosen.choice((None, None, None, now_s - 2.5))

        def note_wait(wait: Wait) -> None:
            self._note(f"{number} {lane} waits: {_wait(wait)}")

        async def wait() -> None:
            try:
                found = await self._budgets.reserve(
                    ACCOUNT, lane=lane, amounts=amounts, until=until, arrived=arrived, on_wait=note_wait
                )
            except WaitTooLong as error:
                self._note(f"{number} too late: {_wait(error.wait)}")
                return
            self._running.append(found)
            self._note(f"{number} {lane} granted {_amounts(found.amounts)} of its own {_amounts(found.from_savings)}")

        self._asked[number] = asyncio.ensure_future(wait())
        await asyncio.sleep(0)

    async def _end(self, number: int) -> None:
        if self._running:
            ended = self._running.pop(self._chosen.randrange(len(self._running)))
            part = self._chosen.choice((None, 0.0, 0.3, 1.0, 1.4))
            requests, *tokens = ended.amounts
            used = None if part is None else Amounts(requests, *(part * each for each in tokens))
            self._note(f"ended {ended.lane} at {ended.at_s - 1000:.4f}, used {used and _amounts(used)}")
            self._budgets.settle(ended, used)

    async def _answer(self, number: int) -> None:
        rate = self._chosen.choice((None, self._rate(1.0)))
        self._hear(
            Feedback(kind=Kind.ANSWERED, rate=rate, counted=self._amounts(), took_s=self._chosen.choice((0.2, 2)))
        )

    async def _refusal(self, number: int) -> None:
        rate = self._chosen.choice((None, self._rate(0.1)))
        after_s = self._chosen.choice((None, 1.5))
        self._hear(Feedback(kind=Kind.RATE_LIMITED, rate=rate, retry_after_s=after_s, took_s=0.1))

    async def _trouble(self, number: int) -> None:
        self._hear(Feedback(kind=self._chosen.choice(self._troubles)))

    def _hear(self, heard: Feedback) -> None:
        self._budgets.learn(ACCOUNT, heard)
        self._note(f"{heard.kind}, limits {_amounts(self._budgets.turns(ACCOUNT).account.per_minute())}")

    def _rate(self, most: float) -> RateHeaders:
        limits = [self._chosen.choice((None, limit)) for limit in (100.0, 80_000.0, 16_000.0)]
        left = [limit and self._chosen.choice((None, round(limit * self._chosen.random() * most))) for limit in limits]
        return RateHeaders(
            *(BucketHeaders(limit=limit, remaining=each) for limit, each in zip(limits, left, strict=True))
        )

    async def _look(self, number: int) -> None:
        for lane in LANES:
            found = await self._budgets.predicted_wait(ACCOUNT, lane=lane, amounts=self._amounts())
            self._note(f"a {lane} request would wait {_wait(found)}")
        for lane, waiting in self._budgets.waiting().get(ACCOUNT, {}).items():
            self._note(f"{lane}: {waiting.count} for {waiting.reason}, {waiting.oldest_s:.4f} s, {waiting.is_known}")
        for bucket in self._budgets.turns(ACCOUNT).account.buckets:
            parts = " ".join(f"{each:.3f}" for each in bucket.savings)
            self._note(f"bucket of {bucket.burst:.3f}: {bucket.level:.3f}, saved {parts}")
        self._note(f"timers {self._budgets.turns(ACCOUNT).wake_ups}")

    async def _leave(self, number: int) -> None:
        waiting = [each for each, task in self._asked.items() if not task.done()]
        if waiting:
            gone = self._chosen.choice(waiting)
            self._note(f"{gone} leaves")
            self._asked[gone].cancel()
            await asyncio.sleep(0)


def _amounts(amounts: Amounts) -> str:
    return " ".join(f"{each:.3f}" for each in amounts)


def _wait(wait: Wait) -> str:
    return f"{wait.seconds:.4f} s for {wait.reason}, at least {wait.least_s:.4f} s, {wait.is_known}"


def told() -> list[str]:
    async def run() -> list[str]:
        story = Story()
        await story.run()
        return story.lines

    return virtually(run())


def test_a_story_comes_out_as_it_did() -> None:
    assert told() == PATH.read_text().splitlines()


if __name__ == "__main__":
    PATH.write_text("\n".join(told()) + "\n")
