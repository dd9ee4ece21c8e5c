"""The client over HTTP, against a gateway whose answers and failures a test chooses."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock, patch

import pytest

from lanekeeper import (
    AccessRefused,
    BrokerError,
    BrokerUnreachable,
    Client,
    ClientMisused,
    ConfirmUnknown,
    ControlRefused,
    Final,
    NotEnded,
    Part,
    Problem,
    PublishRefused,
    TopologyMismatch,
    http,
)
from lanekeeper.http import HttpAnswer, _error_of
from tests.support.fake_gateway import CUT, KEY, FakeGateway, Refusal
from tests.support.waiting import until

BODY = {"prompt": "hello"}
LANE = "normal.tests.http"
CONFLICT = {"code": "idempotency_conflict", "status": 409, "detail": "used with another body"}


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[Client]:
    async with Client(gateway.url, api_key=KEY) as client:
        yield client


async def test_a_gateway_that_stays_away_is_told_and_whether_the_request_may_have_been_taken(
    gateway: FakeGateway,
) -> None:
    async with Client(gateway.url, api_key=KEY, publish_within_s=0.01) as client:
        gateway.faults += [503]
        with pytest.raises(BrokerUnreachable, match="503") as away:
            await client.publish(BODY, key=LANE)
        assert not away.value.maybe_published
        assert client.trouble is not None

        gateway.faults += [CUT]
        with pytest.raises(ConfirmUnknown) as unknown:
            await client.publish(BODY, key=LANE)
        assert unknown.value.message_id == gateway.called("POST")[-1].headers["idempotency-key"]
        await client.publish(BODY, key=LANE, message_id=unknown.value.message_id)

        await client.publish(BODY, key=LANE)
        assert client.trouble is None


async def test_a_full_lane_is_told_with_how_long_to_wait_or_waited_for(gateway: FakeGateway, client: Client) -> None:
    gateway.faults += [Refusal(529, {"detail": "the lane is full"}, {"retry-after": "7"})]
    with pytest.raises(PublishRefused, match="the lane is full") as refused:
        await client.publish(BODY, key=LANE)
    assert refused.value.retry_after_s == 7

    gateway.faults += [Refusal(529, {}, {"retry-after": "0"})] * 2
    await client.publish(BODY, key=LANE, full_within_s=60)
    assert len(gateway.called("POST")) == 4


@pytest.mark.parametrize("fault", [CUT, 500])
async def test_a_stream_goes_on_after_its_last_event_when_the_connection_is_lost(
    gateway: FakeGateway, client: Client, fault: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = Mock(return_value=0.0)
    monkeypatch.setattr(http, "pause_s", pauses)
    gateway.posted["id-1"] = b"{}"
    gateway.faults += [Refusal(202, {"id": "id-1"}), fault]
    gateway.streams += [["id: 1\nevent: event\ndata: {}\n\n"], []]
    came = [each async for each in client.stream(BODY, key=LANE, message_id="id-1")]
    assert [type(each) for each in came] == [Part, Final]
    assert [call.headers.get("last-event-id") for call in gateway.called("GET")] == [None, None, "1"]
    assert {each.args for each in pauses.call_args_list} == {(0,)}, "what came in between was no failure"


async def test_a_result_is_asked_for_as_long_as_its_caller_waits_and_no_proxy_closes_the_connection(
    gateway: FakeGateway, client: Client
) -> None:
    gateway.posted["id-1"] = b"{}"
    gateway.faults += [503]
    with pytest.raises(BrokerUnreachable):
        await client.result("id-1")
    await client.result("id-1", wait_s=600)
    assert 10 <= float(gateway.calls[-1].query["wait"].removesuffix("s")) <= 30


async def test_a_cancellation_does_not_wait_for_the_answers_of_other_calls(
    gateway: FakeGateway, client: Client
) -> None:
    gateway.posted["id-1"] = b"{}"
    answers = asyncio.Event()
    gateway.faults.append(answers)
    waiting = asyncio.create_task(client.result("id-1"))
    await until(lambda: gateway.called("GET"))
    async with asyncio.timeout(10):
        assert await client.cancel("id-1") == "told"
    answers.set()
    await waiting


async def test_over_http_no_other_tenant_can_be_named(client: Client) -> None:
    for call in (client.result, client.cancel):
        with pytest.raises(ControlRefused, match="tenant") as refused:
            await call("id-1", tenant="other")
        assert refused.value.fields["status"] == 400


async def test_cancellations_end_when_the_key_does_not_allow_them(gateway: FakeGateway, client: Client) -> None:
    gateway.status = {"status": "running"}

    async def leave(id: str) -> None:
        asked = asyncio.create_task(client.request(BODY, key=LANE, message_id=id))
        await until(lambda: any(call.path.endswith(id) for call in gateway.called("GET")))
        gateway.faults += [403]
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    await leave("id-1")
    await until(lambda: gateway.called("DELETE"))
    await until(lambda: not client._cancelling)
    await leave("id-2")
    assert not client._cancelling


@pytest.mark.parametrize(
    ("status", "document", "error", "says"),
    [
        (400, {"code": "invalid_request", "status": 400, "detail": "model: no"}, Problem, "invalid_request: model: no"),
        (403, {"code": "forbidden_model", "status": 403, "detail": "model"}, Problem, "forbidden_model"),
        (409, CONFLICT, Problem, "idempotency_conflict"),
        (413, {}, Problem, "too_large"),
        (401, {"detail": "invalid x-api-key"}, AccessRefused, "401: invalid x-api-key"),
        (403, {"detail": "this key allows batch"}, AccessRefused, "this key allows batch"),
        (400, {}, Problem, "invalid_request"),
        (404, {"detail": "no such path"}, TopologyMismatch, "is it a gateway's"),
        (404, {"code": "unroutable", "status": 404}, Problem, "unroutable"),
        (405, {}, TopologyMismatch, "is it a gateway's"),
        (300, {}, TopologyMismatch, "is it a gateway's"),
        (302, {}, TopologyMismatch, "is it a gateway's"),
    ],
)
async def test_what_the_gateway_refuses_is_the_same_error_as_over_amqp(
    gateway: FakeGateway, client: Client, status: int, document: dict[str, Any], error: type[Exception], says: str
) -> None:
    gateway.faults += [Refusal(status, document, {"location": "/v1/requests"})]

    with pytest.raises(error, match=says):
        await client.request(BODY, key=LANE)
    assert len(gateway.calls) == 1


async def test_a_request_whose_record_was_lost_is_posted_again_under_its_id(
    gateway: FakeGateway, client: Client
) -> None:
    gateway.status["status"] = "running"
    asked = asyncio.create_task(client.request(BODY, key=LANE, message_id="id-1", timeout_s=30))
    await until(lambda: gateway.called("GET"))
    gateway.posted.clear()
    await until(lambda: gateway.posted)
    gateway.status["status"] = "completed"

    assert (await asked).text == "Pô"
    assert {call.headers["idempotency-key"] for call in gateway.called("POST")} == {"id-1"}


async def test_an_unknown_request_has_no_result_and_cannot_be_cancelled(client: Client) -> None:
    with pytest.raises(NotEnded, match="unknown"):
        await client.result("id-1")
    with pytest.raises(ControlRefused, match="not known"):
        await client.cancel("id-1")
    for id in ("..", "a/b", ""):
        with pytest.raises(ControlRefused, match="the request's id"):
            await client.cancel(id)


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [(300, ControlRefused, "answered 300"), (410, ControlRefused, "answered 410"), (401, AccessRefused, "401")],
)
async def test_what_is_no_answer_about_a_request_is_an_error_with_the_status(
    gateway: FakeGateway, client: Client, status: int, error: type[Exception], says: str
) -> None:
    for call in (client.cancel, client.result):
        gateway.faults += [status]
        with pytest.raises(error, match=says):
            await call("id-1")


@pytest.mark.parametrize("call", ["publish", "request", "cancel", "result"])
async def test_a_page_in_place_of_a_gateways_answer_is_no_success(
    gateway: FakeGateway, client: Client, call: str
) -> None:
    """Such as a proxy's that wants a login."""
    gateway.posted["id-1"] = b"{}"
    gateway.faults += [200]
    given = ("id-1",) if call in ("cancel", "result") else (BODY,)
    with pytest.raises(TopologyMismatch, match="is it a gateway's"):
        await getattr(client, call)(*given, **({"key": LANE} if given == (BODY,) else {}))


