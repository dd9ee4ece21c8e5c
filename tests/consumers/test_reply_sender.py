"""Direct reply-to before RabbitMQ 4.3.5: an address is first tried on its own connection, then on the shared one."""

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from typing_extensions import override

from consumers.outcomes import Answered, DeadLettered, Outcome, Refused
from consumers.replies import PAUSES_S, ReplyRetries, ReplyRule, ReplySender
from lanekeeper.amqp.publisher import Confirm, Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PROBLEMS, BrokerUnreachable, ConfirmUnknown, PublishRefused, RequestProblem
from tests.support.completions import failed
from tests.support.jobs import BODY, NOW_MS, Bench, FakePublisher
from tests.support.virtual_time import virtually

ADDRESS = "amq.rabbitmq.reply-to.somebody"
ANSWER = Message(body=b"{}", exchange="", routing_key=ADDRESS)


@dataclass
class Line(Publisher):
    """A publisher and its connection. While `dies_by` is set, a publish closes the connection with that reason."""

    sent: list[str] = field(default_factory=list)
    dies_by: str | None = None
    is_silent: bool = False
    """It neither confirms what is published nor says why."""
    mandatory: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.connection: Any = self

    async def underlying(self) -> None:
        if self.loss.done():
            self.loss = asyncio.get_running_loop().create_future()

    @override
    async def publish(self, message: Message, *, routing_key: str, mandatory: bool = True, **_: Any) -> None:
        self.mandatory.append(mandatory)
        if self.is_silent:
            raise ConfirmUnknown("no confirm")
        if self.dies_by is not None:
            self.loss.set_result(self.dies_by)
            raise ConfirmUnknown("connection lost")
        self.sent.append(routing_key)

    @override
    async def write(
        self, message: Message, *, exchange: str, routing_key: str, timeout_s: float = 10
    ) -> asyncio.Future[Confirm]:
        if self.is_silent:
            raise ConfirmUnknown("no confirm")
        answer: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
        if self.dies_by is None:
            self.sent.append(routing_key)
            answer.set_result(None)
        else:  # the connection is lost before the confirm
            answer.set_exception(ConnectionError(self.dies_by))
        return answer


def sender() -> tuple[ReplySender, Line, Line]:
    shared, own = Line(), Line()
    return ReplySender(shared, own=own), shared, own


async def test_an_address_that_accepted_a_message_is_answered_over_the_shared_connection() -> None:
    direct, shared, own = sender()
    for _ in range(3):
        await direct.send_surely(ANSWER, ADDRESS)
    await direct.send_surely(ANSWER, f"{ADDRESS}-else")
    assert own.sent == [ADDRESS, f"{ADDRESS}-else"]
    assert shared.sent == [ADDRESS, ADDRESS]


async def test_a_forged_address_is_never_answered_over_the_shared_connection() -> None:
    direct, shared, own = sender()
    own.dies_by = "INTERNAL_ERROR"
    with pytest.raises(RequestProblem, match="the broker did not make"):
        await direct.send_surely(ANSWER, ADDRESS)
    own.dies_by = None
    with pytest.raises(RequestProblem):
        await direct.send(ANSWER, ADDRESS)
    assert direct.refusal(ADDRESS) is not None
    assert not own.sent + shared.sent


async def test_after_the_shared_connection_was_lost_the_address_is_tried_separately_again() -> None:
    """Meanwhile it may have become deadly, because the cluster removed its node."""
    direct, shared, own = sender()
    await direct.send_surely(ANSWER, ADDRESS)
    shared.dies_by = own.dies_by = "INTERNAL_ERROR"
    with pytest.raises(RequestProblem):
        await direct.send_surely(ANSWER, ADDRESS)
    assert shared.loss.done()
    assert direct.refusal(ADDRESS) is not None


