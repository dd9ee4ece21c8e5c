"""Several providers, fallback models and caps: if one provider fails another answers, and no cap is exceeded. An
operator's mistake (a wrong key, an unpaid account, a wrong base URL) costs no request: requests go to the next
provider, or wait with their attempts unchanged until the mistake is mended, or their time is over."""

import asyncio
import json
import platform
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from structlog.testing import capture_logs

from consumers.state.base import DAY_S
from service.gateway.server import Server
from service.simulated.app import SimulatedOptions
from service.status import Status, collect_status
from service.worker.figures import sources
from tests.journeys.test_gateway import body, post
from tests.support.brokers import Vhost
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import gate
from tests.support.malicious import Answering, Asked, MaliciousProvider, redirect, well
from tests.support.processes import environment, run
from tests.support.requester import requester
from tests.support.serving import PLENTY, RunningWorker, meeting, serving
from tests.support.waiting import until

DOWN = SimulatedOptions(faults={"unavailable": 1.0})


@pytest.fixture
async def spare() -> AsyncIterator[FaultyAPI]:
    async with FaultyAPI() as started:
        yield started


def chain(spare: FaultyAPI, **more: Any) -> dict[str, Any]:
    """A second provider, called when the first cannot answer."""
    return {"providers": {"spare": {"api_key": "sk-ant-spare", "base_url": spare.base_url, **more}}}


async def status(worker: RunningWorker) -> Status:
    """Once the worker has answered: `collect_status` does not wait for one that is slow."""
    parts = worker.parts

    async def told() -> Status | None:
        found = await collect_status(parts.broker.publishing, lanes=parts.lanes, names=parts.broker.names)
        return found if found.workers else None

    found: Status = await until(told)
    return found


async def test_while_the_first_provider_is_down_the_second_answers_and_afterwards_the_first_is_called_again(
    vhost: Vhost, spare: FaultyAPI
) -> None:
    with capture_logs() as logs:
        async with serving(vhost, **chain(spare)) as worker, requester(vhost) as app:
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
    async with meeting(vhost, lanes={"critical": {"max_attempts": 20}}) as (worker, app, _):
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
    vhost: Vhost, spare: FaultyAPI
) -> None:
    async with serving(vhost, **chain(spare)) as worker, requester(vhost) as app:
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
        async with serving(vhost, caps=caps, budget=PLENTY) as worker, requester(vhost) as app:
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


OTHER_KEY = SimulatedOptions(api_key="sk-ant-another")
PAGE = b"<html>sign in to the proxy</html>"


async def health(worker: RunningWorker) -> dict[str, tuple[int, Any]]:
    parts = worker.parts
    server = Server(parts.reasons, host="127.0.0.1", port=0, limitations=parts.limitations)
    found = {}
    async with server, aiohttp.ClientSession() as session:
        for path in ("/readyz", "/healthz"):
            async with session.get(server.url + path) as got:
                found[path] = got.status, await got.json()
    return found


@pytest.mark.parametrize("fault", ["a wrong key", "on_hold", "billing", "usage_limit", "permission", "html"])
async def test_requests_wait_with_their_attempts_unchanged_and_are_answered_when_the_mistake_is_mended(
    vhost: Vhost, fault: str
) -> None:
    broken = OTHER_KEY if fault == "a wrong key" else SimulatedOptions(faults={fault: 1.0})
    with capture_logs() as logs:
        async with serving(vhost, simulated=broken) as worker, requester(vhost) as app:
            await app.read_dead()
            await app.read_events()
            asked = [await app.publish({"prompt": f"job {n}"}, key="batch.crm.enrich") for n in range(100)]
            await until(lambda: worker.parts.budgeting.breakers.pauses.reasons())

            assert (await health(worker))["/healthz"][0] == 200, "it must not be restarted for that"
            code, told = (await health(worker))["/readyz"]
            assert (code, told["ready"]) == (503, False)
            assert told["reasons"]["provider anthropic"]
            assert (await status(worker)).paused[0].startswith("anthropic: paused for ")
            await until(lambda: [each for each in app.events if each.json["event"] == "paused"])

            worker.api.configure(SimulatedOptions())
            for each in asked:
                reply = await app.final(each)
                assert (reply.status, reply.headers["x-lane-attempt"]) == ("ok", 1)
            assert app.dead == []
            assert (await health(worker))["/readyz"] == (200, {"ready": True, "reasons": {}})
    errors = [each["event"] for each in logs if each["log_level"] == "error"]
    assert set(errors) == {"provider.paused"}
    assert len(errors) <= 2


