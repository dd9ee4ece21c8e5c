"""What an application does wrong is told at once by an error of ours, and our client changes nothing in its process."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

import pytest

import lanekeeper as surface
from lanekeeper import AccessRefused, Client, ClientMisused, InvalidArgument, InvalidUrl
from lanekeeper.amqp.connection import Connection
from lanekeeper.replies import Problem
from lanekeeper.requests import Options, bound_s, request_message
from lanekeeper.sync import Client as SyncClient
from tests.support.fake_gateway import KEY, FakeGateway

AMQP, HTTP = "amqp://a:b@127.0.0.1:1/", "http://127.0.0.1:1"
HALF = "\ud83d"


@pytest.mark.parametrize("client", [Client, SyncClient])
@pytest.mark.parametrize(
    "url",
    [
        None, 5, b"amqp://h", "h:5672", "redis://h", "amqp://h:99999", "http://h:99999", "http://[", "amqp://",
        "amqp://:5", "amqp://my..broker", "amqp://a\0b", f"amqp://h,amqp://{'x' * 64}.example", "http://my..gateway",
        f"http://{'x' * 64}",
    ],
)  # fmt: skip
def test_a_url_that_can_be_none_is_refused(client: Any, url: object) -> None:
    with pytest.raises(InvalidUrl):
        client(url)


@pytest.mark.parametrize("url", ["http://h", "h"])
def test_a_connection_to_a_broker_has_a_brokers_url(url: str) -> None:
    with pytest.raises(InvalidUrl):
        Connection(url, name="test")


@pytest.mark.parametrize(
    "settings", [{"api_key": 5}, {"api_key": "a\nb"}, {"publish_within_s": "5"}, {"absent_within_s": True}], ids=str
)
def test_a_setting_of_another_type_is_refused(settings: Any) -> None:
    with pytest.raises(InvalidArgument):
        Client(HTTP, **settings)


@pytest.mark.parametrize("url", [AMQP, HTTP])
@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": "5"}, {"deadline_s": float("nan")}, {"delay_s": float("inf")}, {"delay_s": datetime.now(UTC)},
        {"at": "2026-01-01"}, {"priority": "4"}, {"priority": True}, {"message_id": 5}, {"tenant": HALF},
        {"headers": [("a", 1)]}, {"beta": 1}, {"full_within_s": "1"}, {"id": "k"}, {"key": None}, {"key": HALF},
        {"body": {"prompt": HALF}}, {"body": {"prompt": datetime.now(UTC)}}, {"body": {1j: 2}}, {"body": None},
        {"body": io.StringIO("{}")}, {"body": []}, {"message_id": ""}, {"message_id": "bad id"},
        {"tenant": "a\x00b"}, {"tenant": ""}, {"headers": {5: 1}},
        {"headers": {"x" * 256: 1}}, {"headers": {HALF: 1}},
        {"deadline_s": 1e308}, {"deadline_s": 10**400}, {"full_within_s": 10**400}, {"priority": 10**5000},
    ],
)  # fmt: skip
async def test_a_wrong_argument_is_told_before_anything_is_sent(url: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as told:
        await Client(url).publish(**{"body": {}, "key": "critical.a.b", **wrong})
    assert isinstance(told.value, TypeError)
    assert isinstance(told.value, ValueError)


@pytest.mark.parametrize("url", [AMQP, HTTP])
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.cancel(b"k-1"),
        lambda client: client.cancel("k-1", tenant=b"crm"),
        lambda client: client.result(5),
        lambda client: client.result("k-1", wait_s=10**400),
        lambda client: client.results("k-1"),
        lambda client: client.results(5),
        lambda client: client.request({}, key="critical.a.b", timeout_s=10**400),
        lambda client: client.publish_many(5, key="critical.a.b"),
        lambda client: client.publish_many("ab", key="critical.a.b"),
        lambda client: client.publish_many([{}], key="critical.a.b", headers=[("a", 1)]),
    ],
)
async def test_a_wrong_argument_of_any_other_call_is_told_too(url: str, call: Callable[[Any], Any]) -> None:
    client = Client(url)
    client._loop = asyncio.get_running_loop()
    with pytest.raises(InvalidArgument):
        await call(client)


@pytest.mark.parametrize("value", ["y" * 200_000, HALF, object()], ids=["too large", "half", "object"])
async def test_headers_that_the_broker_would_not_take_are_not_sent(value: object) -> None:
    client = Client(AMQP)
    client._loop = asyncio.get_running_loop()
    with pytest.raises(InvalidArgument, match="headers: "):
        await client.publish({}, key="critical.a.b", headers={"my": value})


async def test_over_http_an_id_that_would_name_another_path_is_not_sent() -> None:
    async with FakeGateway() as gateway, Client(gateway.url, api_key=KEY) as client:
        with pytest.raises(InvalidArgument, match="message_id"):
            await client.publish({}, key="critical.a.b", message_id="..")
        assert not gateway.calls


@pytest.mark.parametrize(
    ("error", "told", "sent"),
    [(AccessRefused("no"), "no", 1), (ClientMisused("closed"), "closed", 2), (TimeoutError(), "not within 3 s", 2)],
)
async def test_a_cancellation_that_cannot_be_sent_is_told_and_one_that_is_refused_is_the_last(
    error: Exception, told: str, sent: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(AMQP)
    with patch.object(client._transport, "send_cancellation", side_effect=error) as sending:
        for id in ("id-1", "id-2"):
            client.abandon(id, {})
            await asyncio.gather(*client._cancelling)
    assert (sending.call_count, len(caplog.records)) == (sent, sent)
    assert f"event='cancellation.unsent' request='id-1' error='{told}" in caplog.text


@pytest.mark.parametrize(
    ("settings", "options", "are_cancelled"),
    [
        ({}, {}, True),
        ({}, {"cancel_abandoned": False}, False),
        ({"cancel_abandoned": False}, {}, False),
        ({"cancel_abandoned": False}, {"cancel_abandoned": True}, False),
    ],
)
async def test_abandoned_requests_are_cancelled_unless_the_client_or_the_request_says_no(
    settings: Any, options: Options, are_cancelled: bool
) -> None:
    client = Client(HTTP, **settings)
    with patch.object(client._transport, "send_cancellation") as sending:
        client.abandon("id-1", options)
        await asyncio.gather(*client._cancelling)
    assert sending.called == are_cancelled


ANY_JSON = {"handler": "chunk"}


@pytest.mark.parametrize(
    ("body", "options", "is_taken"),
    [
        ({}, {}, True),
        (io.BytesIO(b"{}"), {}, True),
        ([1], {}, False),
        ("text", {"headers": {"my": 1}, "handler": None}, False),
        ([1], ANY_JSON, True),
        ((1,), {"pipeline": "p"}, True),
        ("text", {"headers": {"x-lane-pipeline": "p"}}, True),
        (5, ANY_JSON, False),
    ],
)
async def test_a_list_or_a_text_is_a_body_for_a_handler_or_a_pipeline_alone(
    body: Any, options: Any, is_taken: bool
) -> None:
    client = Client(AMQP)
    client._loop = asyncio.get_running_loop()
    with nullcontext() if is_taken else pytest.raises(InvalidArgument, match=f"body: found {type(body).__name__}"):
        client._outgoing(body, "normal.a.b", options, stream=False)


def test_a_client_whose_event_loop_was_closed_says_so() -> None:
    client = Client(AMQP)
    client._loop = asyncio.new_event_loop()
    client._loop.close()
    for call in (client.cancel("id"), client.result("id"), client.depth("normal")):
        with pytest.raises(ClientMisused, match="another event loop"):
            asyncio.run(call)
    with pytest.raises(ClientMisused, match="another event loop"):
        client.group("g-1")


CHANGES = """
import logging, sys
import aio_pika, aiormq.channel, aiormq.connection, pamqp.commands, pamqp.decode, pamqp.encode, pamqp.frame

modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("aiormq", "pamqp", "aio_pika")]

def state():
    found = {(module.__name__, name): value for module in modules for name, value in vars(module).items()}
    found |= {
        (module.__name__, kind.__name__, name): value
        for module in modules for kind in vars(module).values() if isinstance(kind, type)
        for name, value in vars(kind).items()
    }
    found["encode"], found["decode"] = dict(pamqp.encode.METHODS), dict(pamqp.decode.METHODS)
    return found | {
        name: [bool(logger.filter(logging.makeLogRecord({}))), *logger.handlers]
        for name in ("aiormq.connection", "aiormq.channel", "aio_pika", "", "aiormq.connection.marshall")
        for logger in [logging.getLogger(name)]
    }

before = state()
import lanekeeper.over_amqp, lanekeeper.sync
from lanekeeper import Client
Client("amqp://guest:guest@127.0.0.1:1/")
try:
    lanekeeper.sync.Client("amqp://guest:guest@127.0.0.1:1/").publish({}, key="a.b.c")
except lanekeeper.BrokerUnreachable:
    pass
after = state()
names = before.keys() | after.keys()
print([name for name in names if before.get(name) is not after.get(name) and before.get(name) != after.get(name)])
"""


@pytest.mark.slow
def test_neither_importing_nor_using_the_client_changes_the_libraries_below_it() -> None:
    assert subprocess.run([sys.executable, "-c", CHANGES], capture_output=True, text=True).stdout == "[]\n"


def test_the_client_waits_until_shortly_after_the_deadline_if_there_is_one() -> None:
    def awaited_s(**options: object) -> float | None:
        return bound_s(request_message({}, options, stream=False, user="crm"))  # type: ignore[arg-type]

    assert awaited_s() is None
    assert awaited_s(deadline_s=10) == 15
    assert awaited_s(deadline_s=10, delay_s=2) == 17
    assert awaited_s(deadline_s=10, at=datetime.now(UTC)) is None
    assert awaited_s(deadline_s=10, headers={"x-lane-delay-ms": "2000"}) == 17
    for wrong in ("soon", None, 10**400):  # a worker refuses it
        assert awaited_s(deadline_s=10, headers={"x-lane-delay-ms": wrong}) == 15
        assert awaited_s(headers={"x-lane-deadline-ms": wrong}) is None


@pytest.mark.parametrize("priority", [-1, 10, 200, 256, None])
def test_a_priority_that_workers_refuse_is_not_sent(priority: Any) -> None:
    with pytest.raises(Problem, match=f"priority: found {priority}, allowed are 0 to 9") as refused:
        request_message({}, Options(priority=priority), stream=False, user="crm")
    assert (refused.value.code, refused.value.status) == ("invalid_request", 400)


def test_an_unknown_option_is_an_error_that_names_it_and_those_that_are_known() -> None:
    with pytest.raises(TypeError, match=r"unknown option: id; known: .*message_id"):
        request_message({}, {"id": "k-1"}, stream=False, user="crm")  # type: ignore[typeddict-unknown-key]
    assert not Options.__required_keys__


ERRORS = {
    name
    for name in surface.__all__
    if isinstance(found := getattr(surface, name), type) and issubclass(found, Exception)
}


def test_every_client_error_derives_from_one_base_class() -> None:
    assert len(ERRORS) == 22
    assert {name for name in ERRORS if not issubclass(getattr(surface, name), surface.LanekeeperError)} == set()


@pytest.mark.parametrize(
    "value", ["[1, 2]", '{"output": "text"}', '{"output": 5}', '{"content": "a"}', '{"choices": [1]}']
)
def test_an_answer_that_is_no_message_is_a_typed_error_that_says_what_to_read(value: str) -> None:
    given = {"lane": "normal", "provider": "handler", "attempt": 1, "wait_ms": 0, "run_ms": 0, "replayed": False}
    final = surface.Final(body=value.encode(), request_id="k-1", model="chunk", headers={}, **given)  # type: ignore[arg-type]
    assert final.value == json.loads(value)
    with pytest.raises(surface.NotAMessage, match=r"answer of chunk is no Message: read Final\.value"):
        _ = final.text


def test_a_part_without_a_delta_has_no_text() -> None:
    assert surface.Part(kind="event", seq=0, body=b'{"choices": [{"index": 0, "delta": null}]}').text == ""
