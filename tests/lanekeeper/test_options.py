"""The properties and headers of a request, made from the client's options."""

import time
from datetime import UTC, datetime

import pytest

from lanekeeper import Client
from lanekeeper.options import Options, bound_s, message_of
from lanekeeper.replies import Problem


def test_a_tenant_is_sent_together_with_the_user_that_the_broker_checks() -> None:
    own = message_of({}, Options(tenant="crm"), stream=False, user="crm")
    other = message_of({}, Options(tenant="acme"), stream=False, user="crm")
    nobody = message_of({}, Options(), stream=False, user="crm")

    assert (own.user_id, own.headers.get("x-lane-tenant")) == ("crm", None)
    assert (other.user_id, other.headers.get("x-lane-tenant")) == ("crm", "acme")
    assert (nobody.user_id, nobody.headers.get("x-lane-tenant")) == (None, None)


def test_the_client_waits_until_shortly_after_the_deadline_if_there_is_one() -> None:
    def awaited_s(**options: float) -> float | None:
        return bound_s(message_of({}, options, stream=False, user="crm"))  # type: ignore[arg-type]

    assert awaited_s() is None
    assert awaited_s(deadline_s=10) == 15
    assert awaited_s(deadline_s=10, delay_s=2) == 17


@pytest.mark.parametrize("priority", [-1, 10, 200, 256])
def test_a_priority_that_workers_refuse_is_not_sent(priority: int) -> None:
    with pytest.raises(Problem, match=f"priority: found {priority}, allowed are 0 to 9") as refused:
        message_of({}, Options(priority=priority), stream=False, user="crm")
    assert refused.value.code == "invalid_request"


@pytest.mark.parametrize("priority", [0, 9])
def test_the_lowest_and_the_highest_priority_are_sent(priority: int) -> None:
    assert message_of({}, Options(priority=priority), stream=False, user="crm").priority == priority


def test_an_unknown_option_is_an_error_that_names_it_and_those_that_are_known() -> None:
    with pytest.raises(TypeError, match=r"unknown option: id; known: .*message_id"):
        message_of({}, {"id": "k-1"}, stream=False, user="crm")  # type: ignore[typeddict-unknown-key]


async def test_a_body_that_is_no_object_no_bytes_and_no_file_is_an_error_before_anything_is_published() -> None:
    for url in ("http://127.0.0.1:1", "amqp://a:b@127.0.0.1:1/"):
        with pytest.raises(TypeError, match="body: found list"):
            await Client(url).publish([], key="critical.a.b")  # type: ignore[arg-type]


def test_options_become_headers_and_given_headers_override_them() -> None:
    options = Options(
        deadline_s=1.5, delay_s=0.25, at=datetime(2026, 5, 1, tzinfo=UTC), beta="b", headers={"x-lane-deadline-ms": 7}
    )
    message = message_of(b"{}", options, stream=True, user="crm")

    headers = dict(message.headers)
    assert headers.pop("x-lane-sent-ms") == pytest.approx(time.time() * 1000, abs=60_000)
    assert headers == {
        "x-lane-stream": True,
        "x-lane-deadline-ms": 7,
        "x-lane-delay-ms": 250,
        "x-lane-at": "2026-05-01T00:00:00+00:00",
        "anthropic-beta": "b",
    }
    assert (message.body, message.priority, message.content_type) == (b"{}", 4, "application/json")


def test_without_a_delay_no_delay_header_is_sent() -> None:
    assert "x-lane-delay-ms" not in message_of({}, Options(delay_s=0), stream=False, user="crm").headers
