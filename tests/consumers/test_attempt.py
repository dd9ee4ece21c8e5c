"""One attempt with several providers: which is called after a failure, what the requester gets, how many calls are
made."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest
from typing_extensions import override

from consumers.attempt import Attempts, _forget_frames
from consumers.budget_gate import BudgetGate
from consumers.claiming import Claiming
from consumers.failures import TIMEOUT, RetryPolicy, TransientError
from consumers.job import Chain, Decoded, Job, Reserved, Route
from consumers.limits.base import Amounts, Reservation
from consumers.limits.estimates import Estimates
from consumers.outcomes import Answered, DeadLettered, Deferred, Outcome, Refused, Retried
from consumers.prices import Prices
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.breakers import FAILURES, Breakers, Pauses
from consumers.providers.registry import Registry
from consumers.replies import Parts
from consumers.slots.pausing import Pausing
from lanekeeper.contract import names as n
from lanekeeper.telemetry.tracing import Tracing
from service.simulated.app import SimulatedOptions
from tests.support.faulty_api import FaultyAPI
from tests.support.jobs import NOW_MS, Bench, decoded, granted, read
from tests.support.memory_store import MemoryStore
from topology.lanes import NORMAL

MODEL, FALLBACK = "claude-haiku-5-5", "claude-sonnet-5-5"
EXPECTED, REFUSED = Amounts(1, 10, 20), Amounts(1)


def route(provider: str, model: str = MODEL) -> Route:
    return Route(provider=provider, model=model, name=model, account=f"{provider}/{model}")


def reserve(at: Route) -> Reserved:
    return Reserved(at, Reservation(account=at.account, lane="normal", amounts=EXPECTED))


class Moves(BudgetGate):
    """A budget gate that has budget for every account, or only for the first."""

    def __init__(self) -> None:
        self.estimates = Estimates(first_output_tokens=5, first_bytes_per_token=3.5)
        self.has_room = True
        self.asked: list[tuple[str, Amounts | None]] = []

    @override
    async def move(self, job: Job, _: Decoded, to: Route, used: Amounts | None) -> bool:
        self.asked.append((to.provider, used))
        if self.has_room:
            job.reserved = reserve(to)
        return self.has_room

    @override
    def give_up(self, job: Job, used: Amounts | None) -> None:
        job.reserved = None


class TwoProviders:
    """Two providers, `one` and `two`, each a simulated API."""

    def __init__(self, one: FaultyAPI, two: FaultyAPI, *providers: AnthropicProvider) -> None:
        self.one, self.two = one, two
        self.bench = Bench()
        self.registry = registry = Registry(*providers, tracing=Tracing(), prices=Prices())
        self.breakers = Breakers(pauses=Pauses(registry.probe))
        self.moves = Moves()
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        rng = random.Random(1)
        self.attempts = Attempts(
            registry,
            breakers=self.breakers,
            budget_gate=self.moves,
            replies=self.bench.replies,
            lifecycle=self.bench.lifecycle,
            pausing=Pausing({}),
            policy=RetryPolicy(),
            now_ms=self.now_ms,
            rng=rng,
            call_begins=Claiming(MemoryStore()).call_begins,
            hold_again=granted,
            keep_files=Claiming(MemoryStore()).keep_files,
        )

    def now_ms(self) -> int:
        return NOW_MS + round(1000 * (self._loop.time() - self._began_s))

    @property
    def calls(self) -> tuple[int, int]:
        return len(self.one.calls), len(self.two.calls)

    async def ask(
        self,
        prompt: str = "hello",
        *routes: Route,
        id: str = "m-1",
        stream: bool = False,
        deadline_ms: int = 60_000,
        call_timeout_s: float = NORMAL.call_timeout_s,
        long_call: bool = False,
        reserved: Route | None = None,
    ) -> Outcome:
        """Make one attempt; with both providers if no routes are given. `reserved`: the first route, unless given."""
        content = [{"role": "user", "content": prompt}]
        job = self.bench.job(
            lane=replace(NORMAL, call_timeout_s=call_timeout_s),
            routing_key="normal.shop.chat",
            body=json.dumps({"model": MODEL, "max_tokens": 500, "messages": content}).encode(),
            message_id=id,
            headers={n.STREAM: stream, n.DEADLINE_MS: deadline_ms, n.LONG_CALL: long_call},
        )
        read(job, Chain(routes or BOTH), now_ms=self.now_ms())
        self.job, job.reserved = job, reserve(reserved or (routes or BOTH)[0])
        return await self.attempts.make(job, decoded(job))

    def parts(self) -> list[str]:
        """What the requester was sent before the final reply: for each message the type of its event, or `restart`."""
        return [
            str(json.loads(each.message.body).get("type", each.message.headers[n.PART]))
            for each in self.bench.publisher.sent
        ]


Open = Callable[..., Awaitable[TwoProviders]]


@pytest.fixture
async def providers() -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def run(one: SimulatedOptions | None = None, two: SimulatedOptions | None = None) -> TwoProviders:
            apis = [await stack.enter_async_context(FaultyAPI(options or SimulatedOptions())) for options in (one, two)]
            providers = [
                AnthropicProvider.at(api.base_url, api_key="a-key", name=name)
                for api, name in zip(apis, ("one", "two"), strict=True)
            ]
            for each in providers:
                stack.push_async_callback(each.aclose)
            made = TwoProviders(apis[0], apis[1], *providers)
            stack.push_async_callback(made.breakers.pauses.aclose)
            return made

        yield run


def failing(fault: str) -> SimulatedOptions:
    return SimulatedOptions(faults={fault: 1.0})


BOTH = (route("one"), route("two"))


def answered_by(outcome: Outcome) -> str:
    assert isinstance(outcome, Answered), outcome
    return outcome.provider


def failed_with(outcome: Outcome) -> str:
    assert isinstance(outcome, Retried), outcome
    return outcome.brief.split()[0]


async def refused_by_a_cap(job: Job, decoded: Decoded) -> bool:
    return False


@pytest.mark.parametrize(("fault", "calls"), [("reset at=start", (1, 0)), ("overloaded", (1, 1))])
async def test_after_a_call_that_may_have_to_be_paid_no_other_is_made_if_a_cap_has_not_enough_left_for_both(
    providers: Open, fault: str, calls: tuple[int, int]
) -> None:
    two = await providers(failing(fault))
    two.attempts.hold_again = refused_by_a_cap
    await two.ask()
    assert two.calls == calls


async def test_a_refusal_is_the_answer_if_a_cap_has_not_enough_left_for_the_fallback(providers: Open) -> None:
    two = await providers()
    two.attempts.fallback_on_refusal, two.attempts.hold_again = True, refused_by_a_cap
    outcome = await two.ask("[[fault: refusal x1]]", *TO_SONNET)
    assert isinstance(outcome, Answered)
    assert (outcome.stop_reason, two.calls) == ("refusal", (1, 0))


async def test_a_stream_without_a_token_is_cut_by_its_deadline(providers: Open) -> None:
    two = await providers(failing("hang"))

    outcome = await two.ask(stream=True, deadline_ms=300)

    assert isinstance(outcome, Refused)
    assert outcome.problem.code == "deadline_exceeded"
    assert "in attempt 1" in outcome.problem.detail


@pytest.mark.slow
async def test_the_call_after_a_broken_stream_is_cut_by_the_deadline_again(providers: Open) -> None:
    two = await providers(failing("cut"), failing("hang"))

    outcome = await two.ask("many words, so that a half is there", stream=True, deadline_ms=2500)

    assert isinstance(outcome, Refused)
    assert outcome.problem.code == "deadline_exceeded"
    assert two.calls == (1, 1)


@pytest.mark.slow
async def test_a_stream_that_flows_too_long_for_one_delivery_ends_and_is_not_paid_for_again(
    providers: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.attempt.ATTEMPT_WITHIN_S", 3)
    two = await providers()

    outcome = await two.ask("[[latency: 12s]] in many pieces", stream=True, deadline_ms=50_000)

    assert isinstance(outcome, Refused)
    assert outcome.problem.detail == "its stream was cut after 3 s, the most that one lasts"
    assert two.calls == (1, 0)


@pytest.mark.parametrize(("long_call", "is_cut"), [(False, True), (True, False)])
async def test_a_long_call_may_take_all_of_its_deadline(providers: Open, long_call: bool, is_cut: bool) -> None:
    two = await providers()

    outcome = await two.ask("[[latency: 1s]] slow", BOTH[0], call_timeout_s=0.3, long_call=long_call)

    assert (failed_with(outcome) == TIMEOUT) if is_cut else isinstance(outcome, Answered)


@pytest.mark.parametrize("fault", ["invalid", "too_large"])
async def test_a_failure_caused_by_the_request_is_not_tried_with_another_provider(providers: Open, fault: str) -> None:
    two = await providers(failing(fault))

    outcome = await two.ask()

    assert isinstance(outcome, DeadLettered)
    assert outcome.problem.code == "provider_rejected"
    assert two.calls == (1, 0)


@pytest.mark.parametrize("fault", ["permission", "not_found", "usage_limit"])
async def test_an_error_that_the_request_alone_brings_about_ends_it_and_pauses_nothing(
    providers: Open, fault: str
) -> None:
    two = await providers()

    outcome = await two.ask(f"[[fault: {fault}]]", BOTH[0])

    assert isinstance(outcome, DeadLettered)
    assert outcome.problem.code == "provider_rejected"
    assert answered_by(await two.ask("hello", BOTH[0])) == "one"
    assert len(two.one.calls) == 4, "one of them asked whether the account is well, one tried the request again"


async def test_without_budget_or_time_for_another_provider_the_first_failure_is_the_outcome(providers: Open) -> None:
    two = await providers(failing("overloaded"))

    two.moves.has_room = False
    assert failed_with(await two.ask()) == "overloaded_error"
    two.moves.has_room = True
    assert isinstance(await two.ask(deadline_ms=900), Retried | Refused)

    assert two.calls == (2, 0)
    assert len(two.moves.asked) == 1


async def test_an_attempt_makes_two_calls_at_most(providers: Open) -> None:
    two = await providers(failing("overloaded"), failing("overloaded"))

    outcome = await two.ask("hello", *BOTH, route("one", FALLBACK), route("two", FALLBACK))

    assert failed_with(outcome) == "overloaded_error"
    assert sum(two.calls) == 2


async def test_the_request_is_retried_if_the_second_provider_rejects_it_and_the_first_may_recover(
    providers: Open,
) -> None:
    two = await providers(failing("server_error"), failing("invalid"))

    assert failed_with(await two.ask()) == "api_error"
    assert two.calls == (1, 1)


async def test_a_fallback_model_is_used_after_an_overload_and_not_after_a_lost_connection(
    providers: Open,
) -> None:
    routes = (route("one"), route("one", FALLBACK))
    two = await providers()

    answered = await two.ask("[[fault: overloaded x1]]", *routes)

    assert isinstance(answered, Answered)
    assert answered.model == FALLBACK
    assert failed_with(await two.ask("[[fault: server_error x1]]", *routes)) == "api_error"


@pytest.mark.parametrize(("after_s", "falls_back"), [("none", False), ("5", False), ("6", True)])
async def test_after_a_rate_limit_a_fallback_model_is_used_if_the_wait_is_longer_than_five_seconds(
    providers: Open, after_s: str, falls_back: bool
) -> None:
    two = await providers()
    outcome = await two.ask(f"[[fault: rate_limited x1 retry_after={after_s}]]", route("one"), route("one", FALLBACK))

    assert isinstance(outcome, Answered) == falls_back
    assert sum(two.calls) == (2 if falls_back else 1)


@pytest.fixture
def stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breaker that opens is not probed for half a minute at least: half a second can pass on a busy machine."""
    monkeypatch.setattr("consumers.providers.breakers.OPEN_S", 60.0)
    monkeypatch.setattr("consumers.providers.breakers.OPEN_MOST_S", 60.0)


