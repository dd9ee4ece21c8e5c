"""A tenant's flood of control messages is refused before the store is asked; those of other tenants are carried out."""

import asyncio
import json
from collections import Counter

import pytest
import structlog
from typing_extensions import override

from consumers.control import command
from consumers.control import queue as control_module
from consumers.control.allowance import AT_ONCE_S
from consumers.control.answer import Answers
from consumers.control.queue import Control
from consumers.rate_limit import LOGGED_EVERY_S, NAMES_KEPT, LogThrottle, RateLimit
from consumers.state.base import Identity
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import AccessRefused, BrokerError
from lanekeeper.telemetry import signals
from tests.support.control_queue import FakeSession, answers_of, control
from tests.support.jobs import Bench, FakeDelivery
from tests.support.virtual_time import virtually

ASKER = "amq.gen-abcdefghijklmnopqrstuv"
BURST = 2
PER_S = BURST / AT_ONCE_S
"""So low that no message is regained while a test runs, however long it takes."""
FLOOD = 200


def cancellations(bench: Bench, *users: str | None, first: int = 1, **said: str) -> list[FakeDelivery]:
    """Cancellations of the ids `m-<tag>`; tags are counted from `first`."""
    return [
        FakeDelivery(
            Message(
                body=json.dumps({"cancel": f"m-{tag}", **said}).encode(),
                type="cancel",
                routing_key="cancel",
                reply_to=ASKER,
                user_id=user,
            ),
            bench.log,
            tag=tag,
        )
        for tag, user in enumerate(users, start=first)
    ]


async def caught_up(reader: Control, *, within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while reader.behind is not None:  # noqa: ASYNC110  as Pausing looks at it
            await asyncio.sleep(0.01)


async def read(bench: Bench, deliveries: list[FakeDelivery]) -> tuple[Answers, FakeSession]:
    """Read all messages to the end."""
    session = FakeSession(bench.log, deliveries, ends=True)
    answers = answers_of(bench)
    await control(bench, session, answers=answers, per_tenant_s=PER_S).run()
    return answers, session


async def test_beyond_its_share_a_tenant_is_refused_and_other_tenants_are_not() -> None:
    bench = Bench()
    await read(bench, cancellations(bench, *["flood"] * (BURST + 2), "shop"))

    told = [each.message for each in bench.publisher.sent]
    refused = [each for each in told if each.headers[n.CONTROL] == "error"]
    assert (len(refused), len(told)) == (2, BURST + 3)
    document = json.loads(refused[0].body)
    assert (document["code"], document["status"], document["retryable"]) == ("too_many_control_messages", 429, True)
    assert await bench.store.find(Identity("shop", f"m-{BURST + 3}")) is not None
    assert await bench.store.find(Identity("flood", f"m-{BURST + 2}")) is None


async def test_in_a_flood_as_many_messages_are_refused_as_carried_out_and_the_rest_is_only_counted() -> None:
    bench = Bench()
    answers, session = await read(bench, cancellations(bench, *["flood"] * FLOOD, "shop"))

    codes = Counter(each.message.headers[n.CONTROL] for each in bench.publisher.sent)
    assert codes["accepted"] == BURST + 1, "the other tenant's is answered behind the flood"
    assert codes["error"] == BURST
    assert (answers.refused, answers.unanswered) == (FLOOD - BURST, FLOOD - 2 * BURST)
    assert sorted(session.acknowledged) == list(range(1, FLOOD + 2))
    assert session.writes < FLOOD / 10


async def test_beyond_a_tenants_share_no_body_is_read_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(command, "_json_object", lambda message: parsed.append(message.user_id))
    bench = Bench()
    await read(bench, cancellations(bench, *["flood"] * FLOOD))

    assert len(parsed) <= 3 * BURST  # once to carry it out, once to name the request in a refusal


async def test_a_speaker_has_a_separate_share_for_each_tenant_it_names() -> None:
    bench = Bench()
    floods = cancellations(bench, *["gateway"] * 3 * BURST, tenant="flood")
    last = 3 * BURST + 1
    await read(bench, [*floods, *cancellations(bench, "gateway", first=last, tenant="shop")])

    assert await bench.store.find(Identity("shop", f"m-{last}")) is not None
    assert await bench.store.find(Identity("flood", f"m-{last - 1}")) is None


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, AccessRefused("no right to look"), BrokerError("lost")])
async def test_a_start_waits_for_an_endless_control_queue_up_to_a_limit_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    async def ready() -> dict[str, int]:
        if error is not None:
            raise error
        return {"lane.control": 7}

    monkeypatch.setattr(control_module, "CATCH_UP_WITHIN_S", 1)
    monkeypatch.setattr(control_module, "QUIET_S", 60)
    bench = Bench()
    reader = control(bench, FakeSession(bench.log, []), ready=ready, per_tenant_s=PER_S)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(reader.run())
        await asyncio.sleep(0)
        assert reader.behind is not None
        await caught_up(reader)
    await reader.stop()
    await running
    (told,) = (each for each in logs if each["event"] == signals.CONTROL_BEHIND)
    assert told["waiting"] == (1 if error else 7)