async def test_a_lost_connection_loses_no_reply() -> None:
    direct, shared, own = sender()
    await direct.send_surely(ANSWER, ADDRESS)
    shared.dies_by = "connection reset"
    await direct.send_surely(ANSWER, ADDRESS)
    assert own.sent == [ADDRESS, ADDRESS]


async def test_of_several_messages_to_a_new_address_only_the_first_is_tried_separately() -> None:
    direct, shared, own = sender()
    for _ in range(3):
        assert (await direct.write(ANSWER, ADDRESS, timeout_s=5)).done()
        await asyncio.sleep(0)  # its callback
    assert (own.sent, shared.sent) == ([ADDRESS], [ADDRESS, ADDRESS])


async def test_an_address_is_tried_separately_again_after_a_message_to_it_was_not_confirmed() -> None:
    direct, shared, own = sender()
    await direct.send_surely(ANSWER, ADDRESS)
    shared.dies_by = "INTERNAL_ERROR"
    assert (await direct.write(ANSWER, ADDRESS, timeout_s=5)).exception()
    await asyncio.sleep(0)  # its callback
    shared.dies_by = None
    await direct.send_surely(ANSWER, ADDRESS)
    assert own.sent == [ADDRESS, ADDRESS]


def test_replies_to_new_addresses_wait_together_for_a_connection_that_cannot_be_opened() -> None:
    class Closed(Line):
        @override
        async def underlying(self) -> None:
            await asyncio.sleep(30)
            raise BrokerUnreachable("no connection")

    async def story() -> None:
        direct = ReplySender(Line(), own=Closed())
        async with asyncio.timeout(31):
            sent = (direct.send(ANSWER, f"{ADDRESS}-{at}") for at in range(10))
            failed = await asyncio.gather(*sent, return_exceptions=True)
        assert all(isinstance(each, BrokerUnreachable) for each in failed)

    virtually(story())


def test_a_direct_reply_without_an_answer_of_the_broker_is_not_taken_for_forged_after_two_seconds() -> None:
    async def story() -> None:
        direct, _, own = sender()
        own.is_silent = True
        with pytest.raises(ConfirmUnknown):
            await direct.send(ANSWER, ADDRESS)
        assert asyncio.get_running_loop().time() == pytest.approx(1002)
        assert direct.refusal(ADDRESS) is None

    virtually(story())


async def test_before_a_request_runs_it_is_known_whether_it_may_be_answered(bench: Bench) -> None:
    found = [bench.replies.refusal(bench.job(reply_to=each)) for each in (None, GEN, "lane.critical")]
    assert [each and each.code for each in found] == [None, None, "forbidden_reply_to"]


@pytest.mark.parametrize("code", [code for code, problem in PROBLEMS.items() if not problem.answered])
async def test_some_errors_are_not_answered(bench: Bench, code: str) -> None:
    assert await bench.replies.final(bench.job(), failed(code))
    assert bench.publisher.sent == []


class Mandatory(FakePublisher):
    """Notes whether each message had to find a queue."""

    @override
    async def publish_surely(self, message: Message, *, routing_key: str, mandatory: bool = True, **_: Any) -> None:
        self.log.append(f"{routing_key} {mandatory}")


async def test_only_a_reply_to_a_queue_must_find_one() -> None:
    publisher = Mandatory([])
    for address in (ADDRESS, "shop.answers"):
        await ReplySender(publisher, own=None).send_surely(ANSWER, address)
    assert publisher.log == [f"{ADDRESS} False", "shop.answers True"]
    direct, shared, own = sender()
    for _ in range(2):
        await direct.send_surely(ANSWER, ADDRESS)
    assert own.mandatory == shared.mandatory == [False]