@pytest.mark.timing
async def test_requests_with_ten_seconds_are_answered_by_a_key_that_is_mended_after_three(vhost: Vhost) -> None:
    async with serving(vhost, simulated=OTHER_KEY) as worker, requester(vhost) as app:
        asked = [await app.publish({"prompt": f"p {n}"}, headers={"x-lane-deadline-ms": 10_000}) for n in range(20)]
        await asyncio.sleep(3)
        assert worker.parts.budgeting.breakers.pauses.reasons()
        worker.api.configure(SimulatedOptions())
        for each in asked:
            assert (await app.final(each)).status == "ok"


async def test_while_a_key_is_refused_few_calls_are_made(vhost: Vhost) -> None:
    async with serving(vhost, simulated=OTHER_KEY) as worker, requester(vhost) as app:
        asked = [await app.publish({"prompt": f"job {n}"}, key="batch.crm.enrich") for n in range(50)]
        for _ in range(10):
            chat = await app.ask({"prompt": "hello"}, headers={"x-lane-deadline-ms": 1500})
            assert (chat.code, chat.json["status"], chat.json["attempts"]) == ("provider_unavailable", 503, 0)
            assert "anthropic: it refuses the service's key" in chat.json["detail"]
        assert len(worker.api.calls) <= 40, "as many as there are slots, at most"
        worker.api.configure(SimulatedOptions())
        for each in asked:
            assert (await app.final(each)).status == "ok"


async def test_the_next_provider_takes_over_at_once(vhost: Vhost, spare: FaultyAPI) -> None:
    async with meeting(vhost, simulated=OTHER_KEY, **chain(spare)) as (worker, app, _):
        for n in range(20):
            reply = await app.ask({"prompt": f"job {n}"})
            assert (reply.status, reply.headers["x-lane-provider"]) == ("ok", "spare")
            assert reply.headers["x-lane-attempt"] == 1
        assert len(worker.calls("job")) == 0
        code, told = (await health(worker))["/readyz"]
        assert (code, told["ready"], list(told["reasons"])) == (200, True, ["provider anthropic"])
        worker.api.configure(SimulatedOptions())
        await until(lambda: not worker.parts.budgeting.breakers.pauses.reasons())
        assert (await app.ask({"prompt": "mended"})).headers["x-lane-provider"] == "anthropic"


async def test_over_http_the_services_refused_key_is_a_503_and_not_the_callers_401(vhost: Vhost) -> None:
    async with serving(vhost, simulated=OTHER_KEY) as worker, gate(worker) as url:
        code, headers, said = await post(url, body(), x_lane_deadline_ms="2000")
        assert code == 503
        assert "refuses the service's key" in said["error"]["message"]
        assert headers["x-should-retry"] == "false"


def _page(status: bytes) -> Answering:
    def answer(asked: Asked) -> list[bytes]:
        head = b"HTTP/1.1 %b\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n" % (status, len(PAGE))
        return [head + PAGE]

    return answer


def _not_found(asked: Asked) -> list[bytes]:
    return [
        b'HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n{"detail":"Not Found"}'
    ]


