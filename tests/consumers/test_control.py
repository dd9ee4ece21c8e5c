"""The control queue: a cancellation is recorded before it is acknowledged, and an invalid message is not redelivered
for ever."""

import json
from typing import Any

import pytest
import structlog

from consumers import claiming, settle
from consumers.outcomes import Answered, Refused
from consumers.state.base import Cancelling, Completion, Granted, Held, Identity, StoreUnavailable
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem
from lanekeeper.telemetry import signals
from tests.support.control_queue import FakeSession, answers_of, control
from tests.support.jobs import NOW_MS, Bench, FakeDelivery

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


async def test_a_cancellation_is_recorded_answered_and_acknowledged(bench: Bench) -> None:
    await read(bench, {"cancel": "m-1"})
    assert bench.log == ["cancel", "confirmed: reply", "ack"]
    assert told(bench) == {"id": "m-1", "outcome": "unseen", "kept_until": "2026-09-22T14:13:20.000Z"}
    assert bench.to("").headers == {n.CONTROL: "accepted", n.REQUEST_ID: "m-1"}


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


async def test_the_cancellation_of_a_delayed_request_is_recorded(bench: Bench) -> None:
    await bench.store.defer(Identity("", "m-1"), due_ms=NOW_MS, keep_until_ms=2 * NOW_MS)
    await read(bench, {"cancel": "m-1"})
    assert told(bench) == {"id": "m-1", "outcome": "recorded"}


async def test_the_cancellation_of_a_request_that_runs_here_stops_it_at_once(bench: Bench) -> None:
    job = bench.job()
    await bench.claiming.claim(job)
    await read(bench, {"cancel": "m-1"})
    assert told(bench)["outcome"] == "told"
    assert job.stopped == "cancelled"


async def test_a_cancellation_changes_nothing_after_the_end(bench: Bench) -> None:
    await bench.settler.settle(bench.job(reply_to=None), Answered(body=b'{"id":"msg"}', model="m", provider="p"))
    await read(bench, {"cancel": "m-1"})
    assert told(bench)["outcome"] == "ended"
    found = await bench.store.find(Identity("", "m-1"))
    assert found is not None
    assert found.completion is not None
    assert found.completion.status == "ok"


async def test_a_stored_result_is_answered_with_the_final_reply(bench: Bench) -> None:
    await bench.settler.settle(bench.job(reply_to=None), Answered(body=b'{"id":"msg"}', model="m", provider="p"))
    await read(bench, {"result": "m-1"}, kind="result")
    answer = bench.to("")
    assert (answer.body, answer.correlation_id) == (b'{"id":"msg"}', "q-1")
    assert n.CONTROL not in answer.headers
    expected = {n.STATUS: "ok", n.REPLAYED: True, n.REQUEST_ID: "m-1", n.MODEL: "m", n.PROVIDER: "p"}
    assert expected.items() <= answer.headers.items()


async def test_a_stored_error_is_answered_with_its_problem_document(bench: Bench) -> None:
    await bench.settler.settle(bench.job(reply_to=None), Refused(RequestProblem("deadline_exceeded", "too late")))
    await read(bench, {"result": "m-1"}, kind="result")
    answer = bench.to("")
    assert (answer.content_type, answer.headers[n.STATUS]) == ("application/problem+json", "error")
    assert told(bench)["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("is_claimed", "status"), [(True, "running"), (False, "unknown")])
async def test_a_result_that_is_not_there_yet_is_answered_as_pending(
    bench: Bench, is_claimed: bool, status: str
) -> None:
    if is_claimed:
        await bench.claiming.claim(bench.job())
    await read(bench, {"result": "m-1"}, kind="result")
    assert bench.to("").headers == {n.CONTROL: "pending", n.REQUEST_ID: "m-1"}
    assert told(bench) == {"id": "m-1", "status": status, "attempts": 0}


@pytest.mark.parametrize("attempts", [0, 2])
async def test_the_pending_answer_of_a_delayed_request_has_due_time_and_attempts(bench: Bench, attempts: int) -> None:
    if attempts:
        found = await bench.store.claim(Identity("", "m-1"), bench.job().fingerprint)
        assert isinstance(found, Granted)
        await bench.store.release(Held(Identity("", "m-1"), found.token), attempts=attempts, due_ms=NOW_MS + 60_000)
    else:
        await bench.store.defer(Identity("", "m-1"), due_ms=NOW_MS + 60_000, keep_until_ms=2 * NOW_MS)
    await read(bench, {"result": "m-1"}, kind="result")
    waiting = {"id": "m-1", "status": "waiting", "attempts": attempts, "due_at": "2026-09-21T14:14:20.000Z"}
    assert told(bench) == waiting


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
    ("body", "kind", "key", "detail"),
    [
        ({"cancel": "m-1"}, None, "cancel", "type: it is missing; known are cancel, result, change, status"),
        ({"cancel": "m-1"}, "reboot", "reboot", "type 'reboot': known are cancel"),
        ({"cancel": "m-1"}, "cancel", "result", "routing key 'result' and type 'cancel' differ"),
        ({"change": "m-1"}, "change", "change", "not available in this version"),
        ({"cancel": "m-1", "tenant": "x"}, "cancel", "cancel", "without user_id may not speak for tenant 'x'"),
        ({"result": "a b"}, "result", "result", "result: 'a b' can be no request's id: allowed are 1 to 128 of A-Z"),
    ],
)
async def test_the_refusal_names_what_is_invalid(
    bench: Bench, body: Any, kind: str | None, key: str, detail: str
) -> None:
    await read(bench, body, kind=kind, key=key)
    assert detail in told(bench)["detail"]
    assert told(bench)["request"] == ("" if " " in str(body) and "a b" in body.values() else "m-1")