OPEN = ReplyRule(names=Names())
BOUND = ReplyRule(names=Names(), bound=True)
GEN = "amq.gen-abcdefghijklmnopqrstuv"
DIRECT = "amq.rabbitmq.reply-to.g1h2/+_-.abc=="
NEVER = [
    "lane",
    "lane.critical",
    "lane.dead",
    "lane.replyx",
    "amq.topic",
    "amq.rabbitmq.trace",
    "amq.gen-short",
    "x" * 256,
]


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("rule", [OPEN, BOUND])
def test_no_reply_goes_to_one_of_our_or_the_brokers_own_queues(rule: ReplyRule, address: str) -> None:
    assert not rule.allows(address, user="shop")
    assert not rule.allows_control(address, user="shop")


@pytest.mark.parametrize("address", [GEN, DIRECT, "lane.reply.anybody", "shop.answers", "x" * 255])
def test_unbound_replies_may_go_to_any_other_queue(address: str) -> None:
    assert OPEN.allows(address, user=None)


@pytest.mark.parametrize(
    ("address", "user", "allowed"),
    [
        (DIRECT, None, True),
        (DIRECT, "shop", True),
        ("lane.reply.shop", "shop", True),
        ("lane.reply.shop.eu.1", "shop", True),
        ("lane.reply.shop", None, False),
        ("lane.reply.shop", "bank", False),
        ("lane.reply.shopping", "shop", False),
        ("lane.reply.shop", "", False),
        ("lane.reply.", "", False),
        ("lane.reply.shop.eu", "shop.eu", False),  # this queue belongs to the user shop
        ("shop.answers", "shop", False),
        (GEN, "shop", False),
    ],
)
def test_bound_replies_go_only_to_the_user_who_published(address: str, user: str | None, allowed: bool) -> None:
    assert BOUND.allows(address, user=user) is allowed
    if not allowed:
        assert "direct reply-to" in BOUND.refusal(address, user=user).detail


@pytest.mark.parametrize(
    ("address", "user", "open_allows", "bound_allows"),
    [
        (GEN, None, True, False),
        (DIRECT, None, True, True),
        ("lane.reply.shop", "shop", True, True),
        ("lane.reply.shop." + "x" * 239, "shop", True, True),
        ("lane.reply.shop." + "x" * 240, "shop", False, False),
        ("lane.reply.shop", "bank", False, False),
        ("shop.answers", "shop", False, False),
    ],
)
def test_what_a_control_message_is_answered_goes_to_its_own_users_queues(
    address: str, user: str | None, open_allows: bool, bound_allows: bool
) -> None:
    assert (OPEN.allows_control(address, user=user), BOUND.allows_control(address, user=user)) == (
        open_allows,
        bound_allows,
    )


def test_an_allow_list_restricts_bound_and_unbound_replies() -> None:
    allow = (re.compile(r"lane\.reply\..*"),)
    for bound in (False, True):
        rule = ReplyRule(names=Names(), allow=allow, bound=bound)
        assert rule.allows("lane.reply.shop", user="shop")
        assert not rule.allows(DIRECT, user="shop")


ANSWERED = Answered(body=b'{"id":"msg"}', model="claude-x", provider="anthropic")
REJECTED = DeadLettered(RequestProblem("provider_rejected", "402 …", status=402))
UNREADABLE = DeadLettered(RequestProblem("invalid_request", "body: empty"))
CONFLICT = Refused(RequestProblem("idempotency_conflict", "another body"))
FULL: dict[str, Exception] = {"": PublishRefused("full")}


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("address", [None, "lane.critical"])
async def test_without_an_address_that_may_be_answered_nothing_is_sent_and_the_request_is_settled(
    bench: Bench, address: str | None
) -> None:
    assert await bench.settler.settle(bench.job(reply_to=address), ANSWERED)
    assert bench.publisher.sent == []
    assert "ack" in bench.log


async def come_back(bench: Bench) -> Outcome:
    """Deliver the last delayed copy, and settle it."""
    sent = [each for each in bench.publisher.sent if each.exchange.startswith("lane.delay.")][-1]
    bench.publisher.sent.clear()
    message = sent.message
    back = bench.job(exchange="lane.due", body=message.body, headers=message.headers, message_id=message.message_id)
    outcome = await bench.settler.reply_only(back)
    assert outcome is not None
    assert await bench.settler.settle(back, outcome)
    return outcome


