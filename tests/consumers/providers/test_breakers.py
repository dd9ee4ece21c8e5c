"""One breaker, without those who ask it: when it opens, for how long, and whose probe closes it. Time is passed in."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from unittest.mock import ANY

import pytest
from structlog.testing import capture_logs

from consumers.failures import (
    AccountError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.job import Route
from consumers.providers.breakers import (
    Breaker,
    Breakers,
    BreakerState,
    FailedCall,
    Pauses,
    Permit,
)
from tests.support.virtual_time import virtually

FAILURES, OPEN_S, PROBE_EVERY_S = 10, 1.0, 60.0


def breaker() -> Breaker:
    return Breaker(random.Random(3))


def failed(
    some: Breaker, count: int, *, at_s: float = 0.0, requests: int = 3, is_unreached: bool = False
) -> BreakerState:
    for each in range(count):
        some.failed(FailedCall(at_s, f"r-{each % requests}", is_unreached), probe=False)
    return some.state


@pytest.mark.parametrize(("at_s", "state"), [(102.9, BreakerState.CLOSED), (103.0, BreakerState.OPEN)])
def test_overloads_open_it_only_after_three_seconds_without_an_answer(at_s: float, state: BreakerState) -> None:
    some = breaker()
    for number in range(100):
        some.failed(FailedCall(100.0, f"r-{number}", is_unreached=False, is_overload=True), probe=False)
    some.failed(FailedCall(at_s, "r", is_unreached=False, is_overload=True), probe=False)

    assert some.state is state


@pytest.mark.parametrize(("requests", "state"), [(2, BreakerState.CLOSED), (3, BreakerState.OPEN)])
def test_failures_of_two_requests_alone_do_not_open_it(requests: int, state: BreakerState) -> None:
    assert failed(breaker(), 30, requests=requests) is state


def test_three_failures_to_connect_in_a_row_open_it_even_those_of_one_request() -> None:
    assert failed(breaker(), 2, requests=1, is_unreached=True) is BreakerState.CLOSED
    assert failed(breaker(), 3, requests=1, is_unreached=True) is BreakerState.OPEN
    mixed = breaker()
    failed(mixed, 2, is_unreached=True)
    failed(mixed, 1)
    assert failed(mixed, 2, is_unreached=True) is BreakerState.CLOSED
    assert failed(mixed, 1, is_unreached=True) is BreakerState.OPEN


@pytest.mark.parametrize(("later_s", "state"), [(120.0, BreakerState.OPEN), (120.1, BreakerState.CLOSED)])
def test_failures_of_more_than_two_minutes_ago_do_not_count(later_s: float, state: BreakerState) -> None:
    some = breaker()
    failed(some, 5, at_s=50.0)
    assert failed(some, 5, at_s=50.0 + later_s) is state


HERE = Route(provider="anthropic", model="m", name="m", account="anthropic/m")
ELSEWHERE = Route(provider="eu", model="m", name="m", account="eu/m")
DOWN = TransientError("500", status=500)
SLOW = TransientError("not in time", type="timeout")


def breakers() -> Breakers:
    return Breakers(rng=random.Random(1))


def enter(these: Breakers, at_s: float, route: Route = HERE, *, request: str = "r") -> Permit | None:
    return these.enter(route, at_s, request=request)


def fail(these: Breakers, at_s: float, *, error: ProviderError = DOWN, times: int = 1, timeout_s: float = 60) -> None:
    for each in range(times):
        permit = enter(these, at_s, request=str(each))
        assert permit is not None
        these.failed(permit, error, at_s, timeout_s=timeout_s)


def opened() -> Breakers:
    these = breakers()
    fail(these, 0, times=FAILURES)
    assert these.wait_s(HERE, 0) > 0
    return these


def test_a_breaker_opens_after_consecutive_failures_of_its_own_provider() -> None:
    these = breakers()

    fail(these, 0, times=FAILURES - 1)
    assert enter(these, 0)
    fail(these, 0)

    assert enter(these, 0) is None
    assert OPEN_S / 2 <= these.wait_s(HERE, 0) <= OPEN_S
    assert enter(these, 0, ELSEWHERE)
    assert these.states(0)["anthropic m"] == {"state": "open", "retry_in_s": ANY, "error": "TransientError 500"}


@pytest.mark.parametrize("is_probe", [False, True])
def test_a_probe_that_ended_without_a_result_lets_the_next_call_probe(is_probe: bool) -> None:
    these = breakers()
    late = enter(these, 0)
    fail(these, 0, times=FAILURES)
    probe = enter(these, OPEN_S)
    permit = probe if is_probe else late
    assert permit is not None
    these.unknown(permit, OPEN_S)
    assert (enter(these, OPEN_S) is not None) == is_probe


def test_an_answer_resets_the_count_of_failures() -> None:
    these = breakers()
    fail(these, 0, times=FAILURES - 1)
    permit = enter(these, 0)
    assert permit is not None
    these.answered(permit, 0)

    fail(these, 0, times=FAILURES - 1)

    assert these.wait_s(HERE, 0) == 0


def test_failures_caused_by_the_request_or_the_budget_do_not_open_a_breaker() -> None:
    these = breakers()

    for error in (RejectedError("400", status=400), RateLimitedError("429"), RejectedError("403", status=403)):
        fail(these, 0, error=error, times=3 * FAILURES)
    fail(these, 0, error=SLOW, times=3 * FAILURES, timeout_s=0.2)

    assert these.wait_s(HERE, 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("timeout_s", "counts"), [(4.9, False), (5.0, True)])
def test_a_timeout_counts_if_the_call_was_given_five_seconds(timeout_s: float, counts: bool) -> None:
    these = breakers()

    fail(these, 0, error=SLOW, times=FAILURES, timeout_s=timeout_s)

    assert (these.wait_s(HERE, 0) > 0) == counts


def test_one_call_probes_the_provider_and_its_answer_closes_the_breaker() -> None:
    these = opened()

    probe = enter(these, OPEN_S)

    assert probe is not None
    assert probe.is_probe
    assert enter(these, OPEN_S) is None, "the others wait for it"
    these.answered(probe, OPEN_S + 1)
    assert these.wait_s(HERE, OPEN_S + 1) == 0
    assert these.states(OPEN_S + 1) == {}


def test_beyond_the_limit_the_breakers_that_are_open_longest_are_kept() -> None:
    these = opened()
    for each in range(2000):
        route = Route(provider="anthropic", model=f"made up {each}", name="", account="")
        permit = enter(these, 0, route)
        assert permit is not None
        these.failed(permit, DOWN, 0, timeout_s=60)

    assert len(these._all) == 1000
    assert these.wait_s(HERE, 0) > 0


async def test_providers_known_to_fail_are_left_out_unless_all_are() -> None:
    these = Breakers(rng=random.Random(1))
    assert list(these.usable((HERE, ELSEWHERE))) == [HERE, ELSEWHERE]
    now_s = asyncio.get_running_loop().time()
    fail(these, now_s, times=FAILURES)
    assert list(these.usable((HERE, ELSEWHERE))) == [ELSEWHERE]
    assert these.least_wait_s((HERE, ELSEWHERE)) == 0
    assert these.least_wait_s((HERE,)) > 0
    assert these.least_wait_s(()) == 0, "a handler needs no provider"
    assert list(these.usable((HERE,))) == [HERE]


ONE = Route(provider="one", model="m", name="m", account="one/m")
KEY = AccountError("401", reason="it refuses the key", status=401)


class World:
    """Pauses of a provider that fails with `error`; None: it is well."""

    def __init__(self, error: Exception | None = KEY) -> None:
        self.error = error
        self.takes_s = 0.0
        self.probes: list[tuple[float, str, bool]] = []
        self.pauses = Pauses(self.probe)
        self.breakers = Breakers(pauses=self.pauses)

    async def probe(self, route: Route, by_call: bool) -> None:
        self.probes.append((asyncio.get_running_loop().time() - 1000, route.model, by_call))
        error = self.error
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        if error is not None:
            raise error

    @property
    def wait_s(self) -> float:
        return self.breakers.least_wait_s([ONE])

    async def fail(self, error: AccountError = KEY) -> bool:
        """Make one call that fails so. Returns whether it was allowed."""
        clock = asyncio.get_running_loop().time
        permit = self.breakers.enter(ONE, clock(), request="r")
        if permit is not None:
            self.breakers.failed(permit, error, clock(), timeout_s=60)
        return permit is not None


def of_the_request(otherwise: ProviderError | None = None) -> AccountError:
    return AccountError("403", reason="it permits nothing", otherwise=otherwise or RejectedError("403", status=403))


def run(story: Callable[[World], Awaitable[None]], world: World | None = None) -> World:
    async def told(world: World) -> World:
        clock = asyncio.get_running_loop().time
        await story(world)
        ended_s = clock()
        await world.pauses.aclose()
        assert clock() == ended_s, "closing waits for no probe"
        return world

    return virtually(told(world or World()))


def test_a_paused_provider_is_probed_ever_more_seldom_until_once_a_minute_and_called_again_when_well() -> None:
    async def story(world: World) -> None:
        assert await world.fail()
        assert not await world.fail()
        await asyncio.sleep(600)
        assert world.pauses.reasons() == {"one": "it refuses the key"}
        world.error = None
        await asyncio.sleep(PROBE_EVERY_S + 1)
        assert world.wait_s == 0
        assert world.pauses.reasons() == {}

    with capture_logs() as logs:
        world = run(story)
    at_s = [at for at, *_ in world.probes]
    assert [round(later - before) for before, later in pairwise(at_s[:6])] == [2, 4, 8, 16, 32]
    assert {round(later - before) for before, later in pairwise(at_s[6:])} == {60}
    assert not any(by_call for *_, by_call in world.probes), "nothing is paid"
    assert [(each["event"], each["log_level"]) for each in logs] == [
        ("provider.paused", "error"),
        ("provider.resumed", "warning"),
    ]


@pytest.mark.parametrize(("status", "by_call"), [(401, False), (402, True), (403, False)])
def test_an_unpaid_account_is_probed_by_calls_of_a_model(status: int, by_call: bool) -> None:
    async def story(world: World) -> None:
        await world.fail(AccountError("no", reason="no", status=status))
        await asyncio.sleep(1.5)

    assert [each for *_, each in run(story).probes] == [by_call]


def test_while_requests_wait_for_a_paused_provider_it_is_probed_every_two_seconds_and_no_more_often() -> None:
    async def story(world: World) -> None:
        await world.fail()
        for _ in range(300):  # many requests
            await asyncio.sleep(min(0.1, world.wait_s))
        world.error = None
        began_s = asyncio.get_running_loop().time()
        while world.wait_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - began_s <= 2.2

    at_s = [at for at, *_ in run(story).probes]
    assert {round(later - before) for before, later in pairwise(at_s)} == {2}


def test_an_operators_probe_begins_at_once_and_tells_how_it_went() -> None:
    async def story(world: World) -> None:
        assert await world.pauses.probe_now("one") is None, "it is not paused"
        await world.fail()
        await asyncio.sleep(595)  # probed once a minute
        began_s, probes = asyncio.get_running_loop().time(), len(world.probes)
        world.error = AccountError("no", reason="its account is not paid", status=402)
        asking = [asyncio.create_task(world.pauses.probe_now("one")) for _ in range(20)]
        assert await asyncio.gather(*asking) == [False] * 20
        assert len(world.probes) == probes + 1, "one answers all"
        assert world.pauses.reasons() == {"one": "its account is not paid"}
        world.error = None
        assert await world.pauses.probe_now("one") is True
        assert asyncio.get_running_loop().time() - began_s < 0.1
        assert world.wait_s == 0

    run(story)


def test_an_operators_probe_is_another_one_than_that_which_ran_already() -> None:
    async def story(world: World) -> None:
        await world.fail()
        world.takes_s = 5
        await asyncio.sleep(3)  # the first probe runs
        asking = asyncio.create_task(world.pauses.probe_now("one"))
        gone = asyncio.create_task(world.pauses.probe_now("one"))
        await asyncio.sleep(1)
        gone.cancel()
        world.error = None  # mended after that probe was sent
        assert await asking is True
        assert world.wait_s == 0

    run(story)


def test_a_request_that_comes_while_nothing_was_probed_for_long_is_waited_for_by_a_probe_at_once() -> None:
    async def story(world: World) -> None:
        await world.fail()
        await asyncio.sleep(595)  # probed once a minute
        world.error = None
        began_s = asyncio.get_running_loop().time()
        while world.wait_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - began_s <= 1.1

    run(story)


def test_if_calls_fail_although_the_free_probe_succeeds_the_pause_goes_on_with_calls_of_a_model() -> None:
    async def story(world: World) -> None:
        for _ in range(200):
            await asyncio.sleep(world.wait_s + 0.1)
            await world.fail()

    world = run(story, World(error=None))
    at_s = [at for at, *_ in world.probes]
    assert [by_call for *_, by_call in world.probes[:4]] == [False, True, True, True]
    assert at_s[-1] - at_s[-2] >= PROBE_EVERY_S, "not one error line for each request"


def test_a_key_that_is_refused_again_soon_after_it_was_mended_is_probed_as_often_as_before() -> None:
    async def story(world: World) -> None:
        clock = asyncio.get_running_loop().time
        for _ in range(3):
            world.error = KEY
            await world.fail()
            await asyncio.sleep(90)  # nobody waits: by now it is probed once a minute
            world.error, began_s = None, clock()
            while world.wait_s:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert clock() - began_s <= 2.2
            await asyncio.sleep(5)

    run(story)


@pytest.mark.parametrize("error", [None, RateLimitedError("429", status=429), RejectedError("404", status=404)])
def test_an_error_that_a_call_of_our_own_does_not_meet_is_the_requests(error: ProviderError | None) -> None:
    rejected = RejectedError("403", status=403)

    async def story(world: World) -> None:
        judged = await asyncio.gather(*(world.pauses.judge(ONE, of_the_request(rejected)) for _ in range(5)))
        assert judged == [rejected] * 5
        assert world.wait_s == 0

    assert len(run(story, World(error)).probes) == 1, "one call for all"


@pytest.mark.parametrize("error", [of_the_request(), TransientError("hangs", type="timeout"), ValueError("a fault")])
def test_an_error_that_a_call_of_our_own_meets_too_is_the_accounts(error: Exception) -> None:
    failed = of_the_request()

    async def story(world: World) -> None:
        assert await world.pauses.judge(ONE, failed) is failed
        await world.fail(failed)
        assert await world.pauses.judge(ONE, failed) is failed
        await asyncio.sleep(0.5)
        assert len(world.probes) == 1, "while it is paused no further call is made"
        world.error = None
        await asyncio.sleep(1)
        assert world.wait_s == 0

    run(story, World(error))


def test_a_check_goes_on_if_the_request_that_waits_for_it_is_cancelled() -> None:
    async def story(world: World) -> None:
        one, two = (asyncio.create_task(world.pauses.judge(ONE, failed)) for failed in (of_the_request(),) * 2)
        await asyncio.sleep(0)
        one.cancel()
        assert isinstance(await two, AccountError)

    run(story)
