"""A process alone and Redis's script grant the same requests at the same times.

Both play the same random story: requests join, leave and end, time passes, providers answer. After each step the
grants and their order, the levels, what the lanes have saved, and what was learned must be the same.

Limits of concurrency and `retry-after` are not played: while a process may begin no call it tells Redis of no waiter,
so that it holds up no other process, and its lanes save no more than their reserves meanwhile.
"""

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis as redis_client
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from consumers.limits.account import Account, Waiter
from consumers.limits.base import (
    NOTHING,
    AccountCaps,
    Amounts,
    BucketHeaders,
    BudgetSpec,
    Feedback,
    Kind,
    RateHeaders,
    Reservation,
)
from consumers.limits.budgets import BudgetQueue, OwnBudgetQueue, loop_s
from consumers.state.redis import shared_budget
from consumers.state.redis.client import BUDGET, RedisClient, Script
from consumers.state.redis.shared_budget import SharedBudgetQueue
from tests.support.examples import examples
from tests.support.redis import RedisServer

pytestmark = pytest.mark.slow

SET = AccountCaps(requests=60, input_tokens=6_000, output_tokens=600)
BEGAN_S = 1_000_000.0
AT_GIVEN_TIME = BUDGET.text.replace("redis.call('TIME')", "cjson.decode(ARGV[2])")
"""Redis's script, with its clock set by the test."""


class Loop(asyncio.SelectorEventLoop):
    """A loop whose time the test sets."""

    now_s = BEGAN_S

    def time(self) -> float:
        return self.now_s