async def test_a_refused_reply_is_retried_for_a_minute_and_then_stays_available_under_its_id(bench: Bench) -> None:
    bench.publisher.failing = FULL
    job = bench.job()
    await bench.settler.settle(job, ANSWERED)
    assert bench.publisher.refused_within_s == [0], "the delivery does not wait for the queue"
    for _ in PAUSES_S[1:]:
        await come_back(bench)
    assert bench.reply_retries.given_up == 0
    await come_back(bench)
    assert (bench.reply_retries.given_up, bench.publisher.sent) == (1, [])
    assert bench.log[-2:] == ["event: undelivered", "ack"]
    found = await bench.claiming.find(job.identity)
    assert found is not None
    assert found.completion is not None
    assert found.completion.body == ANSWERED.body


@pytest.mark.parametrize("outcome", [UNREADABLE, CONFLICT])
async def test_an_error_that_is_not_stored_under_its_id_comes_back_in_a_header_and_is_told_once(
    bench: Bench, outcome: Refused | DeadLettered
) -> None:
    bench.publisher.failing = FULL
    await bench.settler.settle(bench.job(), outcome)
    before = bench.log.copy()
    bench.publisher.failing = {}
    await come_back(bench)
    reply = bench.to("")
    assert (reply.headers[n.STATUS], reply.headers[n.LANE_NAME], n.REPLAYED in reply.headers) == (
        "error",
        "critical",
        False,
    )
    assert json.loads(reply.body)["code"] == outcome.problem.code
    assert bench.log == [*before, "confirmed: reply", "ack"]


async def test_if_the_store_has_lost_the_result_the_request_runs_again(bench: Bench) -> None:
    job = bench.job(exchange="lane.due", headers={n.REPLY_TRY: 2})
    assert await bench.settler.reply_only(job) is None


async def test_a_requesters_forged_retry_header_is_ignored(bench: Bench) -> None:
    forged = {n.REPLY_TRY: 1, n.REPLY_ERROR: json.dumps({"code": "internal"})}
    assert await bench.settler.reply_only(bench.job(headers=forged)) is None


@pytest.mark.slow
def test_the_number_of_waiting_replies_is_limited_for_one_tenant_and_in_total(bench: Bench) -> None:
    reply_retries = ReplyRetries(max_waiting=30)

    def sent(address: str, count: int, now_ms: int = NOW_MS, user: str | None = None) -> int:
        jobs = [bench.job(reply_to=address, user_id=user) for _ in range(count)]
        return sum(reply_retries.pause_ms(job, now_ms=now_ms) is not None for job in jobs)

    assert sum(sent(f"shop.{n}", 50, user="shop") for n in range(10)) == 3, "however many queues a tenant has"
    assert sent("shop.full", 50) == 3, "of a queue, where nobody knows the tenant"
    assert sum(sent(f"shop.{n}", 50) for n in range(50)) == 24
    assert sent("another", 1) == sent("another", 1, user="another") == 0
    assert sent("shop.full", 50, NOW_MS + 1000) == 3, "what has come back waits no more"
    assert sent("shop.1", 50, NOW_MS + 1000, user="shop") == 3


@pytest.mark.parametrize(("outcome", "body"), [(ANSWERED, BODY), (REJECTED, BODY), (UNREADABLE, b""), (CONFLICT, b"")])
async def test_a_request_whose_reply_is_sent_again_keeps_its_body_unless_its_error_is_in_a_header(
    bench: Bench, outcome: Outcome, body: bytes
) -> None:
    bench.publisher.failing = FULL
    await bench.settler.settle(bench.job(), outcome)
    (copy,) = (each.message for each in bench.publisher.sent if each.exchange.startswith("lane.delay."))
    assert copy.body == body
    assert (n.REPLY_ERROR in copy.headers) == (body == b"")
