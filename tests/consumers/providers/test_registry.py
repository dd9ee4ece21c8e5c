"""One attempt over several providers: who is asked where one fails, what is told and paid, how many calls it takes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from consumers.failures import (
    BreakerOpen,
    OverloadedError,
    ProviderError,
    RejectedError,
    TransientError,
)
from consumers.limits.base import Heard, Kind
from consumers.prices import Prices
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.breaker import FAILURES, Breakers
from consumers.providers.registry import Registry, asking_for
from consumers.providers.routes import Route
from lanekeeper.telemetry.tracing import Tracing
from service.simulated.app import SimulatedAPI
from service.simulated.options import SimulatedOptions
from topology.codec.request import Request

from .conftest import KEY, AskedFor

MODEL, FALLBACK = "claude-haiku-5-5", "claude-sonnet-5-5"


def route(provider: str, model: str = MODEL, *, name: str | None = None) -> Route:
    return Route(provider=provider, model=model, name=name or model, account=f"{provider}/{model}")


class Moves:
    """Reserves for everybody, or for nobody."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room = has_room
        self.asked: list[tuple[str, str | None]] = []

    async def __call__(self, to: Route, error: ProviderError | None) -> bool:
        self.asked.append((to.provider, None if error is None else type(error).__name__))
        return self.has_room