async def test_status_questions_in_the_control_queue_are_ignored(bench: Bench) -> None:
    await read(bench, {}, kind="status")
    assert bench.log == ["ack"]


@pytest.mark.parametrize(("user", "said"), [("shop", None), ("shop", "shop"), ("gateway", "shop")])
async def test_the_tenant_of_a_control_message_is_the_user_or_the_one_a_speaker_names(
    bench: Bench, user: str, said: str | None
) -> None:
    await read(bench, {"cancel": "m-1", "tenant": said}, user_id=user)
    assert await bench.store.find(Identity("shop", "m-1")) is not None


async def test_a_cancellation_that_cannot_be_recorded_goes_back_to_the_queue(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "STORE_WITHIN_S", 0)
    bench.store.failing = StoreUnavailable("locked")
    await read(bench, {"cancel": "m-1"})
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


@pytest.mark.parametrize(("reply_to", "unanswered"), [("lane.critical", 1), ("my.queue", 1), (None, 0)])
async def test_no_answer_goes_to_a_queue_with_a_chosen_name(
    bench: Bench, reply_to: str | None, unanswered: int
) -> None:
    answers = answers_of(bench)
    await answers.tell(Message(body=b"", reply_to=reply_to), {"id": "m-1"}, control="accepted")
    assert bench.log == []
    assert answers.unanswered == unanswered


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


async def test_a_stored_result_that_the_broker_no_longer_accepts_is_answered_as_too_large(bench: Bench) -> None:
    await bench.settler.settle(bench.job(), ANSWERED)
    bench.publisher.sent.clear()
    bench.publisher.too_large = {ANSWERED.body}
    await read(bench, {"result": "m-1"}, kind="result")
    assert told(bench)["code"] == "answer_too_large"


DIRECT = "amq.rabbitmq.reply-to.g1h2.abc=="
"""An address of direct reply-to, in the broker's form."""


@pytest.mark.parametrize(
    ("address", "user", "bound", "is_told"),
    [
        (ASKER, None, False, True),
        (ASKER, "shop", True, False),
        (DIRECT, None, False, True),
        (DIRECT, None, True, True),
        ("lane.reply.shop", "shop", False, True),
        ("lane.reply.shop.x", "shop", True, True),
        ("lane.reply.shop", "bank", False, False),
        ("lane.reply.shop", None, True, False),
        ("shop.answers", "shop", False, False),
        ("amq.gen-short", None, False, False),
    ],
)
async def test_with_bound_replies_an_answer_goes_only_to_the_user_who_asked(
    bench: Bench, address: str, user: str | None, bound: bool, is_told: bool
) -> None:
    answers = answers_of(bench, bound=bound)
    question = Message(body=b"{}", reply_to=address, user_id=user)
    await answers.tell(question, {}, control="accepted")
    assert [each.routing_key for each in bench.publisher.sent] == [address] * is_told
    assert answers.unanswered == (not is_told)


@pytest.mark.parametrize("kind", ["cancel", "result"])
async def test_where_users_are_required_a_message_without_user_is_refused(bench: Bench, kind: str) -> None:
    await read(bench, {kind: "m-1"}, kind=kind, needs_user_id=True)
    assert bench.log == ["confirmed: reply", "ack"]
    assert told(bench)["code"] == "invalid_request"
    assert told(bench)["detail"].startswith("user_id: missing; publish with the property user_id")
    assert bench.to("").headers == {n.CONTROL: "error", n.REQUEST_ID: "m-1"}


async def test_where_users_are_required_a_message_with_user_is_carried_out(bench: Bench) -> None:
    await read(bench, {"cancel": "m-1"}, needs_user_id=True, user_id="shop")
    assert told(bench)["outcome"] == "unseen"


async def test_a_control_message_may_have_4096_bytes(bench: Bench) -> None:
    await read(bench, b'{"cancel": "m-1"}'.ljust(4096))
    assert bench.to("").headers[n.CONTROL] == "accepted"


async def test_a_larger_control_message_is_refused_with_its_size(bench: Bench) -> None:
    await read(bench, b'{"cancel": "m-1"}'.ljust(4097))
    assert told(bench)["detail"] == "body: 4097 bytes, allowed are 4096"
