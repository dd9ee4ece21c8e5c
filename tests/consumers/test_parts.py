"""The parts of a stream: many are on their way at a time, within bounds, and all are settled before the outcome."""

import asyncio
from collections.abc import Callable

import pytest
import structlog
from typing_extensions import override

from consumers.job import Attempted
from consumers.providers.registry import CONTENT
from consumers.replies import Parts
from lanekeeper.amqp.publisher import Confirm
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import BrokerUnreachable, PublishRefused, RequestProblem
from lanekeeper.telemetry import signals
from tests.support.jobs import NOW_MS, Bench, Told
from tests.support.virtual_time import virtually

Answers = list[asyncio.Future[Confirm]]
FIRST_UNCONFIRMED, UNCONFIRMED, UNCONFIRMED_BYTES = 4, 64, 256 * 1024


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def unconfirmed(bench: Bench) -> Answers:
    found: Answers = []
    bench.publisher.unconfirmed = found
    return found


async def settled() -> None:
    """Let every task run as far as it can without a confirm."""
    for _ in range(5):
        await asyncio.sleep(0)


def confirm(those: Answers) -> None:
    for each in those:
        if not each.done():
            each.set_result(None)


async def test_a_part_does_not_wait_for_the_confirm_of_the_one_before(bench: Bench, unconfirmed: Answers) -> None:
    parts = Parts(bench.replies, bench.job())
    for number in range(FIRST_UNCONFIRMED):
        await parts(b"%d" % number)
    assert {(each.message.content_type, each.message.persistent) for each in bench.publisher.sent} == {
        ("application/json", False)
    }
    sent = [(each.message.headers[n.SEQ], each.message.body) for each in bench.publisher.sent]
    assert sent == [(number, b"%d" % number) for number in range(FIRST_UNCONFIRMED)]
    assert not any(each.done() for each in unconfirmed)


async def test_with_each_wait_twice_as_many_parts_may_be_unconfirmed_up_to_a_limit(
    bench: Bench, unconfirmed: Answers
) -> None:
    parts, counts = Parts(bench.replies, bench.job()), []

    async def stream() -> None:
        for _ in range(5 * UNCONFIRMED):
            await parts(b"{}")

    streaming = asyncio.create_task(stream())
    while not streaming.done():
        await settled()
        counts.append(sum(not each.done() for each in unconfirmed))
        confirm(unconfirmed)
    assert counts[:3] == [FIRST_UNCONFIRMED, 2 * FIRST_UNCONFIRMED, 4 * FIRST_UNCONFIRMED]
    assert max(counts) == UNCONFIRMED
    assert len(unconfirmed) == 5 * UNCONFIRMED