async def test_a_lost_answer_does_not_hide_the_results_of_others(gateway: FakeGateway, client: Client) -> None:
    gateway.posted |= {"id-1": b"{}", "id-2": b"{}"}
    gateway.faults += [Refusal(410, {"status": 410, "detail": "the answer was stored, and is lost"})]
    found = await client.results(["id-1", "id-2"])
    lost, other = found["id-1"], found["id-2"]
    if isinstance(lost, Final):  # the calls are made at the same time
        lost, other = other, lost
    assert isinstance(lost, Problem)
    assert "is lost" in lost.detail
    assert isinstance(other, Final)


async def test_an_answer_has_a_largest_size(
    gateway: FakeGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.LARGEST_BYTES == 67_108_864
    gateway.posted["id-1"] = b"{}"
    size = len(gateway.document("id-1").encode())
    monkeypatch.setattr(http, "LARGEST_BYTES", size)
    assert (await client.result("id-1")).text == "Pô"
    monkeypatch.setattr(http, "LARGEST_BYTES", size - 1)
    with pytest.raises(BrokerUnreachable, match="no gateway sends that"):
        await client.result("id-1")


@pytest.mark.parametrize(
    "document", ['{"status":"completed","result":[1,2.50]}', ' {\n "a" : {"result": 0} ,\n "result" : [1,2.50] } ']
)
def test_a_result_is_given_in_the_bytes_in_which_it_came(document: str) -> None:
    assert http.final_of_status("id-1", 200, document.encode()).body == b"[1,2.50]"


async def test_a_stream_whose_events_are_gone_gives_the_answer_alone(gateway: FakeGateway, client: Client) -> None:
    gateway.posted["id-1"] = b"{}"
    gateway.faults += [Refusal(202, {"id": "id-1"}), Refusal(404)]  # for POST and for the events

    came = [each async for each in client.stream(BODY, key=LANE, message_id="id-1")]

    assert [type(each) for each in came] == [Final]


async def test_a_body_given_as_bytes_stays_as_it_is_but_for_stream(gateway: FakeGateway, client: Client) -> None:
    async for _ in client.stream(b' { "prompt" :"hello"}', key=LANE):
        pass
    await client.request(b' { "prompt" :"hello"}', key=LANE)

    assert [call.body for call in gateway.called("POST")] == [
        b' {"stream":true, "prompt" :"hello"}', b' { "prompt" :"hello"}',
    ]  # fmt: skip


async def test_a_body_that_nests_too_deep_to_be_read_goes_to_the_gateway(gateway: FakeGateway, client: Client) -> None:
    body = b'{"messages": ' + b"[" * 100_000
    async for _ in client.stream(body, key=LANE):
        pass
    assert gateway.called("POST")[0].body == body


async def test_a_caller_that_leaves_while_its_request_is_posted_cancels_it_once_it_is_known(
    gateway: FakeGateway, client: Client
) -> None:
    gateway.faults += [503]
    asked = asyncio.create_task(client.request(BODY, key=LANE, message_id="id-1"))
    await until(lambda: gateway.called("POST"))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: gateway.called("DELETE"))
    gateway.posted["id-1"] = b"{}"  # the gateway took it after all

    await until(lambda: gateway.cancelled)
    assert gateway.cancelled == ["id-1"]


