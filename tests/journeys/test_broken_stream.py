"""If a stream breaks, the requester gets a restart, and a partial answer is never sent as a complete one."""

from typing import Any

from tests.support.brokers import Vhost
from tests.support.held_provider import HeldProvider
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.stream import put_together
from tests.support.waiting import until

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
SHORT = {"normal": {"call_timeout_s": 2.5}}
"""Shorter than a stall, and longer than a busy machine pauses. It is not the lane of the other faults."""


def key_of(fault: str) -> str:
    return "normal.tests.broken" if fault == "stall" else "critical.tests.broken"


async def test_a_broken_stream_is_started_again_after_a_restart(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, lanes=SHORT) as worker, requester(vhost.amqp_url) as app:
        for fault in BROKEN:
            body = {"prompt": f"a story [[fault: {fault} x1]]"}
            await app.publish(body, key=key_of(fault), headers={"x-lane-stream": True}, correlation_id=fault)
            final = await app.final(fault)
            parts = app.parts(fault)

            assert final.status == "ok", (fault, final)
            assert final.headers["x-lane-attempt"] == 2, fault
            assert len(worker.calls(f"[[fault: {fault} x1]]")) == 2, fault
            kinds = [part.headers["x-lane-part"] for part in parts]
            assert kinds.count("restart") == 1, fault
            restart = kinds.index("restart")
            assert [part.headers["x-lane-seq"] for part in parts[:restart]] == list(range(restart))
            assert [part.headers["x-lane-seq"] for part in parts[restart:]] == list(range(len(parts) - restart))
            assert {part.headers["x-lane-attempt"] for part in parts[:restart]} <= {1}
            assert {part.headers["x-lane-attempt"] for part in parts[restart:]} == {2}
            assert final.json == put_together([part.json for part in parts[restart + 1 :]]), fault
            if fault != "unfinished":  # which sends the stream's end without a stop reason
                assert "message_stop" not in [part.json["type"] for part in parts[:restart]], fault


async def test_a_stream_that_breaks_every_time_ends_as_an_error(vhost: Vhost) -> None:
    lanes: dict[str, dict[str, Any]] = {
        "critical": {"max_attempts": 2},
        "normal": {"call_timeout_s": 0.6, "max_attempts": 2},
    }
    async with serving(vhost.amqp_url, lanes=lanes) as worker, requester(vhost.amqp_url) as app:
        for fault in BROKEN:
            body = {"prompt": f"a story [[fault: {fault}]]"}
            await app.publish(body, key=key_of(fault), headers={"x-lane-stream": True}, correlation_id=fault)
            assert (await app.final(fault)).code == "attempts_exhausted", fault
            assert len(worker.calls(f"[[fault: {fault}]]")) == 2, fault
            assert (await app.ask({"prompt": "all is well"})).status == "ok", "or the breaker would open"


async def test_a_permanent_error_in_the_middle_of_a_stream_ends_the_request(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        for type, status in (("invalid_request_error", 400), ("permission_error", 403)):
            body = {"prompt": f"a story [[fault: error_mid_stream type={type}]]"}
            final = await app.ask(body, headers={"x-lane-stream": True})
            assert final.code == "provider_rejected"
            assert final.json["status"] == status
            assert len(worker.calls(type)) == 1


async def test_an_answer_streamed_only_for_its_length_is_retried_too(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url) as worker, requester(vhost.amqp_url) as app:
        asked = await app.publish({"prompt": "long [[fault: cut x1]]", "max_tokens": 30_000})
        assert (await app.final(asked)).text.startswith("echo: long")
        assert app.parts(asked) == []
        assert len(worker.api.calls) == 2


async def test_a_slow_stream_without_long_pauses_is_not_interrupted(vhost: Vhost) -> None:
    """The lane's time limit applies to the first event and every pause, not to the whole stream."""
    async with serving(vhost.amqp_url, lanes=SHORT) as worker, requester(vhost.amqp_url) as app:
        body = {"prompt": "a long breath [[latency: 5s]]"}
        asked = await app.publish(body, key="normal.tests.slow", headers={"x-lane-stream": True})
        assert (await app.final(asked)).status == "ok"
        assert len(worker.api.calls) == 1


async def test_after_a_worker_lost_the_broker_in_the_middle_of_a_stream_the_requester_gets_a_restart(
    vhost: Vhost,
) -> None:
    async with (
        HeldProvider(parts=2) as provider,
        serving(vhost.amqp_url, base_url=provider.base_url) as worker,
        requester(vhost.amqp_url) as app,
    ):
        asked = await app.publish({"prompt": "to be continued"}, headers={"x-lane-stream": True})
        await until(lambda: len(app.parts(asked)) > 3)
        await (await worker.parts.broker.consuming.underlying()).close()
        await until(lambda: provider.calls == 2)
        provider.go_on()
        final = await app.final(asked)
        kinds = [part.headers["x-lane-part"] for part in app.parts(asked)]
        assert kinds.count("restart") == 1
        restart = kinds.index("restart")
        assert app.parts(asked)[restart].headers["x-lane-seq"] == 0
        assert final.json == put_together([part.json for part in app.parts(asked)[restart + 1 :]])
        assert len(app.finals(asked)) == 1
        assert provider.calls == 2
        await until(lambda: provider.running == 0)
