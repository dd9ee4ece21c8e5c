"""A fake control queue without a broker: it delivers given messages."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

from typing_extensions import override

from consumers.brake import Brake
from consumers.control import BrakeCommands, Control, ControlAnswers
from consumers.replies import ReplyRule
from tests.support.jobs import NAMES, NOW_MS, Bench, FakeDelivery
from topology.broker.consume import Deliveries, Delivery, Session


class FakeSession(Session):
    """Delivers the given messages, then waits until it is stopped. `ends`: it ends after the last one instead."""

    def __init__(self, log: list[str], deliveries: Sequence[FakeDelivery], *, ends: bool = False) -> None:
        self._log = log
        self._left = list(deliveries)
        self.stopped = asyncio.Event()
        self.acknowledged: list[int] = []
        """Delivery tags in the order of their acknowledgement."""
        self.writes = 0
        if ends:
            self.stopped.set()

    @property
    @override
    def waiting(self) -> int:
        return len(self._left)

    @override
    def __aiter__(self) -> "FakeSession":
        return self

    @override
    async def __anext__(self) -> FakeDelivery:
        if not self._left:
            await self.stopped.wait()
            raise StopAsyncIteration
        return self._left.pop(0)

    @override
    async def ack(self, deliveries: Sequence[Delivery], *, in_hand: Collection[int] = ()) -> None:
        assert not {each.tag for each in deliveries} & set(in_hand)
        self.writes += 1
        self.acknowledged += [each.tag for each in deliveries]
        self._log += ["ack"] * len(deliveries)


class FakeDeliveries(Deliveries):
    """Deliveries that have a single session."""

    queue = "lane.control"
    trouble = None

    def __init__(self, session: FakeSession) -> None:
        self._only = session

    @override
    async def sessions(self) -> AsyncGenerator[Session, None]:
        yield self._only

    @override
    async def stop(self) -> None:
        self._only.stopped.set()


async def none_waits(queues: list[str]) -> dict[str, int]:
    return {"lane.control": 0}


def answers_of(bench: Bench, *, bound: bool = False) -> ControlAnswers:
    return ControlAnswers(bench.reply_sender, rule=ReplyRule(names=NAMES, bound=bound), notices=bench.notices)


def control(bench: Bench, session: FakeSession, **given: Any) -> Control:
    """The reader of a control queue whose deliveries are those of `session`."""
    brake = BrakeCommands(
        Brake(),
        bench.store,
        operators=("ops",),
        lanes=("critical", "normal", "batch"),
        providers=("anthropic",),
        now_ms=lambda: NOW_MS,
    )
    given = {"ready": none_waits, "kept_s": 86_400, "per_tenant_s": 100, **given}
    given = {"answers": answers_of(bench), "brake": brake, **given}
    return Control(
        FakeDeliveries(session),
        claiming=bench.claiming,
        settler=bench.settler,
        now_ms=lambda: NOW_MS,
        speakers=("gateway",),
        **given,
    )
