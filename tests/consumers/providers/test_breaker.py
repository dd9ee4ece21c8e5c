"""Breakers: when one opens, which call may probe the provider, and which failures do not count."""

import asyncio
import random

import pytest

from consumers.chain import Route
from consumers.failures import (
    UNREACHABLE,
    OverloadedError,
    ProviderError,
    RateLimitedError,
    RejectedError,
    TransientError,
)
from consumers.providers.breaker import FAILURES, OPEN_MOST_S, OPEN_S, PROBE_WITHIN_S, UNREACHED, WINDOW_S
from consumers.providers.breakers import REMEMBERED, Breakers, Permit
from consumers.state.base import Leases, StoreUnavailable
from tests.support.virtual_time import virtually

HERE = Route(provider="anthropic", model="m", name="m", account="anthropic/m")
ELSEWHERE = Route(provider="eu", model="m", name="m", account="eu/m")
DOWN = TransientError("500", status=500)
SLOW = TransientError("not in time", type="timeout")


def breakers(leases: Leases | None = None) -> Breakers:
    return Breakers(leases, rng=random.Random(1))


async def enter(these: Breakers, at_s: float, route: Route = HERE, *, request: str = "r") -> Permit | None:
    return await these.enter(route, at_s, request=request)


async def fail(
    these: Breakers, at_s: float, *, error: ProviderError = DOWN, times: int = 1, timeout_s: float = 60
) -> None:
    for each in range(times):
        permit = await enter(these, at_s, request=str(each))
        assert permit is not None
        await these.failed(permit, error, at_s, timeout_s=timeout_s)


async def opened(leases: Leases | None = None) -> Breakers:
    these = breakers(leases)
    await fail(these, 0, times=FAILURES)
    assert these.wait_s(HERE, 0) > 0
    return these


async def test_a_breaker_opens_after_consecutive_failures_of_its_own_provider() -> None:
    these = breakers()

    await fail(these, 0, times=FAILURES - 1)
    assert await enter(these, 0)
    await fail(these, 0)

    assert await enter(these, 0) is None
    assert OPEN_S / 2 <= these.wait_s(HERE, 0) <= OPEN_S
    assert await enter(these, 0, ELSEWHERE)
    assert these.states(0)["anthropic m"]["state"] == "open"


async def test_an_answer_resets_the_count_of_failures() -> None:
    these = breakers()
    await fail(these, 0, times=FAILURES - 1)
    permit = await enter(these, 0)
    assert permit is not None
    await these.answered(permit, 0)

    await fail(these, 0, times=FAILURES - 1)

    assert these.wait_s(HERE, 0) == 0


async def test_failures_far_apart_do_not_open_a_breaker() -> None:
    these = breakers()

    for at_s in range(3 * FAILURES):
        await fail(these, at_s * WINDOW_S / 3)

    assert these.wait_s(HERE, 3 * FAILURES * WINDOW_S) == 0


@pytest.mark.parametrize(("over_s", "opens"), [(110, True), (130, False)])
async def test_the_failures_that_open_a_breaker_come_within_two_minutes(over_s: float, opens: bool) -> None:
    these = breakers()

    await fail(these, 0, times=FAILURES - 1)
    await fail(these, over_s)

    assert (these.wait_s(HERE, over_s) > 0) is opens


async def test_failures_caused_by_the_request_or_the_budget_do_not_open_a_breaker() -> None:
    these = breakers()

    for error in (RejectedError("400", status=400), RateLimitedError("429"), RejectedError("403", status=403)):
        await fail(these, 0, error=error, times=3 * FAILURES)
    await fail(these, 0, error=SLOW, times=3 * FAILURES, timeout_s=0.2)

    assert these.wait_s(HERE, 0) == 0


@pytest.mark.parametrize(("timeout_s", "counts"), [(4.9, False), (5.0, True)])
async def test_a_timeout_counts_if_the_call_was_given_five_seconds(timeout_s: float, counts: bool) -> None:
    these = breakers()

    await fail(these, 0, error=SLOW, times=FAILURES, timeout_s=timeout_s)

    assert (these.wait_s(HERE, 0) > 0) == counts


async def test_overloads_timeouts_and_a_refused_key_open_a_breaker() -> None:
    for error in (OverloadedError("529"), SLOW, RejectedError("401", status=401)):
        these = breakers()
        await fail(these, 0, error=error, times=FAILURES)
        assert these.wait_s(HERE, 0) > 0


async def test_one_call_probes_the_provider_and_its_answer_closes_the_breaker() -> None:
    these = await opened()

    probe = await enter(these, OPEN_S)

    assert probe is not None
    assert probe.is_probe
    assert await enter(these, OPEN_S) is None, "the others wait for it"
    await these.answered(probe, OPEN_S + 1)
    assert these.wait_s(HERE, OPEN_S + 1) == 0
    assert these.states(OPEN_S + 1) == {}


async def test_a_breaker_stays_open_longer_each_time_up_to_a_limit() -> None:
    these, now_s, waits = await opened(), 0.0, []

    for _ in range(8):
        wait_s = these.wait_s(HERE, now_s)
        waits.append(wait_s)
        now_s += wait_s
        await fail(these, now_s)

    steps = [min(OPEN_MOST_S, OPEN_S * 2**each) for each in range(8)]
    assert all(step / 2 <= wait <= step for step, wait in zip(steps, waits, strict=True))


async def test_after_a_cancelled_probe_the_next_call_may_probe() -> None:
    these = await opened()
    probe = await enter(these, OPEN_S)
    assert probe is not None

    await these.unknown(probe, OPEN_S)

    again = await enter(these, OPEN_S)
    assert again is not None
    assert again.is_probe


