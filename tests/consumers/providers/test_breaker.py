"""Breakers: when one opens, who may find out whether the provider is back, and what says nothing about it."""

import random

from consumers.failures import OverloadedError, ProviderError, RateLimitedError, RejectedError, TransientError
from consumers.providers.breaker import FAILURES, OPEN_MOST_S, OPEN_S, PROBE_WITHIN_S, WINDOW_S, Breakers
from consumers.providers.routes import Route
from consumers.state.base import StoreUnavailable

HERE = Route(provider="anthropic", model="m", name="m", account="anthropic/m")
ELSEWHERE = Route(provider="eu", model="m", name="m", account="eu/m")
DOWN = TransientError("500", status=500)
SLOW = TransientError("not in time", type="timeout")


def breakers(leases: object = None) -> Breakers:
    return Breakers(leases, rng=random.Random(1))  # type: ignore[arg-type]


async def fail(
    these: Breakers, at_s: float, *, error: ProviderError = DOWN, times: int = 1, timeout_s: float = 60
) -> None:
    for each in range(times):
        entered = await these.enter(HERE, at_s)
        assert entered is not None
        await these.failed(entered, error, at_s, request=str(each), timeout_s=timeout_s)


async def opened(leases: object = None) -> Breakers:
    these = breakers(leases)
    await fail(these, 0, times=FAILURES)
    assert these.wait_s(HERE, 0) > 0
    return these


async def test_it_opens_after_failures_in_a_row_and_for_this_provider_alone() -> None:
    these = breakers()

    await fail(these, 0, times=FAILURES - 1)
    assert await these.enter(HERE, 0)
    await fail(these, 0)

    assert await these.enter(HERE, 0) is None
    assert OPEN_S / 2 <= these.wait_s(HERE, 0) <= OPEN_S
    assert await these.enter(ELSEWHERE, 0)
    assert these.states(0)["anthropic m"]["state"] == "open"


async def test_an_answer_in_between_begins_the_row_again() -> None:
    these = breakers()
    await fail(these, 0, times=FAILURES - 1)
    entered = await these.enter(HERE, 0)
    assert entered is not None
    await these.answered(entered, 0)

    await fail(these, 0, times=FAILURES - 1)

    assert these.wait_s(HERE, 0) == 0


async def test_failures_far_apart_do_not_open_it() -> None:
    these = breakers()

    for at_s in range(20):
        await fail(these, at_s * WINDOW_S / 3)

    assert these.wait_s(HERE, 20 * WINDOW_S) == 0


async def test_what_is_the_requests_own_or_the_budgets_opens_nothing() -> None:
    these = breakers()

    for error in (RejectedError("400", status=400), RateLimitedError("429"), RejectedError("403", status=403)):
        await fail(these, 0, error=error, times=3 * FAILURES)
    await fail(these, 0, error=SLOW, times=3 * FAILURES, timeout_s=0.2)

    assert these.wait_s(HERE, 0) == 0


async def test_overloads_timeouts_and_a_key_that_is_refused_open_it() -> None:
    for error in (OverloadedError("529"), SLOW, RejectedError("401", status=401)):
        these = breakers()
        await fail(these, 0, error=error, times=FAILURES)
        assert these.wait_s(HERE, 0) > 0


async def test_one_call_finds_out_and_its_answer_closes_it() -> None:
    these = await opened()

    probe = await these.enter(HERE, OPEN_S)

    assert probe is not None
    assert probe.is_probe
    assert await these.enter(HERE, OPEN_S) is None, "the others wait for it"
    await these.answered(probe, OPEN_S + 1)
    assert these.wait_s(HERE, OPEN_S + 1) == 0
    assert these.states(OPEN_S + 1) == {}


async def test_it_stays_open_longer_each_time_up_to_a_bound() -> None:
    these, now_s, waits = await opened(), 0.0, []

    for _ in range(8):
        wait_s = these.wait_s(HERE, now_s)
        waits.append(wait_s)
        now_s += wait_s
        await fail(these, now_s)

    steps = [min(OPEN_MOST_S, OPEN_S * 2**each) for each in range(8)]
    assert all(step / 2 <= wait <= step for step, wait in zip(steps, waits, strict=True))


async def test_a_probe_that_was_cancelled_leaves_the_next_one_to_find_out() -> None:
    these = await opened()
    probe = await these.enter(HERE, OPEN_S)
    assert probe is not None

    await these.unknown(probe, OPEN_S)

    again = await these.enter(HERE, OPEN_S)
    assert again is not None
    assert again.is_probe


async def test_a_probe_that_never_ends_holds_nobody_back_for_ever() -> None:
    these = await opened()
    assert await these.enter(HERE, OPEN_S)

    assert await these.enter(HERE, OPEN_S + PROBE_WITHIN_S + 0.1)


async def test_calls_that_began_before_it_opened_do_not_open_it_again() -> None:
    these = breakers()
    entered = [await these.enter(HERE, 0) for _ in range(3 * FAILURES)]

    for each in entered:
        assert each is not None
        await these.failed(each, DOWN, 1, request="late", timeout_s=60)

    assert these.wait_s(HERE, 1) <= OPEN_S


class OneLease:
    """The store's leases, as far as this needs them."""

    def __init__(self) -> None:
        self.owner: str | None = None
        self.is_away = False

    async def hold(self, name: str, owner: str, *, for_s: float) -> int | None:
        if self.is_away:
            raise StoreUnavailable("away")
        if self.owner not in (None, owner):
            return None
        self.owner = owner
        return 1

    async def let_go(self, name: str, owner: str) -> None:
        if self.owner == owner:
            self.owner = None


async def test_of_several_processes_one_probes_and_the_others_after_its_answer() -> None:
    lease = OneLease()
    one, two = await opened(lease), await opened(lease)

    probe = await one.enter(HERE, 2)
    assert probe is not None
    assert await two.enter(HERE, 2) is None
    assert two.wait_s(HERE, 2) > 0
    await one.failed(probe, DOWN, 3, request="probe", timeout_s=60)
    assert await two.enter(HERE, 5) is None, "it is known to be down"

    probe = await one.enter(HERE, 10)
    assert probe is not None
    await one.answered(probe, 11)
    assert await two.enter(HERE, 20)


async def test_where_the_store_is_away_each_process_probes_by_itself() -> None:
    lease = OneLease()
    one, two = await opened(lease), await opened(lease)
    lease.is_away = True

    assert await one.enter(HERE, 2)
    assert await two.enter(HERE, 2)


async def test_models_that_never_failed_are_not_remembered() -> None:
    these = breakers()
    for each in range(1000):
        route = Route(provider="p", model=str(each), name="", account="")
        entered = await these.enter(route, 0)
        assert entered is not None
        await these.failed(entered, RejectedError("404", status=404), 0, request="r", timeout_s=60)

    assert not these._all


async def test_one_request_that_fails_each_time_opens_nothing() -> None:
    these = breakers()
    for _ in range(3 * FAILURES):
        entered = await these.enter(HERE, 0)
        assert entered is not None
        await these.failed(entered, DOWN, 0, request="indigestible", timeout_s=60)
    assert these.wait_s(HERE, 0) == 0
