"""An operator's mistake (a wrong key, an unpaid account, a wrong base URL) costs no request: requests go to the next
provider, or wait with their attempts unchanged until the mistake is mended, or their time is over."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from service.gateway.server import Server
from service.simulated.app import SimulatedAPI, SimulatedOptions
from tests.journeys.test_gateway import body, post
from tests.journeys.test_providers import chain, status
from tests.support.brokers import Vhost
from tests.support.corpus.answers import Answering, Asked, redirect
from tests.support.gate import gate
from tests.support.malicious_provider import MaliciousProvider, well
from tests.support.meeting import meeting
from tests.support.requester import requester
from tests.support.serving import RunningWorker, serving
from tests.support.waiting import until

OTHER_KEY = SimulatedOptions(api_key="sk-ant-another")
PAGE = b"<html>sign in to the proxy</html>"


@pytest.fixture
async def spare() -> AsyncIterator[SimulatedAPI]:
    async with SimulatedAPI() as started:
        yield started


async def health(worker: RunningWorker) -> dict[str, tuple[int, Any]]:
    parts = worker.parts
    server = Server(parts.reasons, host="127.0.0.1", port=0, limitations=parts.limitations)
    found = {}
    async with server, aiohttp.ClientSession() as session:
        for path in ("/readyz", "/healthz"):
            async with session.get(server.url + path) as got:
                found[path] = got.status, await got.json()
    return found


@pytest.mark.parametrize("fault", ["a wrong key", "billing", "usage_limit", "permission", "html"])
async def test_requests_wait_with_their_attempts_unchanged_and_are_answered_when_the_mistake_is_mended(
    vhost: Vhost, fault: str
) -> None:
    broken = OTHER_KEY if fault == "a wrong key" else SimulatedOptions(faults={fault: 1.0})
    with capture_logs() as logs:
        async with serving(vhost.amqp_url, simulated=broken) as worker, requester(vhost.amqp_url) as app:
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


async def test_while_a_key_is_refused_few_calls_are_made(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, simulated=OTHER_KEY) as worker, requester(vhost.amqp_url) as app:
        asked = [await app.publish({"prompt": f"job {n}"}, key="batch.crm.enrich") for n in range(50)]
        for _ in range(10):
            chat = await app.ask({"prompt": "hello"}, headers={"x-lane-deadline-ms": 1500})
            assert (chat.code, chat.json["status"], chat.json["attempts"]) == ("provider_unavailable", 503, 0)
            assert "anthropic: it refuses the service's key" in chat.json["detail"]
        assert len(worker.api.calls) <= 40, "as many as there are slots, at most"
        worker.api.configure(SimulatedOptions())
        for each in asked:
            assert (await app.final(each)).status == "ok"


async def test_the_next_provider_takes_over_at_once(vhost: Vhost, spare: SimulatedAPI) -> None:
    async with meeting(vhost.amqp_url, simulated=OTHER_KEY, **chain(spare)) as (worker, app, _):
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
    async with serving(vhost.amqp_url, simulated=OTHER_KEY) as worker, gate(worker.settings) as url:
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
        serving(vhost.amqp_url, base_url=provider.base_url) as worker,
        requester(vhost.amqp_url) as app,
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
    return sum(account.concurrency.running for _, account, _ in known)


@pytest.mark.parametrize("url", ["https://{address}", "http://no-such-host.invalid"])
async def test_where_tls_or_dns_fails_the_request_is_told_so_without_an_address(vhost: Vhost, url: str) -> None:
    async with SimulatedAPI() as api:
        base_url = url.format(address=api.base_url.removeprefix("http://")) + "/s3cret"
        async with serving(vhost.amqp_url, base_url=base_url), requester(vhost.amqp_url) as app:
            reply = await app.ask({"prompt": "x"}, headers={"x-lane-deadline-ms": 1500})
    assert (reply.code, reply.json["attempts"]) == ("provider_unavailable", 0)
    assert b"s3cret" not in reply.body
    assert b"127.0.0.1" not in reply.body
