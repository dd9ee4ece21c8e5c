"""Measures the CPU that one grant of the budget gate costs, with no waiting requests and with 10,000.

There is no provider and no broker: each request reserves, is granted and settles, as in `consumers/gates/budget.py`.
"at once": the budget suffices. "woken": the request waits until the budget is refilled enough, or another request has
given enough back. Time is virtual, so that the limit does not slow the measurement. CPU is that of the whole process,
including the event loop.

    .venv/bin/python benchmarks/gate.py [--grants 20000] [--waiting 10000] [--rounds 5] [--redis redis://…]

Aim: under 50 µs a grant, under 100 µs with 10,000 waiters. With `--redis`, the same is measured with a budget that is
shared through that Redis, in real time, with one request and with 100 at a time; the aim is one round trip.
"""

import argparse
import asyncio
import gc
import secrets
import selectors
import statistics
import time

from consumers.limits.accounts import Accounts
from consumers.limits.base import Amounts
from consumers.limits.own_turns import OwnTurns, own_accounts
from consumers.limits.spec import AccountCaps, BudgetSpec
from consumers.state.redis.client import RedisClient
from consumers.state.redis.shared_turns import shared_accounts

LANES = ("critical", "normal", "batch")
RESERVED, USED = Amounts(1, 800, 300), Amounts(1, 790, 120)


class Instant(selectors.SelectSelector):
    """A selector that does not wait: it adds each timeout to `passed_s` and returns at once."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.passed_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the sum of all its waits."""

    def __init__(self) -> None:
        self._instant = Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.passed_s


def budgets(per_minute: float) -> Accounts[OwnTurns]:
    caps = AccountCaps(requests=per_minute, input_tokens=per_minute * 10_000, output_tokens=per_minute * 10_000)
    return own_accounts(BudgetSpec(accounts={"a": caps}))


async def with_room(grants: int) -> float:
    """The CPU of one grant in µs, if the budget always suffices."""
    some = budgets(1e9)
    began = time.process_time()
    for number in range(grants):
        lane = LANES[number % 3]
        some.settle(await some.reserve("a", lane=lane, amounts=RESERVED, until=None), USED)
    return 1e6 * (time.process_time() - began) / grants


async def woken(grants: int, waiting: int, *, until_s: float | None) -> tuple[float, float]:
    """The CPU of one grant in µs while `waiting` requests wait at any time, and the number of timers that fired for
    each grant. `until_s`: each request's deadline, in seconds from its arrival."""
    some = budgets(60)
    loop = asyncio.get_running_loop()
    left = iter(range(grants))

    async def always(lane: str) -> None:
        for _ in left:
            until = None if until_s is None else loop.time() + until_s
            some.settle(await some.reserve("a", lane=lane, amounts=RESERVED, until=until), USED)

    tasks = [asyncio.ensure_future(always(LANES[number % 3])) for number in range(waiting)]
    await asyncio.sleep(0)
    began = time.process_time()
    await asyncio.gather(*tasks)
    return 1e6 * (time.process_time() - began) / grants, some.turns("a").wake_ups / grants


async def shared(url: str, grants: int, at_once: int) -> str:
    """A line of text with the cost of a grant through Redis, if the budget always suffices."""
    client = RedisClient(url)
    caps = AccountCaps(requests=1e9, input_tokens=1e12, output_tokens=1e12)
    some = shared_accounts(client, namespace=f"benchmark-{secrets.token_hex(4)}", spec=BudgetSpec(accounts={"a": caps}))
    left = iter(range(grants))
    took_ms: list[float] = []

    async def always() -> None:
        for number in left:
            began_s = time.perf_counter()
            reservation = await some.reserve("a", lane=LANES[number % 3], amounts=RESERVED, until=None)
            took_ms.append(1000 * (time.perf_counter() - began_s))
            some.settle(reservation, USED)

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(always() for _ in range(at_once)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await some.aclose()
    await client.aclose()
    return (
        f"{1e6 * cpu / grants:7.1f} CPU-µs, {some.turns('a').steps / grants:.2f} round trips, "
        f"{statistics.median(took_ms):.2f} ms each, {grants / wall:.0f}/s"
    )


def main(grants: int, waiting: int, rounds: int) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        print(f"{rounds} rounds of {grants} grants; medians (fastest) of CPU-µs a grant: reserve, grant, settle")
        for what, story in (
            ("at once", lambda: runner.run(with_room(grants))),
            ("woken, 10 wait", lambda: runner.run(woken(grants, 10, until_s=None))[0]),
            (f"woken, {waiting} wait", lambda: runner.run(woken(grants + waiting, waiting, until_s=None))[0]),
            ("the same, with deadlines", lambda: runner.run(woken(grants + waiting, waiting, until_s=1e6))[0]),
        ):
            found = []
            for _ in range(rounds):
                gc.collect()
                found.append(story())
            print(f"  {what:26} {statistics.median(found):7.1f}  ({min(found):.1f})")
        _, timers = runner.run(woken(grants, 10, until_s=None))
        print(f"  timers that fired a grant, 10 wait: {timers:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grants", type=int, default=20_000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--redis", metavar="URL")
    options = parser.parse_args()
    main(options.grants, options.waiting, options.rounds)
    if options.redis:
        for at_once in (1, 100):
            figures = asyncio.run(shared(options.redis, options.grants // 10, at_once))
            print(f"  through Redis, {at_once:3} at once  {figures}")
