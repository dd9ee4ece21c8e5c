"""One tenant's flood of control messages is turned away before the store is asked; another's are carried out."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog

from consumers.control import queue as control_module
from consumers.control.answer import Answers
from consumers.control.queue import AT_ONCE_S, Control
from consumers.replies.address import ReplyRule
from consumers.share import NAMES_KEPT, TOLD_EVERY_S, Seldom, Share
from consumers.state.base import Identity
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import AccessRefused, BrokerError
from lanekeeper.telemetry import signals
from tests.support.jobs import NAMES, NOW_MS, Bench, FakeDelivery

ASKER = "amq.gen-abcdefghijklmnopqrstuv"
PER_S = 1 / AT_ONCE_S
"""One at once, and the next seconds later: however long the test takes."""


class FakeSession:
    """Delivers what it was given, then waits until it is stopped."""

    def __init__(self, log: list[str], deliveries: list[FakeDelivery]) -> None:
        self._log = log
        self._left = deliveries
        self.stopped = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._left)

    def __aiter__(self) -> "FakeSession":
        return self

    async def __anext__(self) -> FakeDelivery:
        if not self._left:
            await self.stopped.wait()
            raise StopAsyncIteration
        return self._left.pop(0)

    async def ack(self, deliveries: list[FakeDelivery]) -> None:
        self._log.append(f"ack {len(deliveries)} turned away")


class FakeDeliveries:
    queue = "lane.control"
    trouble = None

    def __init__(self, session: FakeSession) -> None:
        self._session = session

    async def sessions(self) -> AsyncIterator[FakeSession]:
        yield self._session

    async def stop(self) -> None:
        self._session.stopped.set()


def control(bench: Bench, deliveries: list[FakeDelivery], ready: Any) -> Control:
    return Control(
        FakeDeliveries(FakeSession(bench.log, deliveries)),  # type: ignore[arg-type]
        claiming=bench.claiming,
        settler=bench.settler,
        answers=Answers(bench.publisher, direct=bench.direct, rule=ReplyRule(names=NAMES)),  # type: ignore[arg-type]
        now_ms=lambda: NOW_MS,
        ready=ready,
        kept_s=60,
        per_tenant_s=PER_S,
    )


def cancellations(bench: Bench, *users: str | None) -> list[FakeDelivery]:
    return [
        FakeDelivery(
            Message(
                body=json.dumps({"cancel": f"m-{n}"}).encode(),
                type="cancel",
                routing_key="cancel",
                reply_to=ASKER,
                user_id=user,
            ),
            bench.log,
            tag=n + 1,
        )
        for n, user in enumerate(users)
    ]


async def none_waits() -> int:
    return 0


async def caught_up(reader: Control, *, within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while reader.behind is not None:  # noqa: ASYNC110  as Pausing looks at it
            await asyncio.sleep(0.01)


async def test_beyond_its_share_a_tenant_is_refused_and_another_is_not() -> None:
    bench, burst = Bench(), 1
    reader = control(bench, cancellations(bench, *["flood"] * (burst + 3), "shop"), none_waits)
    running = asyncio.create_task(reader.run())
    await caught_up(reader)
    await reader.stop()
    await running

    told = [each.message for each in bench.publisher.sent]
    refused = [each for each in told if each.headers[n.CONTROL] == "error"]
    assert (len(refused), len(told)) == (3, burst + 4)
    document = json.loads(refused[0].body)
    assert (document["code"], document["status"], document["retryable"]) == ("too_many_control_messages", 429, True)
    assert await bench.store.find(Identity("shop", f"m-{burst + 3}")) is not None
    assert await bench.store.find(Identity("flood", f"m-{burst + 1}")) is None
    assert bench.log.count("ack") == burst + 1
    assert "ack 3 turned away" in bench.log or bench.log.count("ack 1 turned away") >= 1


@pytest.mark.parametrize("error", [None, AccessRefused("no right to look"), BrokerError("lost")])
async def test_a_start_waits_for_what_never_ends_for_so_long_and_says_so(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    async def ready() -> int:
        if error is not None:
            raise error
        return 7

    monkeypatch.setattr(control_module, "CATCH_UP_WITHIN_S", 1)
    monkeypatch.setattr(control_module, "QUIET_S", 60)
    reader = control(Bench(), [], ready)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(reader.run())
        await asyncio.sleep(0)
        assert reader.behind is not None
        await caught_up(reader)
    await reader.stop()
    await running
    (told,) = (each for each in logs if each["event"] == signals.CONTROL_BEHIND)
    assert told["waiting"] == (1 if error else 7)


async def test_where_the_queue_may_not_be_looked_at_it_is_empty_when_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ready() -> int:
        raise AccessRefused("no right to look")

    bench = Bench()
    monkeypatch.setattr(control_module, "QUIET_S", 1)
    reader = control(bench, cancellations(bench, "shop"), ready)
    running = asyncio.create_task(reader.run())
    await asyncio.sleep(0)
    assert reader.behind is not None, "refused access is no empty queue"
    await caught_up(reader)
    assert await bench.store.find(Identity("shop", "m-0")) is not None
    await reader.stop()
    await running


def test_a_share_is_used_up_and_comes_back() -> None:
    now_s = 0.0
    share = Share(per_s=2, at_once=3, clock=lambda: now_s)
    assert [share.take("a") for _ in range(4)] == [True, True, True, False]
    assert share.take("b", 3)
    now_s = 0.5
    assert [share.take("a"), share.take("a")] == [True, False]
    now_s = 60
    assert [share.take("a", 3), share.take("a")] == [True, False]


def test_of_many_tenants_the_one_that_asked_longest_ago_is_forgotten() -> None:
    share = Share(per_s=0.001, at_once=1, clock=lambda: 0.0)
    assert all(share.take(str(n)) for n in range(NAMES_KEPT + 1))
    assert [share.take(str(NAMES_KEPT)), share.take("0")] == [False, True]


def test_what_comes_by_the_thousand_is_told_once_a_minute() -> None:
    now_s = 0.0
    seldom = Seldom(clock=lambda: now_s)
    assert [seldom.count("a") for _ in range(3)] == [1, 0, 0]
    assert seldom.count("b") == 1
    now_s = TOLD_EVERY_S
    assert [seldom.count("a"), seldom.count("a")] == [3, 0]
