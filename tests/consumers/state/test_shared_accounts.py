"""Several processes share one budget: what is promised for one process holds for all of them together."""

import asyncio
import gc
import json
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from typing_extensions import override

from consumers.limits.account import Waiter
from consumers.limits.base import Amounts, BucketHeaders, Feedback, Kind, RateHeaders, Reservation
from consumers.limits.budgets import Budgets
from consumers.state.base import StoreUnavailable
from consumers.state.redis.client import RedisClient, Script
from consumers.state.redis.shared_budget import FORGOTTEN_AFTER_S, FORM, shared_budgets
from service.simulated.buckets import RateLimitBucket
from tests.support.budget import ACCOUNT, spec
from tests.support.redis import RedisServer
from tests.support.spender import BURST_S, PER_MINUTE

pytestmark = pytest.mark.timing

ONE = Amounts(1, 1, 1)
AN_HOUR_LATER = Script(
    """
local account = cmsgpack.unpack(redis.call('GET', KEYS[1]))
account.at, account.stopped_until = account.at + 3600, account.stopped_until + 3600
account.waiting['dead'] = {expires = account.at + 2, heads = {critical = {arrived = account.at, amounts = {10, 1, 1}}},
  sums = {critical = {10, 1, 1}}}
return redis.call('SET', KEYS[1], cmsgpack.pack(account))
"""
)
"""State as if written by a clock that was an hour ahead, with a waiter that has died since."""
KEPT = Script("return redis.call('SET', KEYS[1], ARGV[1])")
Shared = Budgets
Opened = Callable[..., Shared]


class FaultyClient(RedisClient):
    """A client of a Redis that fails while `fault` is set."""

    fault: Exception | None = None
    fault_after_s = 0.0
    next_answer: bytes | None = None
    runs = 0

    @override
    async def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int | float) -> Any:
        if self.fault is not None:
            fault = self.fault
            await asyncio.sleep(self.fault_after_s)
            raise fault
        self.runs += 1
        answer, self.next_answer = self.next_answer, None
        return await super().run(script, keys, *arguments) if answer is None else answer


@pytest.fixture
def namespace() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
async def opened(redis: RedisServer, namespace: str) -> AsyncIterator[Opened]:
    """Opens further processes that share one budget: 600 requests a minute and a burst of one second, unless given
    otherwise."""
    async with AsyncExitStack() as stack:

        def open_one(*, client: RedisClient | None = None, **given: Any) -> Shared:
            client = client or RedisClient(redis.url)
            wanted: dict[str, Any] = {"requests": 600, "burst_s": 1.0, **given}
            of = spec(**wanted)
            budgets = shared_budgets(client, namespace=namespace, spec=of)
            stack.push_async_callback(client.aclose)
            stack.push_async_callback(budgets.aclose)
            return budgets

        yield open_one


async def empty(budgets: Shared) -> None:
    for lane in ("critical", "normal", "batch"):
        while await budgets.try_reserve(ACCOUNT, lane=lane, amounts=ONE) is not None:
            pass