@pytest.mark.slow
async def test_without_the_right_to_see_its_length_the_queue_counts_as_empty_when_nothing_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ready() -> dict[str, int]:
        raise AccessRefused("no right to look")

    bench = Bench()
    monkeypatch.setattr(control_module, "QUIET_S", 1)
    reader = control(bench, FakeSession(bench.log, cancellations(bench, "shop")), ready=ready, per_tenant_s=PER_S)
    running = asyncio.create_task(reader.run())
    await asyncio.sleep(0)
    assert reader.behind is not None, "refused access is no empty queue"
    await caught_up(reader)
    assert await bench.store.find(Identity("shop", "m-1")) is not None
    await reader.stop()
    await running


def test_without_that_right_requests_wait_for_less_than_a_second_after_the_last_cancellation() -> None:
    async def ready() -> dict[str, int]:
        raise AccessRefused("no right to look")

    async def story() -> list[bool]:
        bench = Bench()
        reader = control(bench, FakeSession(bench.log, []), ready=ready, per_tenant_s=PER_S)
        running, found = asyncio.create_task(reader.run()), []
        for pause_s in (0.4, 0.4):
            await asyncio.sleep(pause_s)
            found.append(reader.behind is None)
        await reader.stop()
        await running
        return found

    assert virtually(story()) == [False, True]


class UnderWay(FakeSession):
    """Messages that have left the broker and arrive after the queue was first seen empty."""

    looked = False

    @property
    @override
    def waiting(self) -> int:
        return 0

    async def ready(self) -> dict[str, int]:
        self.looked = True
        return {"lane.control": 0}

    @override
    async def __anext__(self) -> FakeDelivery:
        while not self.looked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(control_module.LOOK_EVERY_S / 2)
        return await super().__anext__()


async def test_a_start_waits_for_messages_that_are_on_their_way_when_the_queue_is_empty() -> None:
    bench = Bench()
    session = UnderWay(bench.log, cancellations(bench, "shop"))
    reader = control(bench, session, ready=session.ready, per_tenant_s=PER_S)
    running = asyncio.create_task(reader.run())
    await caught_up(reader)
    assert await bench.store.find(Identity("shop", "m-1")) is not None
    await reader.stop()
    await running


def test_a_used_share_is_regained_with_time() -> None:
    now_s = 0.0
    limit = RateLimit(per_s=2, at_once=3, clock=lambda: now_s)
    assert [limit.take("a") for _ in range(4)] == [True, True, True, False]
    assert limit.take("b", 3)
    now_s = 0.5
    assert [limit.take("a"), limit.take("a")] == [True, False]
    now_s = 60
    assert [limit.take("a", 3), limit.take("a")] == [True, False]


def test_beyond_the_limit_of_tenants_the_one_idle_longest_is_forgotten() -> None:
    limit = RateLimit(per_s=0.001, at_once=1, clock=lambda: 0.0)
    assert all(limit.take(str(n)) for n in range(NAMES_KEPT + 1))
    assert [limit.take(str(NAMES_KEPT)), limit.take("0")] == [False, True]


def test_frequent_log_lines_are_counted_and_written_once_a_minute() -> None:
    now_s = 0.0
    throttle = LogThrottle(clock=lambda: now_s)
    assert [throttle.count("a") for _ in range(3)] == [1, 0, 0]
    assert throttle.count("b") == 1
    now_s = LOGGED_EVERY_S
    assert [throttle.count("a"), throttle.count("a")] == [3, 0]
