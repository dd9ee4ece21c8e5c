"""The control queue: a cancellation is recorded before it is acknowledged, and an invalid message is not redelivered
for ever."""

import asyncio
import json
from typing import Any

import pytest
import structlog
from typing_extensions import override

from consumers.outcomes import Answered
from consumers.replies import ReplySender
from consumers.state.base import Identity, StoreUnavailable
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.telemetry import signals
from tests.support.jobs import Bench, FakeDelivery, FakeNotices, FakeSession, answers_of, control
from tests.support.virtual_time import virtually

ANSWERED = Answered(body=b'{"id":"msg"}', model="claude-x", provider="anthropic")
ASKER = "amq.gen-abcdefghijklmnopqrstuv"


pytestmark = pytest.mark.usefixtures("returned_at_once")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def delivering(bench: Bench, *deliveries: FakeDelivery) -> FakeSession:
    return FakeSession(bench.log, deliveries, ends=True)


async def read(
    bench: Bench,
    body: Any,
    *,
    kind: str | None = "cancel",
    key: str | None = None,
    needs_user_id: bool = False,
    **properties: Any,
) -> FakeDelivery:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"reply_to": ASKER, "correlation_id": "q-1", **properties}
    message = Message(body=raw, type=kind, routing_key=kind or "" if key is None else key, **fields)
    delivery = FakeDelivery(message, bench.log, queue="lane.control")
    await control(bench, delivering(bench, delivery), needs_user_id=needs_user_id).run()
    return delivery


def told(bench: Bench) -> dict[str, Any]:
    found = json.loads(bench.to("").body)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("body", "properties"),
    [
        (b"", {}),
        (b"\xff", {}),
        (b"[" * 4000, {}),
        (b"x" * 5000, {}),
        ([], {}),
        ({}, {}),
        ({"cancel": 5}, {}),
        ({"cancel": ""}, {}),
        ({"cancel": "x" * 129}, {}),
        ({"cancel": "no id"}, {}),
        ({"result": "no/id"}, {"kind": "result"}),
        ({"cancel": "m-1", "tenant": 5}, {}),
        ({"cancel": "\ud800"}, {}),
        ({"result": "\ud800"}, {"kind": "result"}),
        ({"cancel": "m-1", "tenant": "\ud800"}, {"user_id": "gateway"}),
        ({"cancel": "m-1"}, {"kind": None}),
        ({"cancel": "m-1"}, {"kind": ""}),
        ({"cancel": "m-1"}, {"kind": "reboot"}),
        ({"cancel": "m-1"}, {"kind": "status", "key": "cancel"}),
        ({"cancel": "m-1"}, {"kind": "cancel", "key": "result"}),
        ({"cancel": "m-1"}, {"kind": "cancel", "key": "cancel.more"}),
        ({"change": "m-1", "start": "now"}, {"kind": "change"}),
        ({"cancel": "m-1", "tenant": "bank"}, {}),
        ({"cancel": "m-1", "tenant": "bank"}, {"user_id": "shop"}),
    ],
)
async def test_an_invalid_control_message_is_refused_and_acknowledged(
    bench: Bench, body: Any, properties: dict[str, Any]
) -> None:
    await read(bench, body, **properties)
    assert bench.log == ["confirmed: reply", "ack"]
    answer, document = bench.to(""), told(bench)
    assert (answer.content_type, answer.correlation_id) == ("application/problem+json", "q-1")
    assert (answer.headers[n.CONTROL], n.STATUS in answer.headers) == ("error", False)
    assert answer.headers.get(n.REQUEST_ID, "") == document["request"]
    assert (document["type"], document["status"]) == ("urn:lanekeeper:problem:invalid-request", 400)
    assert document["detail"]


async def test_status_questions_in_the_control_queue_are_ignored(bench: Bench) -> None:
    await read(bench, {}, kind="status")
    assert bench.log == ["ack"]


def test_a_cancellation_that_cannot_be_recorded_goes_back_to_the_queue(bench: Bench) -> None:
    bench.store.failing = StoreUnavailable("locked")
    virtually(read(bench, {"cancel": "m-1"}))
    assert bench.log == ["nack"]


@pytest.mark.parametrize(("times", "is_last"), [(None, True), (1, False), (4, False), (5, True)])
async def test_an_internal_error_does_not_lose_a_cancellation_and_is_answered_after_five_deliveries(
    bench: Bench, times: int | None, is_last: bool
) -> None:
    bench.store.failing = RuntimeError("a fault")  # type: ignore[assignment]
    message = Message(body=b'{"cancel": "m-1"}', type="cancel", routing_key="cancel", reply_to=ASKER)
    await control(bench, delivering(bench, FakeDelivery(message, bench.log, times_delivered=times))).run()
    assert bench.log == (["confirmed: reply", "ack"] if is_last else ["reject"])
    if is_last:
        assert (told(bench)["code"], told(bench)["request"], told(bench)["attempts"]) == ("internal", "m-1", 0)


@pytest.mark.parametrize("user", ["a\x00b", "a b", "b" * 129])
async def test_a_tenant_is_checked_like_an_id(bench: Bench, user: str) -> None:
    for body, which in (({"cancel": "m-1"}, "user_id"), ({"cancel": "m-1", "tenant": user}, "tenant")):
        await read(bench, body, user_id=user)
        assert told(bench)["detail"].startswith(f"{which}: allowed are 1 to 128 letters")
        bench.publisher.sent.clear()