async def test_a_probe_that_never_ends_blocks_other_probes_only_for_a_while() -> None:
    these = await opened()
    assert await enter(these, OPEN_S)

    assert await enter(these, OPEN_S + PROBE_WITHIN_S + 0.1)


async def test_calls_that_began_before_a_breaker_opened_do_not_open_it_again() -> None:
    these = breakers()
    permit = [await enter(these, 0) for _ in range(3 * FAILURES)]

    for each in permit:
        assert each is not None
        await these.failed(each, DOWN, 1, timeout_s=60)

    assert these.wait_s(HERE, 1) <= OPEN_S


class Away:
    """A store whose leases fail; while `hangs` is set, they do not return."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs

    async def hold(self, name: str, owner: str, *, for_s: float) -> bool:
        if self.hangs:
            await asyncio.sleep(3600)
        raise StoreUnavailable("away")

    async def let_go(self, name: str, owner: str) -> None:
        await self.hold(name, owner, for_s=0)


@pytest.mark.parametrize("hangs", [False, True])
def test_without_the_store_each_process_probes_by_itself(hangs: bool) -> None:
    async def story() -> None:
        these = await opened(Away(hangs=hangs))

        probe = await enter(these, OPEN_S)
        assert probe is not None
        await these.answered(probe, OPEN_S)

        assert these.wait_s(HERE, OPEN_S) == 0

    virtually(story())


async def test_breakers_of_models_that_never_failed_are_not_kept() -> None:
    these = breakers()
    for each in range(1000):
        route = Route(provider="p", model=str(each), name="", account="")
        permit = await enter(these, 0, route)
        assert permit is not None
        await these.failed(permit, RejectedError("404", status=404), 0, timeout_s=60)

    assert not these._all


async def test_beyond_the_limit_the_breakers_that_are_open_longest_are_kept() -> None:
    these = await opened()
    for each in range(2 * REMEMBERED):
        route = Route(provider="anthropic", model=f"made up {each}", name="", account="")
        permit = await enter(these, 0, route)
        assert permit is not None
        await these.failed(permit, DOWN, 0, timeout_s=60)

    assert len(these._all) == REMEMBERED
    assert these.wait_s(HERE, 0) > 0


async def test_three_failures_to_connect_open_a_breaker_whichever_requests_had_them() -> None:
    these = breakers()
    for _ in range(UNREACHED):
        assert these.wait_s(HERE, 0) == 0
        permit = await enter(these, 0, request="the only one")
        assert permit is not None
        await these.failed(permit, TransientError("no connection", type=UNREACHABLE), 0, timeout_s=60)

    assert these.wait_s(HERE, 0) > 0


async def test_calls_that_hang_open_a_breaker_although_each_takes_a_minute() -> None:
    these = breakers()

    for wave in (1, 2):
        await fail(these, 60 * wave, error=SLOW, times=FAILURES // 2)

    assert these.wait_s(HERE, 120) > 0


async def test_a_breakers_change_is_reported_with_the_request_that_caused_it() -> None:
    these, told = breakers(), []

    for each in range(FAILURES):
        permit = await these.enter(HERE, 0, request=str(each))
        assert permit is not None
        told += [permit.change, await these.failed(permit, DOWN, 0, timeout_s=60)]
    probe = await these.enter(HERE, OPEN_S, request="p")
    assert probe is not None
    told += [probe.change, await these.answered(probe, OPEN_S)]

    changes = [each.figures() for each in told if each is not None]
    assert [each["state"] for each in changes] == ["open", "probing", "closed"]
    assert changes[0]["error"] == "TransientError 500"
    assert changes[1] == {"provider": "anthropic", "model": "m", "state": "probing"}


async def test_a_single_request_that_fails_every_time_opens_no_breaker() -> None:
    these = breakers()
    for _ in range(3 * FAILURES):
        permit = await enter(these, 0)
        assert permit is not None
        await these.failed(permit, DOWN, 0, timeout_s=60)
    assert these.wait_s(HERE, 0) == 0


async def test_providers_known_to_fail_are_left_out_unless_all_are() -> None:
    these = Breakers(rng=random.Random(1))
    assert list(these.usable((HERE, ELSEWHERE))) == [HERE, ELSEWHERE]
    now_s = asyncio.get_running_loop().time()
    await fail(these, now_s, times=FAILURES)
    assert list(these.usable((HERE, ELSEWHERE))) == [ELSEWHERE]
    assert these.least_wait_s((HERE, ELSEWHERE)) == 0
    assert these.least_wait_s((HERE,)) > 0
    assert list(these.usable((HERE,))) == [HERE]


async def test_how_long_a_provider_has_been_down_counts_from_when_its_breaker_first_opened() -> None:
    these = await opened()

    assert (these.down_s(HERE, 0), these.down_s(HERE, 7), these.down_s(ELSEWHERE, 7)) == (0, 7, 0)
    permit = await enter(these, 7)
    assert permit is not None
    assert permit.is_probe
    await these.failed(permit, DOWN, 7, timeout_s=60)
    assert these.down_s(HERE, 9) == 9
    answered = await enter(these, 30)
    assert answered is not None
    await these.answered(answered, 30)
    assert these.down_s(HERE, 31) == 0


async def test_if_a_call_is_cancelled_while_it_asks_for_the_probe_the_next_call_may_probe() -> None:
    store = Away(hangs=True)
    these = await opened(store)
    asking = asyncio.create_task(enter(these, OPEN_S))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    store.hangs = False

    assert these.wait_s(HERE, OPEN_S) == 0
    assert await enter(these, OPEN_S)
