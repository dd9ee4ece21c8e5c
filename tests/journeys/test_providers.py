"""Several providers, fallback models and caps: if one provider fails another answers, and no cap is exceeded."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from consumers.state.base import DAY_S
from service.simulated.app import SimulatedAPI, SimulatedOptions
from service.status import Status, look
from tests.support.brokers import Vhost
from tests.support.meeting import meeting
from tests.support.requester import requester
from tests.support.serving import PLENTY, RunningWorker, serving
from tests.support.waiting import until

DOWN = SimulatedOptions(faults={"unavailable": 1.0})


@pytest.fixture
async def spare() -> AsyncIterator[SimulatedAPI]:
    async with SimulatedAPI() as started:
        yield started


def chain(spare: SimulatedAPI, **more: Any) -> dict[str, Any]:
    """A second provider, called when the first cannot answer."""
    return {"providers": {"spare": {"api_key": "sk-ant-spare", "base_url": spare.base_url, **more}}}


async def status(worker: RunningWorker) -> Status:
    """Once the worker has answered: `look` does not wait for one that is slow."""
    parts = worker.parts

    async def told() -> Status | None:
        found = await look(parts.broker.publishing, lanes=parts.lanes, names=parts.broker.names)
        return found if found.workers else None

    found: Status = await until(told)
    return found


async def test_while_the_first_provider_is_down_the_second_answers_and_afterwards_the_first_is_called_again(
    vhost: Vhost, spare: SimulatedAPI
) -> None:
    with capture_logs() as logs:
        async with serving(vhost.amqp_url, **chain(spare)) as worker, requester(vhost.amqp_url) as app:
            assert (await app.ask({"prompt": "before"})).headers["x-lane-provider"] == "anthropic"
            worker.api.configure(DOWN)
            # Until the second provider has reported its limits, its budget is a guess of a few calls at once, and a
            # request that finds none left is retried instead. So it reports them before the others come.
            await app.ask({"prompt": "the second provider's first"})
            asked = [await app.publish({"prompt": f"meanwhile {n}"}) for n in range(60)]
            for each in asked:
                reply = await app.final(each)
                assert (reply.status, reply.headers["x-lane-provider"]) == ("ok", "spare")
                assert reply.headers["x-lane-attempt"] == 1, "within the attempt"
            calls = len(worker.api.calls) + len(spare.calls)
            assert calls <= 1.5 * 62 + 15, "until the breaker opened, each was asked twice"

            worker.api.configure(SimulatedOptions())

            async def is_back() -> bool:
                reply = await app.ask({"prompt": "back?"})
                return bool(reply.headers["x-lane-provider"] == "anthropic")

            await until(is_back)
    states = [each["state"] for each in logs if each["event"] == "breaker.changed" and each["provider"] == "anthropic"]
    assert states[0] == "open"
    assert states[-1] == "closed"
    assert "probing" in states


async def test_while_all_providers_are_down_requests_are_deferred_and_afterwards_all_are_answered(
    vhost: Vhost,
) -> None:
    async with meeting(vhost.amqp_url, lanes={"critical": {"max_attempts": 20}}) as (worker, app, _):
        await app.read_events()
        worker.api.configure(DOWN)
        asked = [await app.publish({"prompt": f"patient {n}"}) for n in range(40)]

        async def is_shown() -> bool:
            return any("anthropic claude-sonnet-5-5: open" in line for line in (await status(worker)).breakers)

        await until(is_shown)
        # the breaker of another lane's model is separate
        worker.api.configure(SimulatedOptions(faults={"unavailable": 0.0}))
        assert (await app.ask({"prompt": "batch goes on"}, key="batch.tests.x")).status == "ok"
        for each in asked:
            assert (await app.final(each, within_s=60)).status == "ok"
        assert not (await status(worker)).breakers
        print(f"{len(worker.calls('patient'))} calls for 40 requests")
        assert len(worker.calls("patient")) <= 40 * 2.5, "not asked again and again while it was down"


async def test_a_stream_that_breaks_is_started_again_by_another_provider_after_a_restart(
    vhost: Vhost, spare: SimulatedAPI
) -> None:
    async with serving(vhost.amqp_url, **chain(spare)) as worker, requester(vhost.amqp_url) as app:
        worker.api.configure(SimulatedOptions(faults={"cut": 1.0}))
        asked = await app.publish({"prompt": "one two three four five"}, headers={"x-lane-stream": True})
        reply = await app.final(asked)
        assert (reply.status, reply.headers["x-lane-provider"]) == ("ok", "spare")
        parts = app.parts(asked)
        at = [each.headers["x-lane-part"] for each in parts].index("restart")
        assert at > 0, "it had begun"
        assert parts[at + 1].json["type"] == "message_start"
        assert not [each for each in parts[at + 1 :] if each.headers["x-lane-part"] == "restart"]


@pytest.mark.all_delay_levels
async def test_a_request_above_its_tenants_cap_is_refused_with_the_figures_or_waits_for_the_next_day(
    vhost: Vhost,
) -> None:
    caps = {"tenants": {"*": {"requests": 3}}}
    await until(lambda: DAY_S - time.time() % DAY_S > 60, within_s=70)  # the next day, in UTC, begins after the test
    with capture_logs() as logs:
        async with serving(vhost.amqp_url, caps=caps, budget=PLENTY) as worker, requester(vhost.amqp_url) as app:
            await app.read_events()
            for n in range(3):
                assert (await app.ask({"prompt": f"within {n}"})).status == "ok"
            over = await app.ask({"prompt": "over"}, headers={"x-lane-deadline-ms": 20_000})
            assert over.code == "deadline_exceeded"
            assert "has used 3 requests of 3 requests today (UTC)" in over.json["detail"]
            await app.publish({"prompt": "tomorrow"}, key="batch.tests.x", message_id="tomorrow-1")
            await until(lambda: "deferred" in app.events_of("tomorrow-1") or worker.calls("tomorrow"))
            (told,) = [each.json for each in app.events if each.json["id"] == "tomorrow-1"]
            assert told["reason"] == "tenant"
            assert not worker.calls("over")
            assert not worker.calls("tomorrow")
            assert (await status(worker)).spent["lane"]["critical"]["requests"] == 3
    assert [each["percent"] for each in logs if each["event"] == "cap.reached"] == [50, 80, 100]