class ByTheLoop(RedisClient):
    """Runs the script at the loop's time and returns at once."""

    def __init__(self, server: Any) -> None:
        self.server = server

    @override
    async def run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int | float) -> Any:
        micros = round(1e6 * asyncio.get_running_loop().time())
        time = json.dumps([micros // 1_000_000, micros % 1_000_000])
        return self.server.eval(AT_GIVEN_TIME, len(keys), *keys, *arguments, time)


class Noted(Waiter):
    """Records the time of its turn."""

    player: "Player"

    @override
    def wake(self) -> None:
        assert self.reservation is not None
        self.player.waiting.remove(self)
        self.player.running.append(self.reservation)
        self.player.granted.append((self.lane, self.amounts))
        super().wake()


@dataclass
class Player:
    """Plays a random story with one account."""

    queue: BudgetQueue
    waiting: list[Waiter] = field(default_factory=list)
    running: list[Reservation] = field(default_factory=list)
    granted: list[tuple[int, Amounts]] = field(default_factory=list)

    @property
    def account(self) -> Account:
        return self.queue.account

    async def join(self, lane: int, amounts: Amounts, waited_s: float) -> None:
        now_s = loop_s()
        waiter = Noted(lane, amounts, arrived_s=now_s - waited_s)
        waiter.player = self
        self.account.refill(now_s)
        self.waiting.append(waiter)
        self.account.join(waiter)

    async def leave(self, which: int) -> None:
        if self.waiting:
            self.account.refill(loop_s())
            self.account.leave(self.waiting.pop(which % len(self.waiting)))

    async def settle(self, which: int, used: Amounts) -> None:
        if self.running:
            self.queue.settle(self.running.pop(which % len(self.running)), used)

    async def decided(self) -> None:
        """Let the account grant until nothing more can be granted."""
        self.queue.step()
        for _ in range(1000):
            if not isinstance(self.queue, SharedBudgetQueue) or not self.queue.is_asking:
                return
            await asyncio.sleep(0)
        raise AssertionError("the script is asked again and again")


def told(limit: int | None, remaining: int | None) -> BucketHeaders:
    return BucketHeaders(limit=limit, remaining=remaining)


def heard(kind: Kind, tokens: tuple[int | None, int | None]) -> Feedback:
    limit, remaining = tokens
    rate = None if limit is None else RateHeaders(told(60, None), told(limit, remaining), told(None, None))
    counted = Amounts(1, 100, 10) if kind is Kind.ANSWERED else NOTHING
    return Feedback(kind=kind, rate=rate, counted=counted)


amounts = st.builds(
    Amounts,
    st.just(1.0),
    st.integers(1, 1_500).map(float),  # with configured limits the bucket holds 1,000
    st.integers(1, 60).map(float),
)
responses = st.builds(
    heard,
    st.sampled_from([Kind.ANSWERED, Kind.ANSWERED, Kind.RATE_LIMITED, Kind.FAILED]),
    st.sampled_from([(None, None), (6_000, None), (6_000, 3_000), (9_000, 1_000), (4_000, 0)]),
)
joins = st.tuples(st.just("join"), st.integers(0, 2), amounts, st.sampled_from([0.0, 0.0, 5.0, 30.0]))
passes = st.tuples(st.just("pass"), st.integers(1, 200).map(lambda eighths: eighths / 8))
settles = st.tuples(st.just("settle"), st.integers(0, 20), amounts)
leaves = st.tuples(st.just("leave"), st.integers(0, 20))
learns = st.tuples(st.just("learn"), responses)
steps = st.lists(st.one_of(joins, joins, passes, settles, leaves, learns), min_size=15, max_size=60)
specs = st.builds(
    lambda caps: BudgetSpec(accounts={"a": caps}),
    st.sampled_from([SET, AccountCaps(requests=60), AccountCaps()]),
)


async def play(one: Player, other: Player, story: Sequence[tuple[Any, ...]]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    await other.decided()  # so that Redis knows the account from the start
    for what, *of in story:
        for player in (one, other):
            match what:
                case "join":
                    await player.join(*of)
                case "leave":
                    await player.leave(*of)
                case "settle":
                    await player.settle(*of)
                case "learn":
                    player.queue.learn(of[0])
        if what == "pass":
            loop.now_s += of[0]
        for player in (one, other):
            await player.decided()
        assert one.granted == other.granted, what
        for name in ("announced", "shown", "factor", "growth", "is_silent"):
            assert getattr(one.account.learned, name) == pytest.approx(getattr(other.account.learned, name)), (
                what,
                name,
            )
        assert one.account.stopped_s(loop_s()) == pytest.approx(other.account.stopped_s(loop_s()), abs=1e-5), what
        for mine, its in zip(one.account.buckets, other.account.buckets, strict=True):
            assert mine.level == pytest.approx(its.level, abs=1e-5), what
            assert all(abs(x - y) < 1e-5 for x, y in zip(mine.savings, its.savings, strict=True)), (
                what,
                mine.savings,
                its.savings,
            )


GROWS_WHILE_ANNOUNCED = [
    *[("pass", 1 / 8)] * 12,
    ("learn", heard(Kind.RATE_LIMITED, (None, None))),
    ("pass", 10.0),
    ("learn", heard(Kind.ANSWERED, (6_000, None))),
]
"""A limit is announced for the first time by the response that also raises it again after a refusal."""


@example(story=GROWS_WHILE_ANNOUNCED, spec=BudgetSpec(accounts={"a": AccountCaps()}))
@settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(story=steps, spec=specs)
def test_a_process_alone_and_redis_grant_the_same_requests_at_the_same_times(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, story: list[tuple[Any, ...]], spec: BudgetSpec
) -> None:
    monkeypatch.setattr(shared_budget, "FORGOTTEN_AFTER_S", 1e6)  # more time passes between two steps of a story

    async def both() -> None:
        account = Account("a", spec, now_s=BEGAN_S)
        shared = SharedBudgetQueue(ByTheLoop(server), f"same-{secrets.token_hex(6)}", account)
        one, other = Player(OwnBudgetQueue(Account("a", spec, now_s=BEGAN_S))), Player(shared)
        await play(one, other, story)
        await one.queue.aclose()
        await other.queue.aclose()

    with redis_client.Redis.from_url(redis.url) as server, asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(both())