WRONG: dict[str, Answering] = {
    "a path without an API": _not_found,
    "a proxy's page": _page(b"200 OK"),
    "a proxy's page of an error": _page(b"502 Bad Gateway"),
    "a redirect": redirect("/elsewhere", status=301),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_base_url_costs_no_request(vhost: Vhost, what: str) -> None:
    is_mended = False

    def answer(asked: Asked) -> Any:
        return well(asked) if is_mended else WRONG[what](asked)

    async with (
        MaliciousProvider(answer) as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        requester(vhost) as app,
    ):
        asked = [await app.publish({"prompt": "x"}, headers={"x-lane-stream": n % 2 == 1}) for n in range(4)]
        await until(lambda: worker.parts.budgeting.breakers.pauses.reasons() and not calls_under_way(worker))
        is_mended = True
        for each in asked:
            reply = await app.final(each)
            assert (reply.status, reply.headers["x-lane-attempt"]) == ("ok", 1)


def calls_under_way(worker: RunningWorker) -> int:
    """An answer of before the mistake was mended that is read afterwards would count as an attempt."""
    known = worker.parts.budgeting.budgets.known()
    return sum(account.calls.running for _, account, _ in known)


@pytest.mark.parametrize("url", ["https://{address}", "http://no-such-host.invalid"])
async def test_where_tls_or_dns_fails_the_request_is_told_so_without_an_address(vhost: Vhost, url: str) -> None:
    async with FaultyAPI() as api:
        base_url = url.format(address=api.base_url.removeprefix("http://")) + "/s3cret"
        async with serving(vhost, base_url=base_url), requester(vhost) as app:
            reply = await app.ask({"prompt": "x"}, headers={"x-lane-deadline-ms": 1500})
    assert (reply.code, reply.json["attempts"]) == ("provider_unavailable", 0)
    assert b"s3cret" not in reply.body
    assert b"127.0.0.1" not in reply.body


async def test_a_refusal_is_an_answer_that_is_told_and_counted(vhost: Vhost) -> None:
    async with serving(vhost) as worker, gate(worker) as url, requester(vhost) as app:
        await app.read_events()
        reply = await app.ask({"prompt": "[[fault: refusal category=bio]]"})
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/v1/messages", json=body("[[fault: refusal]]")) as over_http,
        ):
            assert (over_http.status, over_http.headers["x-lane-stop-reason"]) == (200, "refusal")
            assert (await over_http.json())["stop_details"]["category"] == "cyber"
        await until(lambda: sum(event.json["event"] == "completed" for event in app.events) == 2)

        assert (reply.status, reply.headers["x-lane-stop-reason"], reply.json["content"]) == ("ok", "refusal", [])
        refusals = [event.json for event in app.events if event.json["event"] == "refusal"]
        assert [(each["provider"], each["category"]) for each in refusals] == [
            ("anthropic", "bio"),
            ("anthropic", "cyber"),
        ]
        assert {event.json.get("stop_reason") for event in app.events if event.json["event"] == "completed"} == {
            "refusal"
        }
        samples = [each for source in sources(worker.parts, tenants=(), store_url="") for each in source()]
        counted = {labels["category"]: value for name, labels, value in samples if name == "lanekeeper.refusals"}
        assert counted == {"bio": 1, "cyber": 1}


