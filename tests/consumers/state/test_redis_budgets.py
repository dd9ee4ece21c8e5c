"""One budget for several processes: what one process promises holds for all of them together."""

import asyncio
import json
import random
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from consumers.limits import adaptive
from consumers.limits.account import Account
from consumers.limits.amounts import Amounts
from consumers.limits.base import Heard, Kind, Reservation, WaitTooLong
from consumers.limits.headers import RateHeaders, Told
from consumers.limits.order import Waiter
from consumers.state.base import StoreUnavailable
from consumers.state.redis.budgets import FORGOTTEN_AFTER_S, RedisBudgets
from consumers.state.redis.client import RedisClient
from consumers.state.redis.scripts import Script
from service.simulated.buckets import Bucket
from tests.support.budget import ACCOUNT, spec
from tests.support.redis import RedisServer
from tests.support.spender import BURST_S, PER_MINUTE
from tests.support.waiting import until

ONE = Amounts(1, 1, 1)
AN_HOUR_LATER = Script(
    """
local account = cmsgpack.unpack(redis.call('GET', KEYS[1]))
account.at, account.stopped_until = account.at + 3600, account.stopped_until + 3600
account.waiting['dead'] = {expires = account.at + 2, heads = {['1'] = {arrived = account.at, amounts = {10, 1, 1}}},
  sums = {{10, 1, 1}, {0, 0, 0}, {0, 0, 0}}}
return redis.call('SET', KEYS[1], cmsgpack.pack(account))
"""
)
"""As if it had been written by a clock that was ahead, with somebody in line who has died since."""
Opened = Callable[..., RedisBudgets]


@pytest.fixture
async def opened(redis: RedisServer) -> AsyncIterator[Opened]:
    """More and more processes over the same budget, of 600 requests a minute and a burst of a second where nothing else
    is said."""
    namespace = f"test-{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:

        def open_one(*, url: str = redis.url, **given: object) -> RedisBudgets:
            client = RedisClient(url)
            wanted: dict[str, object] = {"requests": 600, "burst_s": 1.0, **given}
            budgets = RedisBudgets(client, namespace=namespace, spec=spec(**wanted))  # type: ignore[arg-type]
            stack.push_async_callback(client.aclose)
            stack.push_async_callback(budgets.aclose)
            return budgets

        yield open_one


async def empty(budgets: RedisBudgets) -> None:
    for lane in ("critical", "normal", "batch"):
        while await budgets.try_reserve(ACCOUNT, lane=lane, amounts=ONE) is not None:
            pass


def ask(budgets: RedisBudgets, lane: str, *, amounts: Amounts = ONE) -> asyncio.Task[Reservation]:
    return asyncio.ensure_future(budgets.reserve(ACCOUNT, lane=lane, amounts=amounts, until=None))


def now_s() -> float:
    return asyncio.get_running_loop().time()


def answered(requests: Told) -> Heard:
    rate = RateHeaders(requests, Told(), Told())
    return Heard(kind=Kind.ANSWERED, rate=rate, counted=Amounts(1, 0, 0))