class Received:
    """The parts, as a requester would have them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.restarts = 0

    async def __call__(self, event: bytes, /) -> None:
        self.events.append(json.loads(event)["type"])

    def restart(self) -> bool:
        had_begun = bool(self.events)
        self.restarts += had_begun
        self.events.clear()
        return had_begun


class House:
    """Two providers, `one` and `two`, each a simulated API."""

    def __init__(self, one: SimulatedAPI, two: SimulatedAPI, *providers: AnthropicProvider) -> None:
        self.one, self.two = one, two
        self.heard: list[tuple[str, Heard]] = []
        self.breakers = Breakers()
        self.registry = Registry(
            *providers,
            tracing=Tracing(),
            breakers=self.breakers,
            prices=Prices(),
            learn=lambda account, heard: self.heard.append((account, heard)),
        )
        self.moves = Moves()

    @property
    def calls(self) -> tuple[int, int]:
        return len(self.one.calls), len(self.two.calls)


Open = Callable[..., object]


@pytest.fixture
async def open_house() -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def run(one: SimulatedOptions | None = None, two: SimulatedOptions | None = None) -> House:
            apis = [
                await stack.enter_async_context(SimulatedAPI(options or SimulatedOptions())) for options in (one, two)
            ]
            providers = [
                AnthropicProvider.at(api.base_url, api_key=KEY, name=name)
                for api, name in zip(apis, ("one", "two"), strict=True)
            ]
            for each in providers:
                stack.push_async_callback(each.aclose)
            return House(apis[0], apis[1], *providers)

        yield run


def failing(fault: str) -> SimulatedOptions:
    return SimulatedOptions(faults={fault: 1.0})


BOTH = (route("one"), route("two"))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("server_error", "TransientError"),
        ("reset at=start", "TransientError"),
        ("overloaded", "OverloadedError"),
        ("rate_limited retry_after=60", "RateLimitedError"),
        ("rate_limited retry_after=none", "RateLimitedError"),
        ("spend_limit", "SpendLimitError"),
        ("authentication", "RejectedError"),
        ("permission", "RejectedError"),
    ],
)
async def test_where_one_fails_the_next_is_asked_in_the_same_attempt(
    open_house: Open, asked: AskedFor, fault: str, error: str
) -> None:
    house: House = await open_house(failing(fault))  # type: ignore[misc]

    got = await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH, move=house.moves)

    assert got.provider == "two"
    assert house.calls == (1, 1)
    assert house.moves.asked == [("two", error)]


@pytest.mark.parametrize("fault", ["invalid", "too_large", "not_found"])
async def test_what_is_the_requests_own_is_not_asked_of_another(open_house: Open, asked: AskedFor, fault: str) -> None:
    house: House = await open_house(failing(fault))  # type: ignore[misc]

    with pytest.raises(RejectedError):
        await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH, move=house.moves)

    assert house.calls == (1, 0)


async def test_without_room_or_time_the_first_failure_stands(open_house: Open, asked: AskedFor) -> None:
    house: House = await open_house(failing("overloaded"))  # type: ignore[misc]
    now_s = asyncio.get_running_loop().time()

    with pytest.raises(OverloadedError):
        await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH, move=Moves(has_room=False))
    with pytest.raises(OverloadedError):
        await house.registry.stream(
            asked(), timeout_s=5, parts=None, routes=BOTH, move=house.moves, until_s=now_s + 0.5
        )

    assert house.calls == (2, 0)


async def test_an_attempt_makes_two_calls_at_most(open_house: Open, asked: AskedFor) -> None:
    house: House = await open_house(failing("overloaded"), failing("overloaded"))  # type: ignore[misc]
    routes = (*BOTH, route("one", FALLBACK), route("two", FALLBACK))

    with pytest.raises(OverloadedError):
        await house.registry.stream(asked(), timeout_s=5, parts=None, routes=routes, move=house.moves)

    assert sum(house.calls) == 2


async def test_a_retry_may_still_help_where_the_second_refuses_for_good(open_house: Open, asked: AskedFor) -> None:
    house: House = await open_house(failing("server_error"), failing("authentication"))  # type: ignore[misc]

    with pytest.raises(TransientError):
        await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH, move=house.moves)


async def test_another_model_answers_for_one_that_is_overloaded_and_not_for_a_broken_connection(
    open_house: Open, asked: AskedFor
) -> None:
    routes = (route("one"), route("one", FALLBACK))
    prompt = "[[fault: overloaded x1]]"
    house: House = await open_house()  # type: ignore[misc]

    got = await house.registry.stream(asked(prompt), timeout_s=5, parts=None, routes=routes, move=house.moves)

    assert got.model == FALLBACK
    with pytest.raises(TransientError):
        await house.registry.stream(
            asked("[[fault: server_error x1]]"), timeout_s=5, parts=None, routes=routes, move=house.moves
        )


async def test_a_stream_that_has_begun_is_begun_again_by_the_other_and_says_so(
    open_house: Open, asked: AskedFor
) -> None:
    house: House = await open_house(failing("cut"))  # type: ignore[misc]
    received = Received()

    got = await house.registry.stream(
        asked("a long enough prompt"), timeout_s=5, parts=received, routes=BOTH, move=house.moves
    )

    assert received.restarts == 1
    assert (received.events[0], received.events[-1]) == ("message_start", "message_stop")
    assert json.loads(got.body)["content"][0]["text"] == "echo: a long enough prompt"


async def test_the_provider_is_asked_for_the_model_by_its_own_name(open_house: Open, asked: AskedFor) -> None:
    house: House = await open_house(SimulatedOptions(models=frozenset({"eu.haiku-v1:0"})))  # type: ignore[misc]

    got = await house.registry.stream(asked(), timeout_s=5, parts=None, routes=(route("one", name="eu.haiku-v1:0"),))

    sent = json.loads(house.one.calls[0].body)
    assert sent.pop("model") == "eu.haiku-v1:0"
    assert {**sent, "model": MODEL} == json.loads(asked().body)
    assert got.cost_usd == pytest.approx((got.usage.input_tokens * 0.10 + got.usage.output_tokens * 0.50) / 1e6)


def test_a_model_of_the_same_name_leaves_the_bytes_alone(asked: AskedFor) -> None:
    request = asked()

    assert asking_for(request, request.model) is request


async def test_what_each_response_says_of_the_limits_is_learnt_for_its_account(
    open_house: Open, asked: AskedFor
) -> None:
    house: House = await open_house(failing("rate_limited retry_after=60"))  # type: ignore[misc]

    got = await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH, move=house.moves)

    (first, refused), (second, answered) = house.heard
    assert (first, refused.kind, refused.retry_after_s) == (BOTH[0].account, Kind.RATE_LIMITED, 60)
    assert (second, answered.kind) == (BOTH[1].account, Kind.ANSWERED)
    assert refused.rate is not None
    assert refused.rate.requests.limit == 1_000_000
    assert got.rate is not None
    assert got.rate.input_tokens.limit == 1_000_000_000


async def test_a_failure_in_the_middle_of_a_stream_tells_the_limits_too(open_house: Open, asked: AskedFor) -> None:
    house: House = await open_house(failing("error_mid_stream"))  # type: ignore[misc]

    with pytest.raises(OverloadedError) as caught:
        await house.registry.stream(asked(), timeout_s=5, parts=Received(), routes=BOTH[:1])

    assert caught.value.rate is not None


async def test_while_a_breaker_is_open_the_other_is_asked_at_once(open_house: Open, asked: AskedFor) -> None:
    house: House = await open_house(failing("server_error"))  # type: ignore[misc]

    for _ in range(3 * FAILURES):
        await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH, move=house.moves)

    assert house.calls == (FAILURES, 3 * FAILURES)
    assert house.moves.asked[-1] == ("two", None), "no call was made that could be settled"


async def test_where_all_are_open_no_call_is_made(open_house: Open, asked: AskedFor) -> None:
    house: House = await open_house(failing("server_error"))  # type: ignore[misc]
    for _ in range(FAILURES):
        with pytest.raises(TransientError):
            await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH[:1])

    with pytest.raises(BreakerOpen) as caught:
        await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH[:1])

    assert 0 < caught.value.retry_in_s <= 1
    assert house.calls == (FAILURES, 0)


async def test_a_provider_that_hangs_is_known_though_deadlines_end_its_calls(
    open_house: Open, asked: AskedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.providers.breaker.FAIR_S", 0.1)
    house: House = await open_house(failing("hang"))  # type: ignore[misc]
    clock = asyncio.get_running_loop().time

    async def ask(number: int) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await house.registry.stream(
                    replace(asked(), id=str(number)), timeout_s=60, parts=None, routes=BOTH, until_s=clock() + 0.2
                )

    await asyncio.gather(*map(ask, range(FAILURES)))

    assert house.breakers.wait_s(BOTH[0], clock()) > 0


async def test_a_cancelled_probe_leaves_the_breaker_to_the_next(open_house: Open, asked: AskedFor) -> None:
    house: House = await open_house()  # type: ignore[misc]
    down = asked("[[fault: server_error]]")
    for _ in range(FAILURES):
        with pytest.raises(TransientError):
            await house.registry.stream(down, timeout_s=5, parts=None, routes=BOTH[:1])
    await asyncio.sleep(house.breakers.wait_s(BOTH[0], asyncio.get_running_loop().time()))

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await house.registry.stream(asked("[[fault: hang]]"), timeout_s=5, parts=None, routes=BOTH[:1])

    assert (await house.registry.stream(asked(), timeout_s=5, parts=None, routes=BOTH[:1])).provider == "one"


async def calls_per_request(house: House, requests: list[Request], *, routes: tuple[Route, ...], at_once: int) -> float:
    """All are answered in the end, each tried again as `retry.decide` does; how many calls that took."""
    slots = asyncio.Semaphore(at_once)

    async def answer(request: Request) -> None:
        async with slots:
            while True:
                try:
                    await house.registry.stream(request, timeout_s=5, parts=None, routes=routes, move=house.moves)
                except BreakerOpen as shut:
                    await asyncio.sleep(shut.retry_in_s)
                except ProviderError:
                    await asyncio.sleep(0.01)
                else:
                    return

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for each in requests:
            group.create_task(answer(each))
    return sum(house.calls) / len(requests)


@pytest.mark.parametrize("routes", [BOTH[:1], BOTH], ids=["one provider", "two"])
async def test_with_30_percent_of_overloads_a_request_takes_one_and_a_half_calls_at_most(
    open_house: Open, asked: AskedFor, routes: tuple[Route, ...]
) -> None:
    one, two = (SimulatedOptions(faults={"overloaded": 0.3}, seed=seed) for seed in (1, 2))
    house: House = await open_house(one, two)  # type: ignore[misc]
    requests = [
        replace(asked(f"{each}"), id=str(each)) for each in range(600)
    ]  # 1 / (1 - 0.3) = 1.43 are to be expected

    assert await calls_per_request(house, requests, routes=routes, at_once=16) <= 1.5


@pytest.mark.parametrize("routes", [BOTH[:1], BOTH], ids=["one provider", "two"])
async def test_with_a_provider_that_goes_and_comes_back_too(
    open_house: Open, asked: AskedFor, routes: tuple[Route, ...]
) -> None:
    house: House = await open_house()  # type: ignore[misc]
    requests = [replace(asked(f"{each} [[latency: 20ms]]"), id=str(each)) for each in range(300)]

    async def go_and_come_back() -> None:
        await asyncio.sleep(0.1)
        house.one.configure(failing("unavailable"))
        await asyncio.sleep(1)
        house.one.configure(SimulatedOptions())

    async with asyncio.TaskGroup() as group:
        group.create_task(go_and_come_back())
        assert await calls_per_request(house, requests, routes=routes, at_once=16) <= 1.5
