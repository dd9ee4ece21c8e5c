"""A stream that breaks is announced, begun again, and never passed off as an answer."""

import pytest

from tests.journeys.test_streamed import put_together
from tests.support.house import house
from tests.support.requester import requester

BROKEN = [
    "error_mid_stream",
    "error_mid_stream type=api_error",
    "error_mid_stream type=rate_limit_error",
    "cut",
    "truncated",
    "reset",
    "broken_json",
    "not_a_message",
    "unfinished",
    "stall",
]
SHORT = {"critical": {"call_timeout_s": 0.6}}


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_broken_stream_is_announced_and_begun_again(vhost, fault) -> None:
    async with house(vhost.amqp_url, lanes=SHORT) as home, requester(vhost.amqp_url) as app:
        asked = await app.publish({"prompt": f"a story [[fault: {fault} x1]]"}, headers={"x-lane-stream": True})
        final = await app.final(asked)
        parts = app.parts(asked)

        assert final.status == "ok", final
        assert final.headers["x-lane-attempt"] == 2
        assert len(home.api.calls) == 2
        kinds = [part.headers["x-lane-part"] for part in parts]
        assert kinds.count("restart") == 1
        restart = kinds.index("restart")
        assert [part.headers["x-lane-seq"] for part in parts[:restart]] == list(range(restart))
        assert [part.headers["x-lane-seq"] for part in parts[restart:]] == list(range(len(parts) - restart))
        assert {part.headers["x-lane-attempt"] for part in parts[:restart]} <= {1}
        assert {part.headers["x-lane-attempt"] for part in parts[restart:]} == {2}
        assert final.json == put_together([part.json for part in parts[restart + 1 :]])
        if fault != "unfinished":  # which sends the end of a stream, but no reason for it
            assert "message_stop" not in [part.json["type"] for part in parts[:restart]]


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_stream_that_breaks_every_time_is_never_an_answer(vhost, fault) -> None:
    lanes = {"critical": {"call_timeout_s": 0.6, "max_attempts": 2}}
    async with house(vhost.amqp_url, lanes=lanes) as home, requester(vhost.amqp_url) as app:
        final = await app.ask({"prompt": f"a story [[fault: {fault}]]"}, headers={"x-lane-stream": True})
        assert final.code == "attempts_exhausted"
        assert len(home.api.calls) == 2


@pytest.mark.parametrize("type", ["invalid_request_error", "authentication_error"])
async def test_an_error_in_the_middle_that_is_for_good_ends_it(vhost, type) -> None:
    async with house(vhost.amqp_url) as home, requester(vhost.amqp_url) as app:
        asked = await app.publish(
            {"prompt": f"a story [[fault: error_mid_stream type={type}]]"}, headers={"x-lane-stream": True}
        )
        final = await app.final(asked)
        assert final.code == "provider_rejected"
        assert final.json["status"] in (400, 401)
        assert len(home.api.calls) == 1


async def test_a_long_answer_that_is_streamed_for_its_length_alone_is_retried_too(vhost) -> None:
    async with house(vhost.amqp_url) as home, requester(vhost.amqp_url) as app:
        asked = await app.publish({"prompt": "long [[fault: cut x1]]", "max_tokens": 30_000})
        assert (await app.final(asked)).text.startswith("echo: long")
        assert app.parts(asked) == []
        assert len(home.api.calls) == 2


async def test_a_slow_stream_that_keeps_coming_is_not_cut(vhost) -> None:
    """The lane's limit bounds the first event and every pause, not the whole."""
    async with house(vhost.amqp_url, lanes=SHORT) as home, requester(vhost.amqp_url) as app:
        asked = await app.publish({"prompt": "a long breath [[latency: 2s]]"}, headers={"x-lane-stream": True})
        assert (await app.final(asked)).status == "ok"
        assert len(home.api.calls) == 1