async def test_a_body_that_does_not_want_the_parts_is_not_streamed(gateway: FakeGateway, client: Client) -> None:
    with pytest.raises(Problem, match="stream: found False") as refused:
        await anext(client.stream({"stream": False}, key=LANE))
    assert (refused.value.status, gateway.calls) == (400, [])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"priority": 9}, "priority: found 9"),
        ({"tenant": "other"}, "tenant"),
        ({"headers": {"x-lane-tenant": "other"}}, "tenant"),
        ({"headers": {"x-mine": "1"}}, "header x-mine"),
        ({"headers": {"x-lane-a": "1\r\nx-lane-tenant: other"}}, "header 'x-lane-a': has a line break"),
        ({"headers": {"x-lane-a": b"1\n"}}, "header 'x-lane-a': has a line break"),
        ({"headers": {"x-lane-a": b"\xe9"}}, "header x-lane-a: cannot be written"),
        ({"headers": {"x-lane-a": 10**5000}}, "header x-lane-a: cannot be written"),
        ({"headers": {"x-lane-a\r\nx-lane-b": "1"}}, r"header 'x-lane-a.*: has a line break"),
        ({"key": "normal\n.a.b"}, "header 'x-lane-name': has a line break"),
        ({"handler": "chunk\r"}, "header 'x-lane-type': has a line break"),
    ],
)
async def test_what_http_cannot_carry_is_refused_before_it_is_sent(
    gateway: FakeGateway, client: Client, options: Any, says: str
) -> None:
    with pytest.raises(Problem, match=says) as refused:
        await client.publish(BODY, **{"key": LANE, **options})
    assert (refused.value.code, refused.value.status, gateway.calls) == ("invalid_request", 400, [])


