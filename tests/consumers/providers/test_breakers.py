"""One breaker, without those who ask it: when it opens, for how long, and whose probe closes it. Time is passed in."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from consumers.brake import Brake
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
from tests.support.jobs import NOW_MS, HeldPauses, a_pause
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


def test_each_time_it_opens_for_twice_as_long_up_to_five_seconds() -> None:
    waits: list[list[float]] = []
    for seed in range(200):
        some = Breaker(random.Random(seed))
        waits.append([])
        for at_s in range(0, 700, 100):
            some.open(at_s)
            waits[-1].append(some.wait_s(at_s))

    for each, most_s in zip(zip(*waits, strict=True), (1, 2, 4, 5, 5, 5, 5), strict=True):
        assert most_s / 2 <= min(each) < 0.52 * most_s
        assert 0.98 * most_s < max(each) <= most_s


def test_while_one_call_probes_the_others_look_again_within_a_second() -> None:
    some = breaker()
    some.open(100.0)
    some.probe(110.0)
    assert [some.wait_s(each) for each in (110.0, 139.0, 139.75, 140.0, 150.0)] == [1.0, 1.0, 0.25, 0.0, 0.0]


def test_only_a_failure_of_the_probe_opens_it_again() -> None:
    some = breaker()
    some.open(100.0)
    some.probe(110.0)
    some.failed(FailedCall(111.0, "other", True), probe=False)
    after_another = some.state
    some.failed(FailedCall(112.0, "probe", False), probe=True)
    assert (after_another, some.state) == (BreakerState.PROBING, BreakerState.OPEN)
    assert some.wait_s(112.0) >= 1.0


def test_a_late_failure_does_not_lengthen_an_open_breaker() -> None:
    some = breaker()
    some.open(100.0)
    before = some.wait_s(100.0)
    some.failed(FailedCall(100.5, "late", True), probe=True)
    assert some.wait_s(100.0) == before


def test_after_a_probe_without_a_result_the_next_call_is_the_probe_at_once() -> None:
    some = breaker()
    some.open(100.0)
    some.probe(110.0)
    some.unknown(111.0, probe=False)
    assert some.state is BreakerState.PROBING
    some.unknown(111.0, probe=True)
    assert (some.state, some.wait_s(111.0)) == (BreakerState.OPEN, 0.0)


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
    assert these.states(0)["anthropic m"]["state"] == "open"


def test_a_breaker_that_opens_is_told_with_its_error_and_the_tenths_of_a_second_until_its_probe() -> None:
    these = breakers()
    fail(these, 0, times=FAILURES - 1)
    permit = enter(these, 0)
    assert permit is not None
    change = these.failed(permit, DOWN, 0, timeout_s=60)

    assert change is not None
    left_s = these.wait_s(HERE, 0)
    assert left_s != round(left_s, 1)
    assert change.fields == {
        "provider": "anthropic", "model": "m", "state": "open", "error": DOWN.brief, "retry_in_s": round(left_s, 1),
    }  # fmt: skip
    assert these.states(0) == {"anthropic m": {"state": "open", "retry_in_s": round(left_s, 1)}}


def test_a_breaker_that_nobody_asks_is_not_told_as_open_for_ever_and_its_next_call_is_a_probe() -> None:
    these = opened()

    assert these.states(120)
    assert these.states(122) == {}

    permit = enter(these, 122)
    assert permit is not None
    assert permit.is_probe


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


@pytest.mark.parametrize(("kind", "name"), [("provider", "anthropic"), ("model", "m")])
async def test_what_an_operator_has_paused_is_not_called_and_all_else_is(kind: str, name: str) -> None:
    brake = Brake(HeldPauses(a_pause(kind, name)), now_ms=lambda: NOW_MS)
    await brake.read()
    these = Breakers(brake=brake)
    other = Route(provider="eu", model="other", name="other", account="eu/other")
    assert (these.wait_s(HERE, 0), these.wait_s(other, 0)) == (1, 0)
    assert (enter(these, 0), enter(these, 0, other) is not None) == (None, True)


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


def test_how_long_a_provider_has_been_down_counts_from_when_its_breaker_first_opened() -> None:
    these = opened()

    assert (these.down_s(HERE, 0), these.down_s(HERE, 7), these.down_s(ELSEWHERE, 7)) == (0, 7, 0)
    permit = enter(these, 7)
    assert permit is not None
    assert permit.is_probe
    these.failed(permit, DOWN, 7, timeout_s=60)
    assert these.down_s(HERE, 9) == 9
    answered = enter(these, 30)
    assert answered is not None
    these.answered(answered, 30)
    assert these.down_s(HERE, 31) == 0


ONE = Route(provider="one", model="m", name="m", account="one/m")
OTHER = Route(provider="one", model="other", name="other", account="one/other")
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


def test_a_pause_is_told_with_its_age_and_the_time_to_its_next_probe() -> None:
    async def story(world: World) -> None:
        await world.fail()
        now_s = asyncio.get_running_loop().time()
        told = world.pauses.figures(now_s + 0.75)
        assert told == {"one": {"reason": KEY.reason, "error": KEY.brief, "for_s": 0.8, "probe_in_s": 0.2}}
        assert world.pauses.figures(now_s + 7)["one"]["probe_in_s"] == 0
        assert world.wait_s == 1
        assert world.breakers.down_s(ONE, now_s + 7) == 7
        assert world.breakers.hindrance([ONE, OTHER]) == "one: it refuses the key"
        world.error = None
        await asyncio.sleep(1.5)
        assert world.breakers.hindrance([ONE]) is None
        assert world.pauses.figures(now_s) == {}

    run(story)


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


def test_a_check_calls_a_model_that_has_answered_before() -> None:
    async def story(world: World) -> None:
        permit = world.breakers.enter(OTHER, 1000.0, request="r")
        assert permit is not None
        world.breakers.answered(permit, 1000.0)
        await world.pauses.judge(ONE, of_the_request())

    assert [model for _, model, _ in run(story).probes] == ["other"]


def test_a_check_goes_on_if_the_request_that_waits_for_it_is_cancelled() -> None:
    async def story(world: World) -> None:
        one, two = (asyncio.create_task(world.pauses.judge(ONE, failed)) for failed in (of_the_request(),) * 2)
        await asyncio.sleep(0)
        one.cancel()
        assert isinstance(await two, AccountError)

    run(story)
