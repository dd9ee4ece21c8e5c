import io
import json
import logging
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from lanekeeper.contract.problems import BrokerUnreachable
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import context_in
from service.telemetry import logs, redaction


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_event_is_one_line_of_json_with_its_name_and_fields() -> None:
    out = io.StringIO()

    with logs.configured(service="worker", level="INFO", stream=out):
        structlog.get_logger().bind(lane="critical").info(signals.REQUEST_ANSWERED, wait_ms=4)

    (line,) = lines(out)
    assert list(line) == ["timestamp", "level", "event", "service", "lane", "wait_ms"]
    assert line | {"timestamp": ""} == {
        "timestamp": "",
        "level": "info",
        "event": "request.answered",
        "service": "worker",
        "lane": "critical",
        "wait_ms": 4,
    }


def test_a_terminal_gets_columns() -> None:
    out = Terminal()

    with logs.configured(service="worker", level="INFO", stream=out):
        structlog.get_logger().info(signals.BROKER_LOST, reason="reset\x1b[2J\nby peer")

    assert "broker.lost" in out.getvalue()
    assert not out.getvalue().startswith("{")
    assert "\x1b[2J" not in out.getvalue(), "a value must not speak to the terminal"
    assert len(out.getvalue().splitlines()) == 1


def test_the_log_level_applies_to_our_events_and_libraries_are_logged_from_warning_on() -> None:
    out = io.StringIO()

    with logs.configured(service="s", level="debug", stream=out):
        structlog.get_logger().debug("ours")
        logging.getLogger("aiormq").info("not shown")
        logging.getLogger("aiormq").warning("lost %s\nand more", "amqp://u:p@h/")

    ours, theirs = lines(out)
    assert ours["event"] == "ours"
    assert (theirs["event"], theirs["library"]) == (signals.LIBRARY_WARNED, "aiormq")
    assert theirs["message"] == "lost amqp://…@h/"


def test_hostile_trace_headers_are_not_logged() -> None:
    out = io.StringIO()
    trace = f"00-{'a' * 32}-{'b' * 16}-01"

    with logs.configured(service="s", level="debug", stream=out):
        for state in ("s3cret", "a=1,a=s3cret", "a=" + "s3cret" * 100):
            assert context_in({"traceparent": trace, "tracestate": state}) is not None

    assert lines(out) == []


def test_an_exception_is_logged_with_its_place_and_only_our_own_errors_are_quoted() -> None:
    out = io.StringIO()

    with logs.configured(service="s", level="INFO", stream=out):
        try:
            try:
                dict[str, str]()["secret prompt"]
            except KeyError as error:
                raise BrokerUnreachable("no broker at h:5672") from error
        except BrokerUnreachable:
            structlog.get_logger().exception(signals.HANDLER_FAILED)

    (line,) = lines(out)
    assert line["exception"][0] == "lanekeeper.contract.problems.BrokerUnreachable: no broker at h:5672"
    assert "test_an_exception_is_logged" in line["exception"][1]
    assert "builtins.KeyError" in line["exception"]
    assert "secret prompt" not in out.getvalue()


def test_content_is_logged_if_the_setting_allows_it() -> None:
    out = io.StringIO()

    with logs.configured(service="s", level="INFO", with_content=True, stream=out):
        try:
            dict[str, str]()["what was asked"]
        except KeyError:
            structlog.get_logger().exception("failed", prompt="hello")

    (line,) = lines(out)
    assert line["prompt"] == "hello"
    assert line["exception"][0] == "builtins.KeyError: 'what was asked'"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("key sk-ant-api03-Ab_1-x, rest", "key sk-ant-…, rest"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer …"),
        ("amqp://user:pa@ss@host:5672/vhost", "amqp://…@host:5672/vhost"),
        ("cannot parse 'amqps://user:pa/ss#1@host'", "cannot parse 'amqps://…@host'"),
        ("http://host:4318/v1/traces", "http://host:4318/v1/traces"),
        ("a\r\nb\x1b[31m\u202e", "a\\r\\nb\\x1b[31m\\u202e"),
        ("Grüße, 你好", "Grüße, 你好"),
    ],
)
def test_text_is_shown_without_secrets_on_one_line(value: str, shown: str) -> None:
    assert redaction.text(value) == shown


def test_fields_that_hold_content_are_recognised_by_name() -> None:
    event = {
        "api_key": "x", "x-api-key": "x", "password": "x", "auth_token": "x", "headers": {"Authorization": "x", "a": 1},
        "body": b"12345", "messages": [1, 2], "input_tokens": 5, "error": ValueError("sk-ant-1"), "raw": b"12",
    }  # fmt: skip

    assert redaction.fields(event, with_content=False) == {
        "api_key": "…", "x-api-key": "…", "password": "…", "auth_token": "…", "headers": {"Authorization": "…", "a": 1},
        "body": "<5>", "messages": "<2>", "input_tokens": 5, "error": "sk-ant-…", "raw": "<2 bytes>",
    }  # fmt: skip


@given(st.text(max_size=50), st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"]), min_size=1))
def test_a_key_is_removed_whatever_surrounds_it(around: str, key: str) -> None:
    shown = redaction.text(f"{around} sk-ant-{key} {around}")

    assert f"sk-ant-{key}" not in shown
    assert "\n" not in shown


def test_deeply_nested_and_circular_values_are_cut() -> None:
    endless: list[Any] = []
    endless.append(endless)

    assert json.dumps(redaction.fields({"a": endless, "b": "x" * 10_000}, with_content=False))