@pytest.mark.parametrize(
    ("method", "status", "body", "kind"),
    [
        ("POST", 499, b"", None),
        ("POST", 408, b"", BrokerUnreachable),
        ("POST", 429, b"", BrokerUnreachable),
        ("POST", 429, b'{"code": "too_many"}', None),
        ("POST", 503, b'{"code": "too_many"}', BrokerUnreachable),
        ("POST", 500, b"", ConfirmUnknown),
        ("GET", 500, b"", BrokerUnreachable),
        ("POST", 529, b"", PublishRefused),
        ("GET", 529, b"", BrokerUnreachable),
    ],
)
def test_only_what_may_succeed_later_is_tried_again(
    method: str, status: int, body: bytes, kind: type[BrokerError] | None
) -> None:
    error = _error_of(method, HttpAnswer(status, body), "host")
    assert (None if error is None else type(error)) is kind


async def test_opening_the_client_tells_a_wrong_key_and_a_gateway_that_is_away(gateway: FakeGateway) -> None:
    with pytest.raises(AccessRefused, match="401"):
        async with Client(gateway.url, api_key="wrong"):
            pass
    with (
        pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1"),
        patch.object(asyncio, "sleep", side_effect=AssertionError("it waits for the gateway")),
    ):
        async with Client("http://127.0.0.1:1", api_key=KEY):
            pass


@pytest.mark.parametrize("url", ["http://user:secret@host", "http://host/?a=b", "https://", "http://host/#a"])
def test_a_url_that_is_no_gateways_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="a gateway's URL is") as refused:
        Client(url)
    assert "secret" not in str(refused.value)


def test_a_key_of_a_gateway_is_not_given_to_a_broker() -> None:
    with pytest.raises(ValueError, match="api_key"):
        Client("amqp://localhost/", api_key="x")


DROPPED = """
import sys
from lanekeeper.sync import Client

def ask(client):
    client.publish({"prompt": "x"}, key="normal.tests.exit")
    return client

ask(Client(sys.argv[1], api_key=sys.argv[2]))
kept = ask(Client(sys.argv[1], api_key=sys.argv[2]))
"""


@pytest.mark.slow
async def test_clients_that_nobody_closed_are_closed_when_dropped_and_at_exit(gateway: FakeGateway) -> None:
    script = (sys.executable, "-c", DROPPED, gateway.url, KEY)
    process = await asyncio.create_subprocess_exec(*script, stdout=PIPE, stderr=PIPE)
    said = await asyncio.wait_for(process.communicate(), 60)
    assert (said, process.returncode, len(gateway.posted)) == ((b"", b""), 0, 2)


async def fails_at_once(client: Client) -> None:
    """Each call of the client raises ClientMisused, without waiting."""
    async with asyncio.timeout(5):
        with pytest.raises(ClientMisused):
            await client.publish(BODY, key=LANE)
        with pytest.raises(ClientMisused):
            await client.request(BODY, key=LANE)
        with pytest.raises(ClientMisused):
            await anext(client.stream(BODY, key=LANE))
        with pytest.raises(ClientMisused):
            await client.cancel("id-1")
        with pytest.raises(ClientMisused):
            await client.result("id-1", wait_s=30)
        with pytest.raises(ClientMisused):
            await client.depth("normal")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "amqp://127.0.0.1:1"])
async def test_a_client_that_was_not_opened_says_so_at_once(url: str) -> None:
    await fails_at_once(Client(url))


async def test_a_call_that_waits_while_the_client_is_closed_ends(gateway: FakeGateway) -> None:
    async with Client(gateway.url, api_key=KEY) as client:
        gateway.status = {"status": "running"}
        waiting = asyncio.create_task(client.result("id-1", wait_s=600))
        asking = asyncio.create_task(client.request(BODY, key=LANE, message_id="id-2"))
        await until(lambda: len(gateway.called("GET")) > 2)
    async with asyncio.timeout(10):
        with pytest.raises(ClientMisused):
            await waiting
        with pytest.raises(ClientMisused) as misused:
            await asking
    assert misused.value.message_id == "id-2"


async def test_a_client_closed_while_its_request_may_be_published_says_so(gateway: FakeGateway) -> None:
    async with Client(gateway.url, api_key=KEY) as client:
        gateway.faults += [CUT] * 50
        publishing = asyncio.create_task(client.publish(BODY, key=LANE))
        await until(lambda: bool(gateway.called("POST")))
    with pytest.raises(ClientMisused) as misused:
        await asyncio.wait_for(publishing, 10)
    assert misused.value.maybe_published