class Taking(FakeNotices):
    """Takes every answer."""

    @override
    def send(self, message: Message, *, routing_key: str) -> bool:
        self.bodies.append(message.body)
        return True


async def test_an_answer_is_sent_once_and_not_among_others_if_its_address_may_close_the_connection(
    bench: Bench,
) -> None:
    message, direct = Message(body=b"", reply_to=ASKER), "amq.rabbitmq.reply-to.g1h2"
    bench.notices = Taking([])
    await answers_of(bench).send(message, {}, control="accepted")
    assert (len(bench.notices.bodies), bench.publisher.sent) == (1, [])
    bench.reply_sender = ReplySender(bench.publisher, own=None)
    bench.reply_sender.needs_own_connection = lambda address: address == direct  # type: ignore[method-assign]
    message.reply_to = direct
    await answers_of(bench).send(message, {}, control="accepted")
    assert (len(bench.notices.bodies), len(bench.publisher.sent)) == (1, 1)


def test_requests_wait_five_seconds_for_cancellations_and_begin_to_wait_again_when_the_store_was_away(
    bench: Bench,
) -> None:
    async def waiting(queues: list[str]) -> dict[str, int]:
        return {"lane.control": 7}

    async def story() -> None:
        reader = control(bench, FakeSession(bench.log, []), ready=waiting)
        running, found = asyncio.create_task(reader.run()), list[bool]()
        for _ in range(2):
            for pause_s, trouble in ((4.9, None), (0.2, "away"), (0.1, None)):
                await asyncio.sleep(pause_s)
                found.append(reader.behind is None)
                bench.store.trouble = trouble
        assert found == [False, True, False] * 2
        await reader.stop()
        await running
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "control backlog"]

    with structlog.testing.capture_logs() as logs:
        virtually(story())
    assert [(each["event"], each["waiting"], each["waited_s"]) for each in logs] == [(signals.CONTROL_BEHIND, 7, 5)] * 2


async def test_a_stored_result_tells_how_it_was_posted_and_not_where(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), ANSWERED)
    bench.publisher.sent.clear()
    await read(bench, {"result": "m-1"}, kind="result")
    assert n.WEBHOOK_LOG not in bench.to("").headers

    bench.publisher.sent.clear()
    row = b'{"url": "https://h/secret", "routing_key": "k", "endpoint": "https://h", "state": "retrying"}'
    await bench.store.note_webhook(Identity("", "m-1"), row, until_ms=2_000_000_000_000)
    await read(bench, {"result": "m-1"}, kind="result")
    log = bench.to("").headers[n.WEBHOOK_LOG]
    assert json.loads(log) == {"endpoint": "https://h", "state": "retrying"}


def test_a_result_for_which_there_is_no_room_is_to_be_asked_for_again(bench: Bench) -> None:
    class Waits(FakeDelivery):
        @override
        async def room(self, size: int) -> None:
            await asyncio.Event().wait()

    async def story() -> None:
        await bench.settler.settle(bench.job(message_id="m-1"), ANSWERED)
        bench.publisher.sent.clear()
        message = Message(body=b'{"result":"m-1"}', type="result", routing_key="result", reply_to=ASKER)
        await control(bench, delivering(bench, Waits(message, bench.log, queue="lane.control"))).run()

    virtually(story())
    assert told(bench)["code"] == "too_many_control_messages"
    assert bench.log[-1] == "ack"


async def test_a_stored_result_that_the_broker_no_longer_accepts_is_answered_as_too_large(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), ANSWERED)
    bench.publisher.sent.clear()
    bench.publisher.too_large = {ANSWERED.body}
    await read(bench, {"result": "m-1"}, kind="result")
    assert told(bench)["code"] == "answer_too_large"


@pytest.mark.parametrize("kind", ["cancel", "result"])
async def test_where_users_are_required_a_message_without_user_is_refused(bench: Bench, kind: str) -> None:
    await read(bench, {kind: "m-1"}, kind=kind, needs_user_id=True)
    assert bench.log == ["confirmed: reply", "ack"]
    assert told(bench)["code"] == "invalid_request"
    assert told(bench)["detail"].startswith("user_id: missing; publish with the property user_id")
    assert bench.to("").headers == {n.CONTROL: "error", n.REQUEST_ID: "m-1"}


async def brakes(bench: Bench, kind: str, body: Any) -> Any:
    bench.publisher.sent.clear()
    delivery = await read(bench, body, kind=kind, user_id="ops")
    assert delivery.log[-1] == "ack"
    return told(bench)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, 'body: allowed is {"pause":'),
        ({"pause": "batch"}, 'body: allowed is {"pause":'),
        ({"pause": {"kind": "lane", "name": "bach"}}, "no lane 'bach'"),
        (b"\xff", "body: not a JSON object"),
    ],
)
async def test_a_pause_that_cannot_be_read_is_refused(bench: Bench, body: Any, text: str) -> None:
    assert text in (await brakes(bench, "pause", body))["detail"]