async def test_a_refused_call_goes_to_the_models_fallback_once_and_both_are_in_the_ledger(vhost: Vhost) -> None:
    model, fallback = "claude-sonnet-5-5", "claude-haiku-5-5"
    models = {"fallbacks": {model: fallback}, "fallback_on_refusal": True}
    async with (
        serving(vhost, models=models, caps={"lanes": {"normal": {"usd": 100.0}}}) as worker,
        gate(worker) as url,
        requester(vhost) as app,
        AsyncAnthropic(api_key="any", base_url=url, max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": model, "max_tokens": 50}
        messages: Any = [{"role": "user", "content": "[[fault: refusal x1]] whole"}]
        reply = await app.ask({**asked, "messages": messages}, key="normal.tests.x")
        assert (reply.headers["x-lane-model"], reply.headers["x-lane-stop-reason"]) == (fallback, "end_turn")
        messages = [{"role": "user", "content": "[[fault: refusal x1]] streamed"}]
        async with client.messages.stream(
            **asked, messages=messages, extra_headers={"x-lane-name": "normal"}
        ) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.model, streamed.stop_reason) == (fallback, "end_turn")

        assert [each.model for each in worker.api.calls] == 2 * [model, fallback]
        budgeting = worker.parts.budgeting
        paid_usd = pytest.approx(sum(each.usd for each in budgeting.registry.calls.values()))
        assert budgeting.spending.totals()["lane"]["normal"].usd == paid_usd
        await until(lambda: list(budgeting.spending.used().values()) == [paid_usd])


async def test_an_operators_probe_is_heard_by_every_worker(
    vhost: Vhost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = (f"host-{n}" for n in count())
    monkeypatch.setattr(platform, "node", lambda: next(hosts))
    async with (
        serving(vhost, simulated=OTHER_KEY) as one,
        serving(vhost, simulated=OTHER_KEY) as two,
        gate(one) as url,
        requester(vhost) as app,
        aiohttp.ClientSession() as http,
    ):
        workers = (one, two)

        async def probed() -> tuple[str, list[str]]:
            async with http.post(f"{url}/v1/providers/anthropic/probe") as got:
                found = await got.json()
                return found["state"], sorted(each["state"] for each in found["workers"].values())

        async def both_are_paused() -> bool:
            await app.ask({"prompt": "hello"}, headers={"x-lane-deadline-ms": 500})
            return all(each.parts.budgeting.breakers.pauses.reasons() for each in workers)

        await until(both_are_paused)
        one.api.configure(SimulatedOptions())
        state, states = await probed()
        assert state == "paused"
        assert states in (["paused", "resumed"], ["called", "paused"]), "it probes itself, too, perhaps just before"
        two.api.configure(SimulatedOptions())
        line = ("providers", "probe", "anthropic", "--json")
        ended, lines = await run(*line, environ=environment(vhost), folder=tmp_path)
        assert ended == 0
        told = json.loads("\n".join(lines))
        assert (told["state"] in ("resumed", "called"), len(told["workers"])) == (True, 2), "it was probed meanwhile"
        assert await probed() == ("called", ["called", "called"])
        assert not any(each.parts.budgeting.breakers.pauses.reasons() for each in workers)
        async with http.post(f"{url}/v1/providers/nobody/probe") as got:
            assert (got.status, "nobody" in await got.text()) == (404, True)


async def test_only_operators_may_probe(vhost: Vhost) -> None:
    async with (
        serving(vhost, control={"operators": ("ops",)}) as worker,
        gate(worker) as url,
        requester(vhost) as app,
        aiohttp.ClientSession() as http,
    ):
        assert (await app.control({"probe": "anthropic"}, key="probe")).code == "forbidden_control"
        async with http.post(f"{url}/v1/providers/anthropic/probe") as got:
            assert (got.status, got.headers["x-should-retry"]) == (503, "false")
            assert "LANEKEEPER_CONTROL__OPERATORS" in (await got.json())["detail"]
        assert not worker.api.calls


async def test_after_a_rate_limit_with_a_long_retry_after_what_is_refused_says_when_to_come_back(vhost: Vhost) -> None:
    limited = SimulatedOptions(faults={"rate_limited retry_after=600": 1.0})
    async with serving(vhost, simulated=limited) as worker, gate(worker) as url, requester(vhost) as app:
        await app.ask({"prompt": "the first"})
        calls = len(worker.api.calls)

        reply = await app.ask({"prompt": "the next"}, headers={"x-lane-deadline-ms": 5000})

        assert (reply.code, reply.json["attempts"]) == ("deadline_exceeded", 0)
        assert 590_000 < reply.json["retry_after_ms"] <= 600_000
        async with (
            aiohttp.ClientSession(headers={"x-lane-deadline-ms": "5000"}) as http,
            http.post(f"{url}/v1/messages", json=body("over HTTP")) as got,
        ):
            assert (got.status, got.headers["x-should-retry"]) == (504, "false")
            assert 590 < int(got.headers["retry-after"]) <= 600
        assert len(worker.api.calls) == calls
