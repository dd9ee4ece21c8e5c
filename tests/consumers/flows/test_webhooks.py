"""Where webhooks may go, and what a post's message says."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from aiohttp import web

from consumers.addresses import Resolver
from consumers.flows.lines import AT_ONCE, PLACES, Line
from consumers.flows.posting import SPREAD, Posting
from consumers.flows.posts import PostAnswer
from consumers.flows.webhooks import Hooks, Post, PostFailed, WebhookSpec, is_host, redelivered
from consumers.outcomes import Refused
from consumers.settle import FAULTS_AT_MOST
from consumers.state.base import Completion, StoreSpec
from lanekeeper.contract import names as n
from lanekeeper.contract.problems import RequestProblem
from tests.support.endpoint import OTHER_SECRET, SECRET, endpoint
from tests.support.jobs import NAMES, NOW_MS, Bench, FakeDeliveries, FakeDelivery, FakeSession
from tests.support.memory_store import MemoryStore
from tests.support.waiting import until
from topology.delays import wait_ms

pytestmark = pytest.mark.usefixtures("returned_at_once")
ANY = Hooks(hosts=("*",))
SOME = WebhookSpec(
    hooks=Hooks(hosts=("hooks.example.com", "*.crm.example.com:8443", "[2606:4700::1111]")),
    tenants={"crm": Hooks(hosts=("crm.example.com",))},
)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/a?b=c",
        "https://HOOKS.example.com",
        "https://hooks.example.com:443/",
        "https://eu.crm.example.com:8443/x",
        "https://[2606:4700::1111]/x",
        "https://[2606:4700:0:0:0::1111]/x",
        "https://hooks.example.com./x",
        "https://eu.crm.example.com.:8443/x",
    ],
)
def test_an_allowed_host_is_allowed(url: str) -> None:
    assert SOME.refusal(url, tenant="") is None


def test_a_tenant_has_its_own_hosts_and_no_others() -> None:
    assert SOME.refusal("https://crm.example.com/", tenant="crm") is None
    assert "is not allowed" in (SOME.refusal("https://crm.example.com/", tenant="") or "")
    assert "is not allowed" in (SOME.refusal("https://hooks.example.com/", tenant="crm") or "")
    assert "[webhooks.tenants.NAME]" in (SOME.refusal("https://hooks.example.com/", tenant="shop") or "")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://hooks.example.com/", "allowed is https"),
        ("ftp://hooks.example.com/", "allowed is https"),
        ("https://hooks.example.com:8443/", "is not allowed"),
        ("https://other.example.com/", "is not allowed"),
        ("https://crm.example.com:8443/", "is not allowed"),
        ("https://evilcrm.example.com:8443/", "is not allowed"),
        ("https://eu.crm.example.com/", "is not allowed"),
        ("https://hooks.example.com.evil.org/", "is not allowed"),
        ("https://hooks.example.com@evil.org/", "no user"),
        ("https://user:word@hooks.example.com/", "no user"),
        ("https://evil.org/#@hooks.example.com/", "no fragment"),
        ("https://evil.org\\@hooks.example.com/", ""),
        ("https://hooks.example.com:99999/", ""),
        ("https:///x", "needs a host"),
        ("https://[::1", "no URL"),
        ("https://[]@", "no URL"),
    ],
)
def test_another_address_is_refused_with_the_reason(url: str, why: str) -> None:
    assert why in (SOME.refusal(url, tenant="") or "allowed!")
    assert SOME.refusal(url, tenant="") is not None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "017700000001", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0",
        "100.64.0.1", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]",
        "[fe80::1]", "[fd00::1]", "[2002:7f00:1::]", "[ff02::1]", "[64:ff9b:1::7f00:1]", "[::ffff:0:7f00:1]",
        "[fec0::1]", "168.63.129.16", "[::ffff:168.63.129.16]", "127.0.0.1.", "192.0.0.8", "[3fff::1]",
    ],
)  # fmt: skip
def test_a_private_address_is_refused_in_every_form(host: str) -> None:
    assert WebhookSpec(hooks=ANY).refusal(f"https://{host}/", tenant="") == "its host has a private address"
    assert WebhookSpec(hooks=ANY, private=True).refusal(f"https://{host}/", tenant="") is None


async def test_names_whose_servers_do_not_answer_delay_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Semaphore(0), threading.Event()

    def wait(*_: object, **__: object) -> None:
        asked.release()
        answered.wait()
        raise OSError("no answer from the name server")

    monkeypatch.setattr("socket.getaddrinfo", wait)
    resolver = Resolver()
    asking = [asyncio.create_task(resolver.resolve(f"{number}.example.com")) for number in range(PLACES // 4)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await asyncio.to_thread(asked.acquire)
    finally:
        answered.set()
        assert all(isinstance(each, OSError) for each in await asyncio.gather(*asking, return_exceptions=True))
    await resolver.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        await resolver.resolve("a.example.com")


async def test_a_request_whose_webhook_is_no_url_at_all_is_answered() -> None:
    bench = Bench(spec=SPEC)
    job = bench.job(headers={n.WEBHOOK: "https://[]@"})
    refused = bench.settler.webhooks.refusal(job)
    assert refused is not None
    assert await bench.settler.settle(job, Refused(refused)) is not None
    assert "ack" in bench.log


@pytest.mark.parametrize("entry", ["", "https://a.example", "a.example/x", "a*.example", "a.example:", "a b", "*.*"])
def test_what_is_no_host_in_the_settings(entry: str) -> None:
    assert not is_host(entry)


HOOKS = Hooks(hosts=("a.example",), secrets=("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",))
SPEC = WebhookSpec(hooks=HOOKS, tenants={"crm": Hooks(hosts=("a.example",), secrets=(OTHER_SECRET,))})
HOOKED = {n.WEBHOOK: "https://a.example/h"}


@pytest.mark.parametrize("code", ["idempotency_conflict", "forbidden_reply_to"])
async def test_what_is_no_outcome_of_the_id_is_not_posted(code: str) -> None:
    bench = Bench(spec=SPEC)
    job = bench.job(headers=HOOKED)
    await bench.settler.webhooks.publish(job, Completion(status="error", code=code, body=b"{}", ended_ms=NOW_MS))
    assert not bench.publisher.sent


def test_a_dead_letter_that_lacks_what_a_post_needs_is_refused() -> None:
    message = Post(
        url="https://a.example/h", id="m-1", status="ok", tenant="", routing_key="a.b", content_type="application/json"
    ).message(b"{}")
    message.headers = {name: value for name, value in message.headers.items() if name != n.STATUS}
    with pytest.raises(RequestProblem, match="not complete"):
        redelivered(message)


POST = Post(
    url="https://a.example/h", id="m-1", status="ok", tenant="", routing_key="a.b", content_type="application/json"
)


P = TypeVar("P", bound=Posting)


def posting_of(kind: type[P], bench: Bench) -> P:
    return kind(
        FakeDeliveries(FakeSession(bench.log, [])),
        spec=SPEC,
        settler=bench.settler,
        store=bench.store,
    )


class Faulty(Posting):
    """Has a fault."""

    async def _attempt(self, post: Post, delivery: object, place: object) -> None:
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.parametrize(("times", "steps"), [(1, ["reject"]), (FAULTS_AT_MOST, ["confirmed: lane.dead", "ack"])])
async def test_what_causes_a_fault_of_ours_again_and_again_becomes_a_dead_letter(times: int, steps: list[str]) -> None:
    bench = Bench(spec=SPEC)
    posting = posting_of(Faulty, bench)
    delivery = bench.delivery(body=b"{}", queue="lane.webhooks", exchange="lane.webhooks", headers=POST.headers())
    delivery.times_delivered = times
    await posting._take(delivery)
    assert bench.log == steps
    if times > 1:
        letter = bench.to("lane.dead")
        assert (letter.headers[n.DEAD_CODE], letter.message_id) == ("webhook_undelivered", "m-1")
        assert Post.of(redelivered(letter), now_ms=NOW_MS).id == "m-1"


class Answering(Posting):
    """Its endpoint gives these statuses, one after the other; 0: no answer."""

    statuses: list[int]
    headers: dict[str, str]

    async def _post(self, post: Post, body: bytes) -> PostAnswer:
        if not (status := self.statuses.pop(0)):
            raise PostFailed("no answer")
        return PostAnswer(status=status, headers=getattr(self, "headers", {}))


def delivered(bench: Bench, post: Post, **headers: Any) -> FakeDelivery:
    given = {**post.headers(), **headers}
    return bench.delivery(body=b"{}", queue="lane.webhooks", exchange="lane.webhooks", headers=given)


async def posted(bench: Bench, spec: WebhookSpec, post: Post, **headers: str) -> Posting:
    """What became of this post, really made."""
    given = {**post.headers(), **headers}
    delivery = bench.delivery(body=b'{"a":1}', queue="lane.webhooks", exchange="lane.webhooks", headers=given)
    deliveries = FakeDeliveries(FakeSession(bench.log, [delivery]))
    posting = Posting(
        deliveries,
        spec=spec,
        settler=bench.settler,
        store=bench.store,
    )
    running = asyncio.create_task(posting.run())
    await until(lambda: "ack" in bench.log)
    await deliveries.stop()
    await running
    return posting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "private", "state", "error"),
    [
        ("127.0.0.1", True, "retrying", "answered 302"),
        ("127.0.0.1", False, "undelivered", "its host has a private address"),
        ("localhost", False, "undelivered", "its host has a private address"),
        ("localhost.", False, "undelivered", "its host has a private address"),
        ("elsewhere.example", True, "retrying", "its host is not allowed"),
    ],
)
async def test_no_redirect_is_followed_and_a_private_address_is_never_called(
    host: str, private: bool, state: str, error: str
) -> None:
    bench = Bench()
    async with endpoint() as hook:
        hook.answer = lambda posted: web.Response(status=302, headers={"location": hook.url("/other")})
        hosts = (f"127.0.0.1:{hook.port}", f"localhost:{hook.port}")
        spec = WebhookSpec(hooks=Hooks(hosts=hosts, secrets=(SECRET,)), private=private, http=True)
        posting = await posted(bench, spec, replace(POST, url=hook.url(host=host)))
    assert posting.posted == {state: 1}
    assert [each.path for each in hook.posts] == (["/hook"] if "302" in error else [])
    event = next(found for each in bench.notices.bodies if (found := json.loads(each))["event"] == "webhook")
    assert error in event["error"]
    assert event["status"] == (302 if "302" in error else None)


async def test_a_post_that_the_broker_does_not_take_for_another_try_is_a_dead_letter() -> None:
    bench = Bench()
    bench.publisher.too_large = {b'{"a":1}'}
    spec = WebhookSpec(hooks=Hooks(hosts=("elsewhere.example",), secrets=(SECRET,)))
    posting = await posted(bench, spec, replace(POST, url="https://another.example/"))
    assert posting.posted == {"undelivered": 1}
    letter = bench.to("lane.dead")
    assert (letter.headers[n.DEAD_CODE], letter.body) == ("webhook_undelivered", b"")
    assert "the broker takes 1" in letter.headers[n.DEAD_DETAIL]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "retry_after", "least_s"),
    [
        (429, "120", 120),
        (503, "Mon, 21 Sep 2026 14:23:20 GMT", 600),
        (503, "0", 5),
        (503, "soon", 5),
        (429, "9" * 400, 5),
    ],
)
async def test_the_pause_is_as_long_as_the_receiver_asks(status: int, retry_after: str, least_s: float) -> None:
    bench = Bench(spec=SPEC)
    posting = posting_of(Answering, bench)
    posting.statuses, posting.headers = [status], {"retry-after": retry_after}
    await posting._take(delivered(bench, replace(POST, first_ms=NOW_MS, due_ms=NOW_MS)))
    (again,) = (Post.of(each.message, now_ms=NOW_MS) for each in bench.publisher.sent)
    assert least_s <= (again.due_ms - NOW_MS) / 1000 <= least_s * (1 + SPREAD)
    if least_s > 5:  # nor is anything else posted there meanwhile
        await posting._take(delivered(bench, replace(POST, id="m-2")))
        assert posting.posted == {"retrying": 1}
        assert Post.of(bench.publisher.sent[1].message, now_ms=NOW_MS).attempts == 0


GIVE_UP_MS = round(1000 * SPEC.give_up_s)


async def test_what_goes_back_to_the_broker_until_its_turn_makes_no_attempt() -> None:
    bench = Bench(spec=SPEC)
    posting = posting_of(Answering, bench)
    posting.lines._not_before_s[Line("", POST.endpoint)] = posting.lines.clock() + 60
    post = replace(POST, first_ms=NOW_MS - 2000, due_ms=NOW_MS - 2000, attempts=2)
    await posting._take(delivered(bench, post))
    (sent,) = bench.publisher.sent
    assert Post.of(sent.message, now_ms=NOW_MS) == post, "no attempt was made"
    bits = (level for level in range(30) if sent.message.headers.get(NAMES.delay_bit(level)))
    assert 55_000 <= sum(map(wait_ms, bits)) <= 62_000
    await posting._take(delivered(bench, replace(post, first_ms=NOW_MS - GIVE_UP_MS)))
    assert "other posts to answer" in bench.to("lane.dead").headers[n.DEAD_DETAIL], "it does not go round for ever"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        (StoreSpec(waiting_per_tenant=2), "LANEKEEPER_WAITING__PER_TENANT"),
        (StoreSpec(waiting_in_all=3), "LANEKEEPER_WAITING__IN_ALL"),
    ],
)
async def test_posts_that_wait_are_limited_by_tenant_and_in_all_and_more_are_dead_letters(
    spec: StoreSpec, limit: str
) -> None:
    bench = Bench(spec=SPEC)
    posting = posting_of(Answering, bench)
    posting.store = store = MemoryStore(bench.log, spec=spec)
    store.now_ms = 0
    posting.statuses = [500] * 4
    tenants = ("crm", "crm", "crm", "") if spec.waiting_per_tenant == 2 else ("crm", "", "crm", "")
    for number, tenant in enumerate(tenants):
        delivery = delivered(bench, replace(POST, id=f"m-{number}", tenant=tenant))
        delivery.message.message_id = f"copy-{number}"
        await posting._take(delivery)
    assert posting.posted == {"retrying": 3, "undelivered": 1}
    letter = bench.to("lane.dead")
    assert letter.message_id == ("m-2" if spec.waiting_per_tenant == 2 else "m-3")
    assert letter.headers[n.DEAD_CODE] == "webhook_undelivered"
    assert limit in letter.headers[n.DEAD_DETAIL]
    assert bench.log[-1] == "ack"


async def test_what_waits_in_memory_returns_to_the_queue_when_the_worker_stops() -> None:
    class Held(Posting):
        async def _post(self, post: Post, body: bytes) -> PostAnswer:
            await go_on.wait()
            return PostAnswer(status=200, headers={})

    bench, go_on = Bench(spec=SPEC), asyncio.Event()
    posting = posting_of(Held, bench)
    taking = [asyncio.create_task(posting._take(delivered(bench, replace(POST, id=f"m-{each}")))) for each in range(6)]
    await until(lambda: posting.running == AT_ONCE)
    posting.lines.close()
    await until(lambda: bench.log.count("nack") == 2)
    go_on.set()
    await asyncio.gather(*taking)
    assert bench.log.count("ack") == AT_ONCE
    assert not posting.running


async def test_an_outcome_that_the_broker_takes_no_longer_is_posted_as_an_error() -> None:
    bench = Bench(spec=SPEC)
    bench.publisher.too_large = {b'"large"'}
    ok = Completion(status="ok", body=b'"large"', ended_ms=NOW_MS)
    await bench.settler.webhooks.publish(bench.job(headers=HOOKED), ok)
    message = bench.to("lane.webhooks")
    assert message.headers[n.STATUS] == "error"
    assert message.content_type == "application/problem+json"
    assert b"answer_too_large" in message.body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "body", "why"),
    [
        (n.REDELIVER_KEY, {}, "body: allowed is"),
        (n.WEBHOOKS_KEY, {n.WEBHOOKS_KEY: 5}, "body: allowed is"),
        (n.WEBHOOKS_KEY, {n.WEBHOOKS_KEY: "m-1", "tenant": 5}, "body: allowed is"),
        (n.WEBHOOKS_KEY, {n.WEBHOOKS_KEY: "m-2"}, "no webhook of request 'm-2'"),
        (n.REDELIVER_KEY, {n.REDELIVER_KEY: "m-1"}, "is kept no longer"),
    ],
)
async def test_a_command_that_cannot_be_carried_out_says_why(command: str, body: dict[str, object], why: str) -> None:
    bench = Bench(spec=SPEC)
    posting = posting_of(Answering, bench)
    posting.statuses = [200]
    await posting._take(delivered(bench, POST))
    with pytest.raises(RequestProblem, match=why):
        await bench.settler.webhooks.carry_out(command, body)
    assert not bench.publisher.sent