def ask(budgets: Shared, lane: str, *, amounts: Amounts = ONE) -> asyncio.Task[Reservation]:
    return asyncio.ensure_future(budgets.reserve(ACCOUNT, lane=lane, amounts=amounts, until=None))


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def gone(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_three_processes_do_not_exceed_the_budget_and_every_lane_gets_its_share(redis: RedisServer) -> None:
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
    judge = RateLimitBucket(PER_MINUTE, burst_s=BURST_S, clock=lambda: clock_s)
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


async def test_the_waiting_requests_of_a_process_that_died_are_forgotten(opened: Opened, redis: RedisServer) -> None:
    client = FaultyClient(redis.url)
    dead, living = opened(client=client), opened()
    await empty(dead)
    waits = ask(dead, "critical", amounts=Amounts(8, 1, 1))
    await asyncio.sleep(0.1)
    client.fault = StoreUnavailable("it is dead")
    began_s = now_s()
    for _ in range(10):
        await ask(living, "batch")

    assert now_s() - began_s < FORGOTTEN_AFTER_S + 20
    assert not waits.done()
    await gone(waits)


async def test_limits_learned_by_one_process_apply_to_all(opened: Opened) -> None:
    one, other = opened(requests=None), opened(requests=None)
    await empty(one)
    await empty(other)
    one.learn(
        ACCOUNT,
        Feedback(kind=Kind.ANSWERED, rate=RateHeaders(BucketHeaders(limit=6_000), BucketHeaders(), BucketHeaders())),
    )
    began_s = now_s()
    await asyncio.gather(*(ask(other, "critical") for _ in range(50)))

    assert now_s() - began_s < 20  # at the initial 50 a minute: 60 s
    assert other.queue(ACCOUNT).account.per_minute().requests == 6_000


async def test_a_request_that_would_not_wait_and_is_cancelled_gives_its_grant_back(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = opened()
    tries = asyncio.ensure_future(budgets.try_reserve(ACCOUNT, lane="critical", amounts=Amounts(5, 1, 1)))
    wake = Waiter.wake

    def cancelled_just_then(waiter: Waiter) -> None:
        tries.cancel()
        wake(waiter)

    monkeypatch.setattr(Waiter, "wake", cancelled_just_then)
    await asyncio.wait([tries])

    assert tries.cancelled()
    assert budgets.queue(ACCOUNT).account.calls.running == 0
    assert budgets.queue(ACCOUNT).account.buckets[0].level == pytest.approx(10, abs=0.1)


async def test_a_request_that_will_not_wait_does_not_wait_for_a_silent_redis(
    opened: Opened, redis: RedisServer
) -> None:
    client = FaultyClient(redis.url)
    budgets = opened(client=client)
    client.fault, client.fault_after_s = StoreUnavailable("it does not answer"), 20.0
    began_s = now_s()

    assert await budgets.try_reserve(ACCOUNT, lane="critical", amounts=ONE) is None
    assert now_s() - began_s < 10
    assert len(budgets.queue(ACCOUNT).account.lines) == 0
    client.fault = None


async def test_a_nonsensical_answer_from_redis_blocks_no_request_for_ever(opened: Opened, redis: RedisServer) -> None:
    client = FaultyClient(redis.url)
    client.next_answer = b"no JSON"
    unforeseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unforeseen.append(context))

    await asyncio.wait_for(ask(opened(client=client), "critical"), 30)
    gc.collect()
    assert [str(each["exception"])[:15] for each in unforeseen] == ["Expecting value"]


async def test_a_clock_that_is_set_back_stops_no_request(opened: Opened, redis: RedisServer, namespace: str) -> None:
    one, dead = opened(), opened()
    await empty(one)
    one.learn(ACCOUNT, Feedback(kind=Kind.RATE_LIMITED, retry_after_s=0.2))
    waits = ask(dead, "critical", amounts=Amounts(9, 1, 1))
    await asyncio.sleep(0.3)
    await gone(waits)
    client = RedisClient(redis.url)
    budgets = opened(client=client)
    await client.run(AN_HOUR_LATER, [f"{namespace}:budget:{FORM}:{ACCOUNT}"])
    began_s = now_s()
    await ask(budgets, "batch")

    assert now_s() - began_s < 60, "less than the hour"


@pytest.mark.parametrize("kept", ["\xff\x00 no account", "\xcd\x00"])
async def test_a_damaged_account_starts_again(opened: Opened, redis: RedisServer, namespace: str, kept: str) -> None:
    budgets, client = opened(), RedisClient(redis.url)
    for _ in range(2):
        budgets.settle(await ask(budgets, "critical"), ONE)
        await client.run(KEPT, [f"{namespace}:budget:{FORM}:{ACCOUNT}"], kept)
    await client.aclose()


async def test_processes_with_different_lanes_share_one_budget(opened: Opened) -> None:
    """In one, `vip` is the most urgent lane; the other does not know it. The rank decides between their requests."""
    vip = {"vip": 0.1, "critical": 0.3, "batch": 0.05}
    with_vip = opened(requests=120, shares=vip, ranks={"vip": 5, "critical": 10, "batch": 30})
    without = opened(requests=120)
    await empty(without)
    order: list[str] = []

    async def one(budgets: Shared, lane: str) -> None:
        await ask(budgets, lane)
        order.append(lane)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(one(without, "batch"))
        await asyncio.sleep(0.1)
        for _ in range(3):
            group.create_task(one(with_vip, "vip"))

    assert [lane for lane in order[:5] if lane == "vip"] == ["vip"] * 3
    bucket = without.queue(ACCOUNT).account.buckets[0]
    assert len(bucket.savings) == len(with_vip.queue(ACCOUNT).account.buckets[0].savings) == 3
    assert sum(max(0.0, saved) for saved in bucket.savings) <= max(0.0, bucket.level) + 1e-6


async def test_what_two_processes_learn_at_the_same_time_is_both_kept(opened: Opened) -> None:
    one, other = opened(requests=None, input_tokens=None), opened(requests=None, input_tokens=None)
    await empty(one)
    await empty(other)
    one.learn(
        ACCOUNT,
        Feedback(kind=Kind.ANSWERED, rate=RateHeaders(BucketHeaders(limit=700), BucketHeaders(), BucketHeaders())),
    )
    other.learn(
        ACCOUNT,
        Feedback(kind=Kind.ANSWERED, rate=RateHeaders(BucketHeaders(), BucketHeaders(limit=70_000), BucketHeaders())),
    )
    for each in (one, other, one, other):
        await each.try_reserve(ACCOUNT, lane="critical", amounts=ONE)

    for each in (one, other):
        learned = each.queue(ACCOUNT).account.per_minute()
        assert (learned.requests, learned.input_tokens) == (700, 70_000)


async def test_while_redis_is_away_nothing_is_granted_and_afterwards_everything_is(
    opened: Opened, own_redis: RedisServer
) -> None:
    budgets = opened(client=RedisClient(own_redis.url))
    await empty(budgets)
    own_redis.kill()
    waits = [ask(budgets, "critical") for _ in range(3)]
    assert await budgets.try_reserve(ACCOUNT, lane="normal", amounts=ONE) is None
    await asyncio.sleep(0.5)
    assert not any(each.done() for each in waits)
    own_redis.start()  # and has lost what was spent

    await asyncio.wait_for(asyncio.gather(*waits), 30)
