"""What a process grants by itself, Redis's script grants as well: the same requests, at the same times."""

import json
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import redis as redis_client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.limits.account import Account
from consumers.limits.amounts import Amounts
from consumers.limits.base import Reservation
from consumers.limits.order import Waiter
from consumers.limits.spec import DEFAULT_LANES, BudgetSpec, Caps
from consumers.state.redis.budget_ledger import Ledger
from consumers.state.redis.budget_script import STEP
from tests.support.examples import examples
from tests.support.redis import RedisServer

AGEING = {name: replace(lane, boost_s=10.0 if name == "batch" else None) for name, lane in DEFAULT_LANES.items()}
CAPS = {"a": Caps(requests=60, input_tokens=6_000, output_tokens=600)}
NAMES = tuple(DEFAULT_LANES)
BEGAN_S = 1_000_000.0
AT_GIVEN_TIME = STEP.text.replace("redis.call('TIME')", "cjson.decode(ARGV[3])")
"""Redis's clock, set by hand."""


@dataclass
class ByItself:
    """One process that decides by itself."""

    account: Account
    now_s: float = BEGAN_S
    running: list[Reservation] = field(default_factory=list)
    granted: list[tuple[float, int, Amounts]] = field(default_factory=list)

    def join(self, lane: int, amounts: Amounts, waited_s: float) -> None:
        self.account.refill(self.now_s)
        self.account.join(Waiter(lane, amounts, arrived_s=self.now_s - waited_s))

    def settle(self, which: int, used: Amounts) -> None:
        if self.running:
            self.account.settle(self.running.pop(which % len(self.running)), used, self.now_s)

    def step(self) -> None:
        while (found := self.account.turn(self.now_s)[0]) is not None:
            assert found.reservation is not None
            self.running.append(found.reservation)
            self.granted.append((self.now_s, found.lane, found.amounts))


@dataclass
class ByRedis(ByItself):
    """One whose grants come from the script; its own account only keeps the lines."""

    server: Any = None
    boosts: list[float] = field(default_factory=list)
    key: str = field(default_factory=lambda: f"same-{secrets.token_hex(6)}")

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.account)

    def settle(self, which: int, used: Amounts) -> None:
        if self.running:
            done = self.running.pop(which % len(self.running))
            over = [amount - spent for amount, spent in zip(done.amounts, used, strict=True)]
            self.ledger.give_back(NAMES.index(done.lane), over, done.own)

    def step(self) -> None:
        again = True
        while again:
            lanes = range(len(NAMES))
            waiters = [each for lane in lanes for each in self.account.lines.firsts(lane, 16)]
            asked, _ = self.ledger.asked(waiters, room=len(waiters), now_s=self.now_s)
            asked |= {"process": "one", "expires_s": 1e6, "shares": self.account.shares, "boosts": self.boosts}
            time = json.dumps([int(self.now_s), round(1e6 * (self.now_s % 1))])
            said = self.server.eval(AT_GIVEN_TIME, 1, self.key, json.dumps(asked), json.dumps([]), time)
            reply = json.loads(said[1])
            self.ledger.version = reply["version"]
            for index, *own in reply["granted"]:
                waiter = waiters[index - 1]
                lane, amounts = waiter.lane, waiter.amounts
                reservation = Reservation(account="a", lane=NAMES[lane], amounts=amounts, own=Amounts(*own))
                assert self.account.begin(waiter, reservation)
                self.running.append(reservation)
                self.granted.append((self.now_s, lane, amounts))
            again = bool(reply["granted"])
        for bucket, level, parts in zip(self.account.buckets, reply["levels"], reply["parts"], strict=True):
            bucket.correct(level, parts, self.now_s)


amounts = st.builds(
    Amounts,
    st.just(1.0),
    st.integers(1, 1_500).map(float),  # the bucket holds 1,000
    st.integers(1, 60).map(float),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 2), amounts, st.sampled_from([0.0, 0.0, 5.0, 30.0])),
        st.tuples(st.just("pass"), st.integers(1, 200).map(lambda eighths: eighths / 8), st.none(), st.none()),
        st.tuples(st.just("settle"), st.integers(0, 20), amounts, st.none()),
    ),
    min_size=15,
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(played=steps, ages=st.booleans())
def test_a_process_by_itself_and_redis_grant_the_same(
    redis: RedisServer, played: list[tuple[Any, ...]], ages: bool
) -> None:
    spec = BudgetSpec(accounts=CAPS, lanes=AGEING if ages else DEFAULT_LANES)
    boosts = [-1 if lane.boost_s is None else lane.boost_s for lane in spec.lanes.values()]
    with redis_client.Redis.from_url(redis.url) as server:
        one = ByItself(Account("a", spec, now_s=BEGAN_S))
        other = ByRedis(Account("a", spec, now_s=BEGAN_S), server=server, boosts=boosts)
        for each in (one, other):
            each.step()
        for what, which, wanted, waited_s in played:
            for each in (one, other):
                match what:
                    case "join":
                        each.join(which, wanted, waited_s)
                    case "pass":
                        each.now_s += which
                    case "settle":
                        each.settle(which, wanted)
                each.step()
            assert [grant[1:] for grant in one.granted] == [grant[1:] for grant in other.granted], what
            for mine, its in zip(one.account.buckets, other.account.buckets, strict=True):
                assert abs(mine.level - its.level) < 1e-6
                assert all(abs(x - y) < 1e-6 for x, y in zip(mine.parts, its.parts, strict=True))