@pytest.mark.parametrize(("size", "most"), [(UNCONFIRMED_BYTES // 2, 2), (2 * UNCONFIRMED_BYTES, 1)])
async def test_only_so_many_bytes_are_unconfirmed(bench: Bench, unconfirmed: Answers, size: int, most: int) -> None:
    parts = Parts(bench.replies, bench.job())
    async with asyncio.timeout(1):
        for _ in range(most):
            await parts(bytes(size))
    one_more = asyncio.create_task(parts(bytes(size)))
    await settled()
    assert len(unconfirmed) == most

    confirm(unconfirmed)
    await one_more
    assert len(unconfirmed) == most + 1
    confirm(unconfirmed)
    async with asyncio.timeout(1):
        for _ in range(most):
            await parts(bytes(size))


async def test_the_outcome_waits_until_every_part_is_confirmed_or_lost(bench: Bench, unconfirmed: Answers) -> None:
    parts = Parts(bench.replies, bench.job())
    for _ in range(3):
        await parts(b"{}")
    waiting = asyncio.create_task(parts.confirmed())
    unconfirmed[2].set_result(None)
    unconfirmed[1].set_exception(ConnectionError("lost"))
    await settled()
    assert not waiting.done()
    unconfirmed[0].set_result(None)
    await waiting


def lost(answer: asyncio.Future[Confirm]) -> None:
    answer.set_exception(ConnectionError("the channel was lost"))


def refused(answer: asyncio.Future[Confirm]) -> None:
    answer.set_result(PublishRefused)


@pytest.mark.parametrize("fails", [lost, refused])
async def test_lost_parts_are_told_once_and_the_stream_goes_on(
    bench: Bench, unconfirmed: Answers, fails: Callable[[asyncio.Future[Confirm]], None]
) -> None:
    parts = Parts(bench.replies, bench.job())
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await parts(b"{}")
            fails(unconfirmed[-1])
        await parts.confirmed()
    assert len(bench.publisher.sent) == 3
    assert [each["event"] for each in logs] == [signals.PART_LOST]


async def test_parts_that_the_connection_does_not_take_are_told_once_and_the_stream_goes_on(bench: Bench) -> None:
    bench.publisher.failing = {"": BrokerUnreachable("the connection is lost")}
    parts = Parts(bench.replies, bench.job())
    with structlog.testing.capture_logs() as logs:
        await parts(b"{}")
        await parts(b"{}")
        bench.publisher.failing = {}
        await parts(b"{}")
    assert [each["event"] for each in logs] == [signals.PART_LOST]
    assert [each.message.headers[n.SEQ] for each in bench.publisher.sent] == [2]


async def test_a_part_too_large_for_a_message_ends_the_request_unless_its_answer_can_be_stored(bench: Bench) -> None:
    bench.publisher.too_large = {b"large"}
    with pytest.raises(RequestProblem, match="LANEKEEPER_BODIES__URL"):
        await Parts(bench.replies, bench.job())(b"large")
    bench.replies.loses_large_parts = True
    parts = Parts(bench.replies, bench.job())
    with structlog.testing.capture_logs() as logs:
        await parts(b"large")
        await parts(b"{}")
    assert [each["event"] for each in logs] == [signals.PART_LOST]
    assert [each.message.headers[n.SEQ] for each in bench.publisher.sent] == [1]


def test_a_part_without_a_confirm_counts_as_lost_after_five_seconds() -> None:
    async def story() -> float:
        bench, clock = Bench(), asyncio.get_running_loop().time
        bench.publisher.unconfirmed = []
        parts = Parts(bench.replies, bench.job())
        await parts(b"{}")
        began_s = clock()
        await parts.confirmed()
        return clock() - began_s

    with structlog.testing.capture_logs() as logs:
        assert virtually(story()) == pytest.approx(5)
    assert [(each["event"], each["reason"]) for each in logs] == [(signals.PART_LOST, "no confirm within 5 s")]


@pytest.mark.parametrize(
    ("attempts_before", "redelivered", "parts"),
    [
        (0, False, ["event", "event"]),
        (1, False, ["restart", "event", "event"]),
        (0, True, ["restart", "event", "event"]),
    ],
)
async def test_whoever_may_have_events_of_an_earlier_call_is_told_once_to_discard_them(
    bench: Bench, attempts_before: int, redelivered: bool, parts: list[str]
) -> None:
    job = bench.job(exchange="lane.due", headers={n.ATTEMPT: attempts_before})
    job.attempted, job.delivery.redelivered = Attempted(started_ms=NOW_MS), redelivered
    stream = Parts(bench.replies, job)
    for _ in range(2):
        await stream(b"{}")
    sent = [each.message.headers for each in bench.publisher.sent]
    assert [(each[n.PART], each[n.SEQ], each[n.LANE_NAME]) for each in sent] == [
        (part, seq, "critical") for seq, part in enumerate(parts)
    ]


async def test_content_in_the_first_event_lifts_the_limit_and_a_call_without_events_restarts_nothing(
    bench: Bench,
) -> None:
    stream, flows = Parts(bench.replies, bench.job()), list[bool]()
    stream.on_flow = lambda: flows.append(stream.flow)
    await stream(CONTENT)
    assert flows == [True]
    assert not Parts(bench.replies, bench.job()).restart()


async def test_of_a_second_call_in_one_attempt_the_events_begin_anew(bench: Bench) -> None:
    stream, flows = Parts(bench.replies, bench.job()), list[int]()
    stream.on_flow = lambda: flows.append(len(bench.publisher.sent))
    for _ in range(2):
        await stream(b"{}")
        assert stream.restart()
        await stream(CONTENT)
        await stream(CONTENT)
        assert stream.restart()
    assert flows == [1, 6], "the limit is lifted at the first content of each call"
    assert [each.message.headers[n.PART] for each in bench.publisher.sent] == [
        "event", "restart", "event", "event", "restart", "event", "restart", "event", "event",
    ]  # fmt: skip


async def test_parts_of_a_request_without_an_address_go_to_those_who_follow_it(bench: Bench) -> None:
    class Following(Told):
        @override
        def part(self, kind: str, body: bytes) -> None:
            self.told.append((kind, {"body": body}))

    job, progress = bench.job(reply_to=None), Following()
    stream = Parts(bench.replies, job)
    await stream(b"nobody")
    assert not stream.has_sent
    job.progress = progress
    await stream(b"one")
    assert progress.told == [("event", {"body": b"one"})]
    assert bench.publisher.sent == []
