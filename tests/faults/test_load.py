"""The load of the fault suite leaves out no request whose outcome has to be checked."""

import asyncio
import random
from typing import ClassVar, Self

import pytest

from lanekeeper.errors import NotEnded
from lanekeeper.replies import Final
from tests.faults import clients
from tests.faults.clients import Load
from tests.faults.history import Asked, History
from tests.faults.mix import Mix, Wish


class FakeClient:
    """Notes the requests whose results are fetched."""

    fetched: ClassVar[set[str]] = set()

    def __init__(self, url: str) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def result(self, id: str, *, wait_s: float) -> Final:
        self.fetched.add(id)
        raise NotEnded(id, "running")


async def test_results_are_fetched_also_of_requests_that_are_still_to_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def publish(load: Load, wish: Wish, question: str) -> None:
        pass

    monkeypatch.setattr(clients, "Client", FakeClient)
    monkeypatch.setattr(Load, "_publish", publish)
    history = History()
    mix = Mix(lanes={"normal": 1.0}, streamed=0.0, delayed=0.0, refused=0.0, unheard=1.0, twice=1.0)
    load = Load(("amqp://nowhere",), history, rng=random.Random(1), rate=500, mix=mix, publishers=0)
    async with load.asking():
        await asyncio.sleep(0.05)
    await asyncio.sleep(0)  # what was just begun is asked
    await load.fetched(within_s=1)

    asked = {event.identity for event in history.events if isinstance(event, Asked)}
    assert asked
    assert asked == FakeClient.fetched
