"""The parts of a stream: many are on their way at a time, within bounds, and all are settled before the outcome."""

import asyncio
import json
from collections.abc import Callable

import pytest
import structlog
from typing_extensions import override

from consumers.dialects import DIALECTS
from consumers.job import Attempted
from consumers.replies import Parts
from consumers.state.base import Completion
from lanekeeper.amqp.publisher import Confirm
from lanekeeper.amqp.replies import DirectReplies
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ProviderFailure, PublishRefused, RequestProblem
from lanekeeper.telemetry import signals
from tests.support.jobs import NOW_MS, Bench, Told
from tests.support.virtual_time import virtually

Answers = list[asyncio.Future[Confirm]]
WAITING_BYTES = 256 * 1024

CONTENT = DIALECTS[n.ANTHROPIC_MESSAGES].content


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


async def test_who_reads_several_parts_gets_those_of_all_its_streams_in_one_message(
    bench: Bench, unconfirmed: Answers
) -> None:
    first, second, plain = (
        Parts(bench.replies, bench.job(correlation_id=id, headers=headers))
        for id, headers in (
            ("one", {n.PARTS_TOGETHER: True}), ("two", {n.PARTS_TOGETHER: "true"}), ("three", {})
        )
    )  # fmt: skip
    await first(b'{"at":0}')
    await settled()
    for each in (first, second, plain):
        await each(b'{"at":\n1}')
    confirm(unconfirmed)
    await settled()

    sent = [each.message for each in bench.publisher.sent]
    assert [(each.correlation_id, each.headers[n.PART], each.body) for each in sent] == [
        ("one", "event", b'{"at":0}'),
        ("three", "event", b'{"at":\n1}'),
        (None, "several", b'["one","event",1,{"at": 1}]\n["two","event",0,{"at": 1}]'),
    ]
    assert not sent[-1].persistent


@pytest.mark.parametrize("id", ['"', "a b", "", "\u00e4", None])
async def test_an_id_that_would_need_escapes_is_not_put_beside_others(bench: Bench, id: str | None) -> None:
    parts = Parts(bench.replies, bench.job(correlation_id=id, headers={n.PARTS_TOGETHER: True}))
    for _ in range(3):
        await parts(b"{}")
    await parts.confirmed()
    assert [each.message.headers[n.PART] for each in bench.publisher.sent] == ["event"] * 3


@pytest.mark.parametrize("size", [WAITING_BYTES // 4, 2 * WAITING_BYTES])
async def test_only_so_many_bytes_wait_for_a_publish_and_all_go_out_once_and_in_order(
    bench: Bench, unconfirmed: Answers, size: int
) -> None:
    streams = [Parts(bench.replies, bench.job(correlation_id=id)) for id in "abc"]

    async def stream(parts: Parts) -> None:
        for number in range(10):
            await parts(b"%d" % number * size)

    streaming = [asyncio.create_task(stream(each)) for each in streams]
    while not all(each.done() for each in streaming) or not all(each.done() for each in unconfirmed):
        await settled()
        under_way = [each for each in unconfirmed if not each.done()]
        assert len(under_way) * size <= max(WAITING_BYTES, size)
        confirm(unconfirmed)
    for each in streams:
        await each.confirmed()
    for id in "abc":
        sent = [each.message for each in bench.publisher.sent if each.message.correlation_id == id]
        assert [each.headers[n.SEQ] for each in sent] == list(range(10))


async def test_a_gateway_in_this_process_gets_parts_and_final_reply_without_the_broker(bench: Bench) -> None:
    bench.replies.here, message = DirectReplies(), Message(body=b"")
    with bench.replies.here.expecting(message) as arrived:
        parts = Parts(bench.replies, bench.job(correlation_id=message.correlation_id))
        await parts(b"1")
        await parts(b"2")
        await parts.confirmed()
        assert await bench.replies.final(parts.job, Completion(status="ok", body=b"whole", ended_ms=0))
        assert [reply.body for reply in await arrived.all(end=None)] == [b"1", b"2", b"whole"]
        elsewhere = Parts(bench.replies, bench.job(correlation_id="of another"))
        await elsewhere(b"3")
        await elsewhere.confirmed()
        assert await bench.replies.final(elsewhere.job, Completion(status="ok", body=b"4", ended_ms=0))
    assert await bench.replies.final(parts.job, Completion(status="ok", body=b"caller gone", ended_ms=0))
    assert [each.message.body for each in bench.publisher.sent] == [b"3", b"4", b"caller gone"]


async def test_the_outcome_waits_until_every_part_is_confirmed_or_lost(bench: Bench, unconfirmed: Answers) -> None:
    parts = Parts(bench.replies, bench.job())
    for _ in range(3):
        await parts(b"{}")
    waiting = asyncio.create_task(parts.confirmed())
    await settled()
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
            await settled()
            fails(unconfirmed[-1])
            await settled()
        await parts.confirmed()
    assert len(bench.publisher.sent) == 3
    assert [each["event"] for each in logs] == [signals.PART_LOST]


async def test_a_part_too_large_for_a_message_ends_the_request_unless_its_answer_can_be_stored(bench: Bench) -> None:
    large = bytes(WAITING_BYTES + 1)
    bench.publisher.too_large = {large}
    with pytest.raises(RequestProblem, match="LANEKEEPER_BODIES__URL"):
        await Parts(bench.replies, bench.job())(large)
    bench.replies.loses_large_parts = True
    parts = Parts(bench.replies, bench.job())
    with structlog.testing.capture_logs() as logs:
        await parts(large)
        await parts(b"{}")
        await parts.confirmed()
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
    await stream.confirmed()
    sent = [each.message.headers for each in bench.publisher.sent]
    assert [(each[n.PART], each[n.SEQ], each[n.LANE_NAME]) for each in sent] == [
        (part, seq, "critical") for seq, part in enumerate(parts)
    ]


async def test_of_a_second_call_in_one_attempt_the_events_begin_anew(bench: Bench) -> None:
    stream, flows = Parts(bench.replies, bench.job()), list[int]()
    stream.on_flow = lambda: flows.append(len(bench.publisher.sent))
    for _ in range(2):
        for event in (b"{}", CONTENT, CONTENT):
            await stream(event)
            await stream.confirmed()
            assert event == CONTENT or await stream.restart()
        assert await stream.restart()
        assert not await stream.restart(), "nothing was sent since"
    await stream.confirmed()
    assert flows == [1, 6], "the limit is lifted at the first content of each call"
    sent = [each.message.headers for each in bench.publisher.sent]
    assert [(each[n.PART], each[n.SEQ]) for each in sent] == [
        ("event", 0), ("restart", 0), ("event", 1), ("event", 2), ("restart", 0), ("event", 1),
        ("restart", 0), ("event", 1), ("event", 2), ("restart", 0),
    ]  # fmt: skip


async def test_a_restart_has_the_providers_error(bench: Bench) -> None:
    stream = Parts(bench.replies, bench.job())
    for failed in (ProviderFailure(status=529, type="overloaded_error", error='{"a":1}', request_id="r-1"), None):
        await stream(b"{}")
        await stream.restart(failed)
    await stream.confirmed()
    assert [json.loads(each.message.body) for each in bench.publisher.sent[1::2]] == [
        {
            "provider_status": 529,
            "provider_type": "overloaded_error",
            "provider_error": '{"a":1}',
            "provider_request_id": "r-1",
        },
        {},
    ]


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