async def test_a_failure_that_opens_the_last_breaker_is_no_attempt_however_soon_the_breaker_is_probed(
    providers: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPEN_S", "OPEN_MOST_S"):
        monkeypatch.setattr(f"consumers.providers.breakers.{name}", 0.9)
    two = await providers(failing("server_error"))
    for each in range(FAILURES - 1):
        assert isinstance(await two.ask("hello", BOTH[0], id=str(each)), Retried)

    outcome = await two.ask("hello", BOTH[0])

    assert isinstance(outcome, Deferred)
    assert two.job.attempted is not None
    assert not two.job.attempted.counts
    error = two.job.attempted.error
    assert error is not None
    assert error.__traceback__ is None, "its frames hold the job, and with it the body"


async def test_a_request_waits_for_the_open_breaker_if_the_other_provider_lacks_budget_alone(
    providers: Open, stays_open: None
) -> None:
    two = await providers(failing("server_error"))
    for each in range(FAILURES):
        await two.ask("hello", BOTH[0], id=str(each))
    two.moves.has_room = False

    outcome = await two.ask()
    still_open_s = two.breakers.wait_s(BOTH[0], asyncio.get_running_loop().time())

    assert isinstance(outcome, Deferred)
    assert outcome.delay_ms >= round(1000 * still_open_s)
    assert two.calls == (FAILURES, 0)


async def test_the_pause_that_a_provider_asks_for_is_kept_unless_the_retry_can_call_another(providers: Open) -> None:
    two = await providers(failing("rate_limited retry_after=20"))
    two.moves.has_room = False  # the other has no budget for this attempt, and may have some for the next
    with_other = await two.ask("hello")
    alone = await two.ask("hello", route("one"), id="m-2")

    assert isinstance(with_other, Retried)
    assert isinstance(alone, Retried)
    assert with_other.delay_ms < 20_000 <= alone.delay_ms


@pytest.mark.slow
async def test_the_second_call_of_an_attempt_has_the_lanes_time_limit_too(providers: Open) -> None:
    two = await providers(failing("overloaded"), failing("hang"))

    async with asyncio.timeout(20):
        outcome = await two.ask(call_timeout_s=2)  # so long that the first is called on a busy machine

    assert failed_with(outcome) == TIMEOUT
    assert two.calls == (1, 1)


TO_SONNET = (route("one"), route("two"), route("one", FALLBACK), route("two", FALLBACK))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fallback", ["refusal", "server_error", "cut"])
async def test_a_fallback_that_refuses_or_fails_leaves_a_refusal_that_is_paid_once(
    providers: Open, stream: bool, fallback: str
) -> None:
    two = await providers()
    two.attempts.fallback_on_refusal = True

    outcome = await two.ask(f"[[fault: refusal x1]] [[fault: {fallback}]]", *TO_SONNET, stream=stream)

    assert isinstance(outcome, Answered)
    assert outcome.stop_reason == "refusal"
    assert two.calls == (2, 0), "once"
    assert two.job.attempted is not None
    assert [lost.model for lost in two.job.attempted.lost] == {
        "refusal": [MODEL],
        "server_error": [],
        "cut": [FALLBACK],  # it may have to be paid for
    }[fallback]
    refused = json.loads(outcome.body)
    if stream:
        parts = two.parts()
        whole = parts[parts.index("restart") + 1 :] if "restart" in parts else parts
        assert whole == ["message_start", "message_delta", "message_stop"]
        assert ("restart" in parts) == (fallback == "cut"), "some of the fallback's text was sent"
    assert refused["stop_details"]["category"] == "cyber"


async def test_a_stream_whose_text_was_sent_is_not_replaced(providers: Open) -> None:
    two = await providers()
    two.attempts.fallback_on_refusal = True

    outcome = await two.ask("[[fault: refusal at=middle x1]]", *TO_SONNET, stream=True)

    assert isinstance(outcome, Answered)
    assert (outcome.stop_reason, two.calls) == ("refusal", (1, 0))
    whole = await two.ask("[[fault: refusal at=middle x1]] again", *TO_SONNET, id="m-2")
    assert isinstance(whole, Answered)
    assert whole.model == FALLBACK, "an answer that is not streamed is"


@pytest.mark.parametrize("why", ["no other model", "no budget", "no time"])
async def test_without_a_fallback_that_can_be_asked_the_refusal_is_the_answer(providers: Open, why: str) -> None:
    two = await providers()
    two.attempts.fallback_on_refusal = True
    two.moves.has_room = why != "no budget"

    outcome = await two.ask(
        "[[fault: refusal x1]]",
        *(BOTH if why == "no other model" else TO_SONNET),
        deadline_ms=1500 if why == "no time" else 60_000,
    )

    assert isinstance(outcome, Answered)
    assert (outcome.stop_reason, two.calls) == ("refusal", (1, 0))
    assert two.job.attempted is not None
    assert two.job.attempted.lost == ()


async def test_events_before_the_text_are_kept_only_up_to_a_limit(providers: Open) -> None:
    two = await providers()
    two.attempts.fallback_on_refusal = True
    job = two.bench.job(routing_key="normal.shop.chat", body=b"{}", message_id="m-1", headers={n.STREAM: True})
    parts = Parts(two.bench.replies, job, keeps=True)

    for _ in range(3):
        await parts(b'{"type":"ping","x":"%b"}' % (b"x" * 30_000))
    await parts.confirmed()

    assert two.parts() == ["ping"] * 3


def test_an_error_whose_causes_form_a_circle_keeps_no_frames() -> None:
    errors = [TransientError("one"), TransientError("two")]
    for error in errors:
        with suppress(TransientError):
            raise error
    errors[0].__cause__, errors[1].__cause__ = errors[1], errors[0]
    _forget_frames(errors[0])
    assert [error.__traceback__ for error in errors] == [None, None]


async def test_a_requester_is_told_the_error_in_the_middle_before_the_next_attempt(providers: Open) -> None:
    two = await providers()

    outcome = await two.ask("[[fault: error_mid_stream type=api_error]]", *BOTH[:1], stream=True)

    assert isinstance(outcome, Retried)
    *events, last = [each.message for each in two.bench.publisher.sent]
    assert events
    assert last.headers[n.PART] == "restart"
    told = json.loads(last.body)
    assert (told["provider_status"], told["provider_type"]) == (500, "api_error")
    assert json.loads(told["provider_error"])["error"]["type"] == "api_error"


async def test_without_a_next_attempt_the_final_reply_has_the_error_alone(providers: Open) -> None:
    two = await providers()

    outcome = await two.ask("[[fault: error_mid_stream type=invalid_request_error]]", *BOTH[:1], stream=True)

    assert isinstance(outcome, Refused | DeadLettered)
    assert "restart" not in two.parts()