async def gone(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", range(20))
async def test_the_script_decides_as_one_process_does(opened: Opened, seed: int) -> None:
    rng = random.Random(seed)
    slow = {"requests": 30, "input_tokens": 6_000, "output_tokens": 600, "burst_s": 60}
    wanted = [
        (rng.randrange(3), Amounts(1, rng.choice([311, 707, 1303, 2011]), rng.choice([7, 31, 83])))
        for _ in range(rng.randint(3, 40))
    ]
    alone = Account(ACCOUNT, spec(**slow), now_s=0.0)  # type: ignore[arg-type]
    learned = answered(Told(limit=30, remaining=20)) if seed % 2 else Heard(kind=Kind.ANSWERED)
    alone.learn(learned, 0.0)
    for lane, amounts in wanted:
        alone.join(Waiter(lane, amounts, arrived_s=0.0))
    expected = []
    while (waiter := alone.turn(0.0)[0]) is not None:
        expected.append(waiter.number)

    shared = opened(**slow)
    shared.learn(ACCOUNT, learned)
    order: list[int] = []

    async def one(number: int, lane: int, amounts: Amounts) -> None:
        await shared.reserve(ACCOUNT, lane=("critical", "normal", "batch")[lane], amounts=amounts, until=None)
        order.append(number)

    tasks = [asyncio.ensure_future(one(each, *given)) for each, given in enumerate(wanted, start=1)]
    await until(lambda: shared.steps > 0 and shared._ledger(shared._desk.books(ACCOUNT)).task is None)

    assert order == expected
    await gone(*tasks)


async def test_several_processes_spend_one_budget_and_use_it(opened: Opened) -> None:
    processes = [opened() for _ in range(3)]
    began_s = now_s()
    granted: list[float] = []

    async def worker(budgets: RedisBudgets, lane: str) -> None:
        while True:
            reservation = await budgets.reserve(ACCOUNT, lane=lane, amounts=ONE, until=None)
            granted.append(now_s())
            await asyncio.sleep(0.05)
            budgets.settle(reservation, ONE)

    tasks = [asyncio.ensure_future(worker(each, lane)) for each in processes for lane in ("critical", "batch", "batch")]
    await asyncio.sleep(4)
    took_s = now_s() - began_s
    await gone(*tasks)

    there_was = 10 + 10 * took_s
    assert len(granted) <= there_was * 1.02
    assert len(granted) >= there_was * 0.6  # on an idle machine nearly all of it


async def test_three_processes_spend_no_more_than_there_is_and_every_lane_has_its_share(redis: RedisServer) -> None:
    namespace = f"test-{secrets.token_hex(4)}"

    async def spender() -> list[tuple[float, str]]:
        command = (sys.executable, "-m", "tests.support.spender", redis.url, namespace, "6")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        written, _ = await process.communicate()
        found: list[tuple[float, str]] = json.loads(written)
        return found

    granted = sorted(each for found in await asyncio.gather(*(spender() for _ in range(3))) for each in found)
    began_s = granted[0][0]
    clock_s = 0.0
    judge = Bucket(PER_MINUTE, burst_s=BURST_S, clock=lambda: clock_s)
    deepest = 0.0
    for at_s, _ in granted:
        clock_s = at_s - began_s
        judge.take(1)
        deepest = min(deepest, judge.level())
    there_was = PER_MINUTE / 60 * (BURST_S + clock_s)

    assert len(granted) <= 1.02 * there_was
    assert deepest >= -0.02 * there_was
    assert len(granted) >= 0.6 * there_was
    for lane, share in (("critical", 0.30), ("normal", 0.20), ("batch", 0.05)):
        assert sum(of == lane for _, of in granted) >= 0.85 * share * len(granted)


async def test_the_most_urgent_goes_first_whichever_process_it_waits_in(opened: Opened) -> None:
    one, other = opened(), opened()
    await empty(one)
    batch = [ask(one, "batch") for _ in range(30)]
    await asyncio.sleep(0.2)
    for _ in range(5):
        await ask(other, "critical")

    assert sum(each.done() for each in batch) <= 20  # 5 of 10 a second: half a second, on an idle machine
    await gone(*batch)


async def test_a_flood_of_critical_in_one_process_leaves_batch_in_another_its_share(opened: Opened) -> None:
    one, other = opened(), opened()
    await empty(one)
    flood = [ask(one, "critical") for _ in range(200)]
    batch = [ask(other, "batch") for _ in range(10)]
    await asyncio.sleep(5)

    assert 2 <= sum(each.done() for each in batch) <= 5  # 5 % of 10 a second are 2.5
    await gone(*flood, *batch)


async def test_a_process_that_died_in_line_is_forgotten(opened: Opened) -> None:
    dead, living = opened(), opened()
    await empty(dead)
    waits = ask(dead, "critical", amounts=Amounts(8, 1, 1))
    await asyncio.sleep(0.1)

    async def never(*_: object) -> object:
        raise StoreUnavailable("it is dead")

    dead._client.run = never  # type: ignore[method-assign]
    began_s = now_s()
    for _ in range(10):
        await ask(living, "batch")

    assert now_s() - began_s < FORGOTTEN_AFTER_S + 20
    assert not waits.done()
    await gone(waits)


async def test_one_that_is_cancelled_leaves_no_hole(opened: Opened) -> None:
    one, other = opened(), opened()
    await empty(one)
    big = ask(one, "critical", amounts=Amounts(30, 1, 1))
    small = [ask(one, "critical"), ask(other, "normal")]
    await asyncio.sleep(0.3)
    await gone(big)
    began_s = now_s()
    await asyncio.gather(*small)

    assert now_s() - began_s < 2.5  # the big one would have come after three seconds


async def test_what_one_process_gives_back_another_gets(opened: Opened) -> None:
    slow = {"requests": 6_000, "input_tokens": 600, "burst_s": 60}  # by itself it would have it after 20 s
    one, other = opened(**slow), opened(**slow)
    taken = await one.reserve(ACCOUNT, lane="normal", amounts=Amounts(1, 400, 1), until=None)
    waits = ask(other, "normal", amounts=Amounts(1, 400, 1))
    await asyncio.sleep(0.2)
    assert not waits.done()
    one.settle(taken, Amounts(1, 50, 1))

    await asyncio.wait_for(waits, 10)


async def test_what_one_process_learns_holds_for_all(opened: Opened) -> None:
    one, other = opened(requests=None), opened(requests=None)
    await empty(one)
    await empty(other)
    one.learn(ACCOUNT, Heard(kind=Kind.ANSWERED, rate=RateHeaders(Told(limit=6_000), Told(), Told())))
    began_s = now_s()
    await asyncio.gather(*(ask(other, "critical") for _ in range(50)))

    assert now_s() - began_s < 20  # at the 50 a minute of the beginning: 60 s
    assert other._desk.books(ACCOUNT).per_minute().requests == 6_000


async def test_how_much_may_be_used_at_once_is_learned_for_all_and_what_was_kept_back_is_there_once(
    opened: Opened,
) -> None:
    one, other = opened(requests=None, burst_s=10.0), opened(requests=None, burst_s=10.0)
    first = await one.reserve(ACCOUNT, lane="critical", amounts=ONE, until=None)
    one.learn(ACCOUNT, answered(Told(limit=60, remaining=6)))
    other.learn(ACCOUNT, answered(Told(limit=60, remaining=5)))
    one.settle(first, ONE)
    granted = 0
    for budgets in (one, other, one, other):
        while await budgets.try_reserve(ACCOUNT, lane="critical", amounts=ONE) is not None:
            granted += 1

    assert one._desk.books(ACCOUNT).buckets[0].burst == other._desk.books(ACCOUNT).buckets[0].burst == 7
    assert granted in (4, 5)  # six were there, of which normal and batch keep 1.75


async def test_what_was_told_once_and_never_again_is_forgotten_for_all(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "FORGOTTEN_AFTER_S", 1.0)
    one, other = opened(requests=None), opened(requests=None)
    one.learn(ACCOUNT, answered(Told(limit=1, remaining=0)))
    await asyncio.wait_for(ask(one, "critical"), 5)  # there may be nearly one more than is told
    with pytest.raises(WaitTooLong):
        await one.reserve(ACCOUNT, lane="critical", amounts=ONE, until=now_s() + 5)
    await until(lambda: one._desk.books(ACCOUNT).is_stale(one._now_s()))
    await asyncio.wait_for(ask(one, "critical"), 5)  # of 50 a minute, and not of one

    assert await other.try_reserve(ACCOUNT, lane="critical", amounts=Amounts(0, 1, 1)) is not None
    assert other._desk.books(ACCOUNT).per_minute() == one._desk.books(ACCOUNT).per_minute()
    assert one._desk.books(ACCOUNT).per_minute().requests == 50


async def test_one_that_would_not_wait_and_is_cancelled_gives_back_what_it_was_granted(opened: Opened) -> None:
    budgets = opened()
    tries = asyncio.ensure_future(budgets.try_reserve(ACCOUNT, lane="critical", amounts=Amounts(5, 1, 1)))
    wake = budgets._desk.wake

    def cancelled_just_then(waiter: Waiter) -> bool:
        tries.cancel()
        return wake(waiter)

    budgets._desk.wake = cancelled_just_then  # type: ignore[method-assign]
    await asyncio.wait([tries])

    assert tries.cancelled()
    assert budgets._desk.books(ACCOUNT).concurrency.running == 0
    assert budgets._desk.books(ACCOUNT).buckets[0].level == pytest.approx(10, abs=0.1)


async def test_one_that_will_not_wait_does_not_wait_for_a_redis_that_does_not_answer(opened: Opened) -> None:
    budgets = opened()

    async def never(*_: object) -> object:
        await asyncio.sleep(5)
        raise StoreUnavailable("it does not answer")

    budgets._client.run = never  # type: ignore[method-assign]
    began_s = now_s()

    assert await budgets.try_reserve(ACCOUNT, lane="critical", amounts=ONE) is None
    assert now_s() - began_s < 2
    assert len(budgets._desk.books(ACCOUNT).lines) == 0
    await gone(*(each.task for each in budgets._ledgers.values() if each.task is not None))


async def test_an_answer_that_makes_no_sense_keeps_nobody_waiting_for_ever(opened: Opened) -> None:
    budgets = opened()
    run = budgets._client.run

    async def once(*_: object) -> object:
        budgets._client.run = run  # type: ignore[method-assign]
        return [b"1", b"no JSON", b""]

    budgets._client.run = once  # type: ignore[method-assign]
    waits = ask(budgets, "critical")
    await asyncio.sleep(0)
    task = budgets._ledger(budgets._desk.books(ACCOUNT)).task
    assert task is not None
    with pytest.raises(ValueError, match="Expecting value"):
        await task

    await asyncio.wait_for(waits, 30)


@pytest.mark.parametrize("ahead_s", [-600, 600])
async def test_a_clock_that_is_not_as_ours_makes_nobody_late(opened: Opened, ahead_s: float) -> None:
    one, other = opened(), opened()
    await empty(other)
    one._now_s()
    one._offset_s -= ahead_s  # as if Redis's were ahead by so much
    reservation = await one.reserve(ACCOUNT, lane="batch", amounts=ONE, until=now_s() + 20)

    assert reservation.account == ACCOUNT


async def test_a_clock_that_is_put_back_stops_nobody(opened: Opened, redis: RedisServer) -> None:
    one, dead = opened(), opened()
    await empty(one)
    one.learn(ACCOUNT, Heard(kind=Kind.RATE_LIMITED, retry_after_s=0.2))
    waits = ask(dead, "critical", amounts=Amounts(9, 1, 1))
    await asyncio.sleep(0.3)
    await gone(waits)
    budgets, key = opened(), f"{one._namespace}:budget:2:{ACCOUNT}"
    await budgets._client.run(AN_HOUR_LATER, [key])
    began_s = now_s()
    await ask(budgets, "batch")

    assert now_s() - began_s < 2


async def test_two_that_learn_at_the_same_time_both_are_heard(opened: Opened) -> None:
    one, other = opened(requests=None, input_tokens=None), opened(requests=None, input_tokens=None)
    await empty(one)
    await empty(other)
    one.learn(ACCOUNT, Heard(kind=Kind.ANSWERED, rate=RateHeaders(Told(limit=700), Told(), Told())))
    other.learn(ACCOUNT, Heard(kind=Kind.ANSWERED, rate=RateHeaders(Told(), Told(limit=70_000), Told())))
    for each in (one, other, one, other):
        await each.try_reserve(ACCOUNT, lane="critical", amounts=ONE)

    for each in (one, other):
        learned = each._desk.books(ACCOUNT).per_minute()
        assert (learned.requests, learned.input_tokens) == (700, 70_000)


async def test_a_spend_limit_that_one_process_meets_stops_all(opened: Opened) -> None:
    one, other = opened(), opened()
    await empty(one)
    waits = ask(other, "batch", amounts=Amounts(9, 1, 1))
    await asyncio.sleep(0.1)
    one.learn(ACCOUNT, Heard(kind=Kind.SPEND_LIMIT))

    with pytest.raises(WaitTooLong) as caught:
        await asyncio.wait_for(waits, 30)
    assert caught.value.wait.reason == "paused"
    with pytest.raises(WaitTooLong):
        await other.reserve(ACCOUNT, lane="critical", amounts=ONE, until=None)
    assert 0 < other.paused()[ACCOUNT] <= one.paused()[ACCOUNT] + 1


async def test_a_process_that_has_not_heard_of_a_pause_is_granted_nothing(opened: Opened) -> None:
    one, other = opened(), opened()
    assert await one.try_reserve(ACCOUNT, lane="normal", amounts=ONE) is not None
    one.learn(ACCOUNT, Heard(kind=Kind.SPEND_LIMIT))
    assert await one.try_reserve(ACCOUNT, lane="normal", amounts=ONE) is None

    with pytest.raises(WaitTooLong):
        await asyncio.wait_for(other.reserve(ACCOUNT, lane="critical", amounts=ONE, until=None), 30)


async def test_one_that_cannot_be_in_time_is_told_at_once_also_where_others_are_before_it(opened: Opened) -> None:
    one, other = opened(), opened()
    await empty(one)
    before = [ask(one, "critical") for _ in range(100)]
    await asyncio.sleep(0.3)
    began_s = now_s()
    with pytest.raises(WaitTooLong) as caught:
        await other.reserve(ACCOUNT, lane="batch", amounts=Amounts(5, 1, 1), until=began_s + 3)

    assert now_s() - began_s < 3
    assert caught.value.wait.seconds > 3
    await gone(*before)


async def test_while_redis_is_away_nobody_is_granted_and_then_all_are(opened: Opened, own_redis: RedisServer) -> None:
    budgets = opened(url=own_redis.url)
    await empty(budgets)
    own_redis.kill()
    waits = [ask(budgets, "critical") for _ in range(3)]
    assert await budgets.try_reserve(ACCOUNT, lane="normal", amounts=ONE) is None
    await asyncio.sleep(0.5)
    assert not any(each.done() for each in waits)
    own_redis.start()  # and has forgotten what was spent

    await asyncio.wait_for(asyncio.gather(*waits), 30)


async def test_a_request_takes_one_round_trip_and_settling_goes_with_others(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.state.redis.budgets.SETTLE_WITHIN_S", 60)
    budgets = opened(requests=600_000, burst_s=10.0)
    for _ in range(50):
        reservation = await budgets.reserve(ACCOUNT, lane="normal", amounts=ONE, until=None)
        budgets.settle(reservation, Amounts(1, 0, 0))

    assert budgets.steps <= 55


async def test_a_lane_whose_turn_for_a_call_has_come_and_that_waits_for_tokens_holds_up_nobody(opened: Opened) -> None:
    budgets = opened(requests=60_000, input_tokens=6_000, output_tokens=60_000, burst_s=60.0, concurrency=1)
    first = await budgets.reserve(ACCOUNT, lane="critical", amounts=Amounts(1, 600, 1), until=None)
    waits = ask(budgets, "batch", amounts=Amounts(1, 900, 1))
    budgets.settle(first, first.amounts)

    for _ in range(40):  # by its share of the calls, batch has one of twenty
        async with asyncio.timeout(30):
            each = await budgets.reserve(ACCOUNT, lane="critical", amounts=Amounts(1, 1, 1), until=None)
        budgets.settle(each, each.amounts)

    assert not waits.done()
    await gone(waits)
