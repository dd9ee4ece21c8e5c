"""The control queue: cancellations are recorded before they are acknowledged, and what is wrong is no loop."""

import json
from typing import Any

import pytest

from consumers import claiming, settle
from consumers.control import Control
from consumers.job import Answered, Refused
from consumers.state.base import Identity, StoreUnavailable
from tests.support.jobs import NOW_MS, Bench, FakeDelivery
from topology import names as n
from topology.contract.messages import Message
from topology.contract.problems import RequestProblem

ASKER = "amq.gen-abcdefghijklmnopqrstuv"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "PUT_BACK_AFTER_S", 0)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def control(bench: Bench) -> Control:
    return Control(
        None,  # type: ignore[arg-type]
        claiming=bench.claiming,
        settler=bench.settler,
        publisher=bench.publisher,  # type: ignore[arg-type]
        now_ms=lambda: NOW_MS,
        ready=None,  # type: ignore[arg-type]
        speakers=("gateway",),
    )


async def read(bench: Bench, body: Any, *, kind: str | None = "cancel", **properties: Any) -> FakeDelivery:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    message = Message(body=raw, type=kind, reply_to=ASKER, correlation_id="q-1", **properties)
    delivery = FakeDelivery(message, bench.log, queue="lane.control")
    await control(bench)._read(delivery)  # type: ignore[arg-type]
    return delivery


def told(bench: Bench) -> dict[str, Any]:
    found = json.loads(bench.to("").body)
    assert isinstance(found, dict)
    return found


async def test_a_cancellation_is_recorded_answered_and_acknowledged(bench: Bench) -> None:
    await read(bench, {"cancel": "m-1"})
    assert bench.log == ["cancel", "confirmed: reply", "ack"]
    assert told(bench) == {"id": "m-1", "outcome": "recorded"}
    assert bench.to("").headers[n.STATUS] == "ok"


async def test_one_that_runs_here_is_stopped_at_once(bench: Bench) -> None:
    job = bench.job()
    await bench.claiming.claim(job)
    await read(bench, {"cancel": "m-1"})
    assert told(bench)["outcome"] == "told"
    assert job.stopped == "cancelled"


async def test_what_had_ended_stays_as_it_ended(bench: Bench) -> None:
    await bench.settler.settle(bench.job(reply_to=None), Answered(body=b'{"id":"msg"}', model="m", provider="p"))
    await read(bench, {"cancel": "m-1"})
    assert told(bench)["outcome"] == "ended"
    found = await bench.store.find(Identity("", "m-1"))
    assert found is not None
    assert found.completion is not None
    assert found.completion.status == "ok"


async def test_a_result_is_the_reply_again(bench: Bench) -> None:
    await bench.settler.settle(bench.job(reply_to=None), Answered(body=b'{"id":"msg"}', model="m", provider="p"))
    await read(bench, {"result": "m-1"}, kind="result")
    answer = bench.to("")
    assert (answer.body, answer.correlation_id) == (b'{"id":"msg"}', "q-1")
    expected = {n.STATUS: "ok", n.REPLAYED: True, n.REQUEST_ID: "m-1", n.MODEL: "m", n.PROVIDER: "p"}
    assert expected.items() <= answer.headers.items()


async def test_an_error_is_the_problem_document_again(bench: Bench) -> None:
    await bench.settler.settle(bench.job(reply_to=None), Refused(RequestProblem("deadline_exceeded", "too late")))
    await read(bench, {"result": "m-1"}, kind="result")
    answer = bench.to("")
    assert (answer.content_type, answer.headers[n.STATUS]) == ("application/problem+json", "error")
    assert told(bench)["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("is_claimed", "status"), [(True, "running"), (False, "unknown")])
async def test_what_has_not_ended_is_said_to_be_pending(bench: Bench, is_claimed: bool, status: str) -> None:
    if is_claimed:
        await bench.claiming.claim(bench.job())
    await read(bench, {"result": "m-1"}, kind="result")
    assert (bench.to("").headers[n.STATUS], told(bench)["status"]) == ("pending", status)


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
        ({"cancel": "x" * 256}, {}),
        ({"cancel": "m-1", "tenant": 5}, {}),
        ({"cancel": "\ud800"}, {}),
        ({"result": "\ud800"}, {"kind": "result"}),
        ({"cancel": "m-1", "tenant": "\ud800"}, {"user_id": "gateway"}),
        ({"cancel": "m-1"}, {"kind": None}),
        ({"cancel": "m-1"}, {"kind": "status"}),
        ({"cancel": "m-1", "tenant": "bank"}, {}),
        ({"cancel": "m-1", "tenant": "bank"}, {"user_id": "shop"}),
    ],
)
async def test_what_is_wrong_is_refused_and_acknowledged(bench: Bench, body: Any, properties: dict[str, Any]) -> None:
    await read(bench, body, **properties)
    assert bench.log == ["confirmed: reply", "ack"]
    assert bench.to("").headers[n.STATUS] == "error"
    assert told(bench)["error"]


@pytest.mark.parametrize(("user", "said"), [("shop", None), ("shop", "shop"), ("gateway", "shop")])
async def test_whose_request_it_is(bench: Bench, user: str, said: str | None) -> None:
    await read(bench, {"cancel": "m-1", "tenant": said}, user_id=user)
    assert await bench.store.find(Identity("shop", "m-1")) is not None


async def test_what_cannot_be_recorded_goes_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "STORE_WITHIN_S", 0)
    bench.store.failing = StoreUnavailable("locked")
    await read(bench, {"cancel": "m-1"})
    assert bench.log == ["give back"]


async def test_a_fault_of_ours_loses_no_cancellation_and_holds_up_nothing_for_ever(bench: Bench) -> None:
    bench.store.failing = RuntimeError("a fault")  # type: ignore[assignment]
    await read(bench, {"cancel": "m-1"})
    assert bench.log == ["reject"]
    message = Message(body=b'{"cancel": "m-1"}', type="cancel")
    await control(bench)._read(FakeDelivery(message, bench.log, times_delivered=5))  # type: ignore[arg-type]
    assert bench.log == ["reject", "ack"]


async def test_nothing_is_answered_to_a_queue_that_somebody_named(bench: Bench) -> None:
    message = Message(body=b'{"cancel": "m-1"}', type="cancel", reply_to="lane.critical")
    await control(bench)._read(FakeDelivery(message, bench.log))  # type: ignore[arg-type]
    assert bench.log == ["cancel", "ack"]
