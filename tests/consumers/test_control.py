"""The control queue: a cancellation is recorded before it is acknowledged, and an invalid message is not redelivered
for ever."""

import json
from typing import Any

import pytest
import structlog

from consumers import settle
from consumers.clock import moment_text
from consumers.control import _state
from consumers.outcomes import Answered
from consumers.state.base import Cancelling, Completion, Found, Identity, StoreUnavailable
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import signals
from tests.support.jobs import NOW_MS, Bench, FakeDelivery, FakeSession, answers_of, control
from tests.support.virtual_time import virtually

ANSWERED = Answered(body=b'{"id":"msg"}', model="claude-x", provider="anthropic")
ASKER = "amq.gen-abcdefghijklmnopqrstuv"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "RETURN_AFTER_S", 0)


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


async def test_cancellations_that_displaced_earlier_ones_are_counted_and_logged_once_a_minute(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def displaces(identity: Identity, completion: Completion) -> Cancelling:
        return Cancelling.DISPLACED

    monkeypatch.setattr(bench.store, "cancel", displaces)
    deliveries = [
        FakeDelivery(Message(body=b'{"cancel":"m-%d"}' % each, type="cancel", routing_key="cancel"), bench.log)
        for each in range(3)
    ]
    reading = control(bench, delivering(bench, *deliveries))
    with structlog.testing.capture_logs() as logs:
        await reading.run()

    assert reading.displaced == 3
    told = [each for each in logs if each["event"] == signals.CANCELLATION_DISPLACED]
    assert [(each["count"], each["displaced"]) for each in told] == [(1, 1)]


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


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (None, {"status": "unknown", "attempts": 0}),
        (Found(completion=None, running=True, attempts=2), {"status": "running", "attempts": 2}),
        (
            Found(completion=None, running=False, attempts=1, due_ms=NOW_MS, step="draft"),
            {"status": "waiting", "attempts": 1, "step": "draft", "due_at": moment_text(NOW_MS)},
        ),
    ],
)
def test_the_state_of_a_request_that_has_not_ended(found: Found | None, state: dict[str, Any]) -> None:
    assert _state("m-1", found) == {"id": "m-1", **state}


async def test_status_questions_in_the_control_queue_are_ignored(bench: Bench) -> None:
    await read(bench, {}, kind="status")
    assert bench.log == ["ack"]


def test_a_cancellation_that_cannot_be_recorded_goes_back_to_the_queue(bench: Bench) -> None:
    bench.store.failing = StoreUnavailable("locked")
    virtually(read(bench, {"cancel": "m-1"}))
    assert bench.log == ["nack"]


@pytest.mark.slow
async def test_an_internal_error_does_not_lose_a_cancellation_and_is_answered_after_five_deliveries(
    bench: Bench,
) -> None:
    bench.store.failing = RuntimeError("a fault")  # type: ignore[assignment]
    await read(bench, {"cancel": "m-1"})
    assert bench.log == ["reject"]
    message = Message(body=b'{"cancel": "m-1"}', type="cancel", routing_key="cancel", reply_to=ASKER)
    delivery = FakeDelivery(message, bench.log, times_delivered=5)
    await control(bench, delivering(bench, delivery)).run()
    assert bench.log == ["reject", "confirmed: reply", "ack"]
    assert (told(bench)["code"], told(bench)["request"]) == ("internal", "m-1")


async def test_a_refusal_without_an_address_is_counted(bench: Bench) -> None:
    answers = answers_of(bench)
    await answers.refuse(Message(body=b"", type="reboot"), RequestProblem("invalid_request", "type"))
    assert bench.log == []
    assert (answers.refused, answers.unanswered) == (1, 1)


async def test_a_result_that_no_one_can_be_sent_counts_as_unanswered_only_if_it_had_an_address(bench: Bench) -> None:
    answers, found = answers_of(bench), Completion(status="ok", body=b"{}", headers={}, ended_ms=NOW_MS)
    await answers.replay(Message(body=b""), found, id="m-1")
    assert answers.unanswered == 0
    await answers.replay(Message(body=b"", reply_to="my.queue"), found, id="m-1")
    assert answers.unanswered == 1
    assert bench.log == []


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


async def test_a_control_message_may_have_4096_bytes(bench: Bench) -> None:
    await read(bench, b'{"cancel": "m-1"}'.ljust(4096))
    assert bench.to("").headers[n.CONTROL] == "accepted"
    bench.publisher.sent.clear()
    await read(bench, b'{"cancel": "m-1"}'.ljust(4097))
    assert told(bench)["detail"] == "body: 4097 bytes, allowed are 4096"


async def brakes(bench: Bench, kind: str, body: Any, *, user: str | None = "ops") -> Any:
    bench.publisher.sent.clear()
    delivery = await read(bench, body, kind=kind, user_id=user)
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
