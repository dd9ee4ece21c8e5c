"""The faults, how each is caused and repaired, in what order they come, and how a service is judged under them.

A fault is a function that breaks something, keeps it broken for so many seconds, repairs it, and returns what it had
broken; `FAULTS` has all by their names in the catalogue. START THERE for a new one."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from consumers.settle import FAILPOINTS
from tests.faults.checker import SLOTS_LOST, Disturbed, Verdict, Violation
from tests.faults.ground import SETTLED_S, SLOTS, FileStore, Ground, RedisStore
from tests.faults.nodes import Node
from tests.faults.proxy import FROM, Proxy
from tests.faults.unanswered import all_answered
from tests.support.waiting import until

Break = Callable[[Ground, random.Random, float], Awaitable[str]]
MEMORY = ("set_vm_memory_high_watermark", "0.00001", "0.6")
DISK = ("set_disk_free_limit", "999000GB", "50MB")
ALL = "all workers"


# ---- workers ---------------------------------------------------------------------------------------------------------


def told(*signals: signal.Signals, ends: bool = False) -> Break:
    """Send these signals to one worker, with the fault's time between them. `ends`: it ends after the last one."""

    async def tell(ground: Ground, rng: random.Random, lasts_s: float) -> str:
        worker = rng.choice(ground.workers)
        for number, each in enumerate(signals):
            await asyncio.sleep((lasts_s or 0.2) if number else 0)
            worker.send(each)
        if ends:
            await worker.ended()
        return f"worker {worker.number}"

    return tell


async def all_killed(ground: Ground, rng: random.Random, _: float) -> str:
    for worker in ground.workers:
        worker.send(signal.SIGKILL)
    await asyncio.sleep(0)
    return ALL


async def dying_between_steps(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    """One worker dies again and again, between any two of: store, publish, confirm, acknowledge."""
    worker = rng.choice(ground.workers)
    places = FAILPOINTS - {"after_keep"}
    worker.environ["LANEKEEPER_FAILPOINTS"] = ",".join(f"{place}:0.01" for place in sorted(places))
    worker.send(signal.SIGKILL)
    await asyncio.sleep(lasts_s)
    del worker.environ["LANEKEEPER_FAILPOINTS"]
    worker.send(signal.SIGKILL)
    return f"worker {worker.number}"


# ---- the broker and its nodes ----------------------------------------------------------------------------------------


def node(*begin: Callable[[Node], Awaitable[object]], end: Callable[[Node], Awaitable[object]]) -> Break:
    """Do this to a node, and undo it after the fault's time."""

    async def disturb(ground: Ground, rng: random.Random, lasts_s: float) -> str:
        found = ground.node(rng)
        for each in begin:
            await each(found)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            await end(found)
        return found.name

    return disturb


def alarm(setting: str, low: str, usual: str) -> Break:
    return node(lambda it: it.run("rabbitmqctl", setting, low), end=lambda it: it.run("rabbitmqctl", setting, usual))


async def leader_killed(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    """Kill the leader of a lane's queue, but not the node from which replies are read: that would delay our own
    reading."""
    lanes = rng.sample(("lane.critical", "lane.normal", "lane.batch"), 3)
    leaders = {lane: await ground.broker.leader_of(lane) for lane in lanes}
    led = {lane: node for lane, node in leaders.items() if node != ground.broker.nodes[-1]}
    lane, leader = next(iter(led.items()), (lanes[0], ground.node(rng)))
    await leader.kill()
    await asyncio.sleep(lasts_s)
    await leader.start()
    # Leaders do not move back by themselves: after three such faults one node would lead every queue.
    await leader.run("rabbitmq-queues", "--quiet", "rebalance", "quorum")
    return f"leader of {', '.join(each for each in lanes if leaders[each] == leader)}" if lane in led else leader.name


async def rolling_restart(ground: Ground, rng: random.Random, _: float) -> str:
    for each in ground.broker.nodes:
        await each.drain()
        await each.restart()
        await ground.broker.whole()
    return "each node in turn"


async def connections_closed(ground: Ground, rng: random.Random, _: float) -> str:
    for each in ground.broker.nodes:
        await each.run("rabbitmqctl", "--quiet", "close_all_connections", "fault suite")
    return "all connections, clients' too"


async def lane_full(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    """All calls hang, and a lane accepts hardly any message: publishers are refused, and try again."""
    first, lane = ground.broker.nodes[0], rng.choice(("critical", "normal", "batch"))
    policy = '{"max-length": 2, "overflow": "reject-publish"}'
    await first.run("rabbitmqctl", "--quiet", "set_policy", "--apply-to", "queues", "full", f"^lane\\.{lane}$", policy)
    for worker in ground.workers:
        worker.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        for worker in ground.workers:
            worker.send(signal.SIGCONT)
        await first.run("rabbitmqctl", "--quiet", "clear_policy", "full")
    return f"lane.{lane}"


# ---- connections -----------------------------------------------------------------------------------------------------


def lines(do: Callable[[Proxy], object], *, of_one: bool = False) -> Break:
    """Do this to the connections of all workers to the broker, or of one, and mend them after the fault's time; at once
    if it has none."""

    async def disturb(ground: Ground, rng: random.Random, lasts_s: float) -> str:
        worker = rng.choice(ground.workers)
        for each in ground.lines_of(worker) if of_one else ground.every_line:
            do(each)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            if lasts_s:
                for each in ground.every_line:
                    await each.mend()
        return f"worker {worker.number}" if of_one else ALL

    return disturb


frozen = Proxy.freeze
half_open = lambda line: line.freeze(FROM)  # noqa: E731
slow = partial(Proxy.slow, delay_s=0.4, jitter_s=0.3, bytes_per_s=64_000)


async def cut(ground: Ground, rng: random.Random, _: float) -> str:
    return await lines(lambda line: line.cut(after_bytes=rng.randrange(1, 500)))(ground, rng, 0.5)


def line_to(what: str, line_of: Callable[[Ground], Proxy], *, is_gone: bool) -> Break:
    """Nobody can be reached over this connection, or nothing passes through it."""

    async def disturb(ground: Ground, rng: random.Random, lasts_s: float) -> str:
        line = line_of(ground)
        if is_gone:
            await line.refuse()
            line.reset()
        else:
            line.freeze()
        await asyncio.sleep(lasts_s)
        await line.mend()
        return what

    return disturb


# ---- provider, store, applications -----------------------------------------------------------------------------------


def failing(**shares: float) -> Break:
    """Let the simulated API fail this share of its calls."""

    async def fails(ground: Ground, rng: random.Random, lasts_s: float) -> str:
        ground.misbehave(**shares)
        await asyncio.sleep(lasts_s)
        ground.misbehave()
        return "provider"

    return fails


async def store_locked(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    assert isinstance(ground.store, FileStore)
    await ground.store.lock(lasts_s)
    return "store"


async def store_full(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    assert isinstance(ground.store, FileStore)
    await ground.store.fill(lasts_s)
    return "store"


def to_provider(ground: Ground) -> Proxy:
    return ground.provider_line


def to_redis(ground: Ground) -> Proxy:
    assert isinstance(ground.store, RedisStore)
    return ground.store.line


async def redis_killed(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    assert isinstance(ground.store, RedisStore)
    await ground.store.kill(lasts_s)
    return "Redis"


async def many_of_one(ground: Ground, rng: random.Random, _: float) -> str:
    return await ground.load.burst(50)


BOTH = ("single", "cluster")
MOMENT = (0.1, 5.0)
LONGER = (4.0, 8.0)
"""Seconds: long enough to affect several requests, too short for any of them to fail."""


@dataclass(frozen=True, slots=True)
class Fault:
    code: str
    """In the catalogue."""
    title: str
    inject: Break
    lasts_s: tuple[float, float] = (0.0, 0.0)
    on: tuple[str, ...] = BOTH
    needs: str | None = None
    """The kind of store that it needs (`Store.is_a`): a `file`, a `mount` (a file on a separate file system),
    `redis`."""


FAULTS = (
    Fault("A1", "worker killed", told(SIGKILL)),
    Fault("A1", "all workers killed", all_killed),
    Fault("A2", "worker told to stop", told(SIGTERM, ends=True)),
    Fault("A3", "worker told twice to stop", told(SIGTERM, SIGTERM, ends=True)),
    Fault("A4", "worker frozen, then awake again", told(SIGSTOP, SIGCONT), (12, 30)),
    Fault("A5", "worker hangs for a moment", told(SIGSTOP, SIGCONT), (2, 4)),
    Fault("B1", "broker restarted", node(Node.restart, end=lambda it: it.ready()), on=("single",)),
    Fault("B2", "broker killed", node(Node.kill, end=Node.start), (0, 3), on=("single",)),
    Fault("B3", "leader's node killed", leader_killed, (1, 5), on=("cluster",)),
    Fault("B4", "node cut off", node(Node.partition, end=Node.heal), (8, 15), on=("cluster",)),
    Fault("B4", "node frozen", node(Node.pause, end=Node.unpause), (5, 8)),
    Fault("B5", "rolling restart of the cluster", rolling_restart, on=("cluster",)),
    Fault("B6", "connections closed by the broker", connections_closed),
    Fault("B6", "connections reset", lines(Proxy.reset)),
    Fault("B7", "blackhole before one worker", lines(frozen, of_one=True), (8, 35)),
    Fault("B7", "blackhole before all workers", lines(frozen), (6, 12)),
    Fault("B8", "half-open line", lines(half_open, of_one=True), (8, 15)),
    Fault("B9", "slow line", lines(slow), (8, 15)),
    Fault("B10", "bytes garbled", lines(Proxy.garble)),
    Fault("B10", "connections cut in the middle", cut),
    Fault("B13", "memory alarm", alarm(*MEMORY), (5, 8)),
    Fault("B14", "disk alarm", alarm(*DISK), (5, 8)),
    Fault("B15", "lane full", lane_full, (2, 4)),
    Fault("C1", "provider's rate limit", failing(**{"rate_limited retry_after=1": 0.5}), LONGER),
    Fault("C3", "provider overloaded", failing(overloaded=0.1, server_error=0.1, unavailable=0.1), LONGER),
    Fault("C4", "provider down", line_to("provider", to_provider, is_gone=True), LONGER),
    Fault("C5", "line to the provider frozen", line_to("provider", to_provider, is_gone=False), (5, 8)),
    Fault("C6", "provider hangs", failing(hang=0.2), LONGER),
    Fault("C7", "provider's answers drip or stall", failing(drip=0.1, stall=0.1), LONGER),
    Fault("C8", "answers cut", failing(cut=0.1, truncated=0.1, reset=0.1, error_mid_stream=0.1), LONGER),
    Fault("C9", "answers broken", failing(html=0.1, broken_json=0.1, not_a_message=0.1, unfinished=0.1), LONGER),
    Fault("D1", "store locked", store_locked, (4, 10), needs="file"),
    Fault("D1", "store locked for a moment", store_locked, MOMENT, needs="file"),
    Fault("D3", "store's disk full", store_full, LONGER, needs="mount"),
    Fault("D4", "Redis cannot be reached", line_to("Redis", to_redis, is_gone=True), LONGER, needs="redis"),
    Fault("D4", "Redis killed, and back with its data", redis_killed, MOMENT, needs="redis"),
    Fault("D4", "line to Redis frozen", line_to("Redis", to_redis, is_gone=False), LONGER, needs="redis"),
    Fault("D5", "worker dies between any two steps", dying_between_steps, (10, 15)),
    Fault("E3", "50 of one id at once", many_of_one),
    Fault("G1", "retry storm", failing(overloaded=1.0), (5, 8)),
)


CALM_S = (3.0, 6.0)
"""The time between the end of one fault and the next, so that their effects can be told apart."""


@dataclass(frozen=True, slots=True)
class Planned:
    fault: Fault
    calm_s: float
    lasts_s: float
    seed: int

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.fault.code} {self.fault.title}{lasts}, after {self.calm_s:.1f} s of calm"


def plan(faults: Sequence[Fault], *, seed: int, seconds: float, part: tuple[int, int] = (0, 1)) -> tuple[Planned, ...]:
    """Faults for at least so many seconds, in random order, each once before any comes again.

    `part`: the number of this run among several: each begins with another fault, so that together they inject every
    fault.
    Restarts take longer than is planned; whoever carries it out stops when its time is over.
    """
    rng = random.Random(seed)
    at, of = part
    first = [fault for n, fault in enumerate(faults) if n % of == at]
    others = [fault for n, fault in enumerate(faults) if n % of != at]
    found: list[Planned] = []
    planned_s = 0.0
    while planned_s < seconds:
        for bag in (first, others):
            for fault in rng.sample(bag, len(bag)):
                found.append(Planned(fault, rng.uniform(*CALM_S), rng.uniform(*fault.lasts_s), rng.randrange(2**32)))
                planned_s += found[-1].calm_s + found[-1].lasts_s
    return tuple(found)


Judge = Callable[[Ground], Awaitable[Verdict]]
Made = Callable[..., AbstractAsyncContextManager[Ground]]
"""`ground` for a test (`conftest.py`)."""
ANSWERED_WITHIN_S = 90.0
"""Time after the last fault, before a request without an answer counts as lost."""
AROUND_S = 3.0
"""Before and after each fault."""
FETCHED_WITHIN_S = 30.0
POSTED_WITHIN_S = 60.0
HELD_S = 3.0
"""How long each request takes that shows whether all slots work; less than `CALL_TIMEOUT_S` in `ground.PATIENT`."""
TRIES = 3
"""A worker that has just lost a connection may not consume yet, so a second burst may show what the first did not."""


def fault(title: str) -> Fault:
    return next(each for each in FAULTS if each.title == title)


async def inject(ground: Ground, found: Fault, *, lasts_s: float, rng: random.Random) -> Disturbed:
    """Cause one fault and record it; waits first until all workers run and have work, so that it affects them."""
    await ground.crew.ready()
    await until(lambda: ground.load.in_flight)
    in_flight, at_s = ground.load.in_flight, time.monotonic()
    against = await found.inject(ground, rng, lasts_s)
    made = Disturbed(
        at_s=at_s,
        healed_s=time.monotonic(),
        code=found.code,
        title=found.title,
        against=against,
        in_flight=in_flight,
    )
    ground.history.add(made)
    return made


async def broken(ground: Ground, *faults: tuple[str, float], judge: Judge | None = None) -> Verdict:
    """Send requests all the time, cause each of the faults (title, seconds), and judge."""
    rng = random.Random(len(faults))
    async with ground.load.asking():
        await asyncio.sleep(SETTLED_S)
        for title, lasts_s in faults:
            await ground.crew.ready()  # before the calm, so that a worker that was just started has work again
            await asyncio.sleep(AROUND_S)
            await inject(ground, fault(title), lasts_s=lasts_s, rng=rng)
        await asyncio.sleep(AROUND_S)
    return await (judge or judged_with_slots)(ground)


async def judged(
    ground: Ground, *, answered_within_s: float = ANSWERED_WITHIN_S, store_was_lost: bool = False
) -> Verdict:
    """After the last request: wait for answers, fetch the results that could not be sent, and judge."""
    await all_answered(ground, within_s=answered_within_s)
    if not store_was_lost:  # and the results with it
        ground.load.expect_scheduled(ground.crew.scheduled())
    await ground.load.fetched(within_s=FETCHED_WITHIN_S)
    await ground.posted(within_s=POSTED_WITHIN_S)
    return ground.verdict(store_was_lost=store_was_lost)


async def judged_with_slots(ground: Ground) -> Verdict:
    """Judge, and see whether as many requests can run at once as the workers have slots."""
    await all_answered(ground, within_s=ANSWERED_WITHIN_S)
    lost = await _slots_lost(ground)
    verdict = await judged(ground)
    return replace(verdict, violations=(*verdict.violations, *lost))


async def _slots_lost(ground: Ground) -> list[Violation]:
    await ground.crew.ready()
    wanted = sum(SLOTS.values()) * len(ground.workers)
    most = 0
    for _ in range(TRIES):
        # more than can run, so that no lane is idle and lends its slots while the others' requests arrive
        await ground.load.at_once(
            {lane: 3 * slots * len(ground.workers) for lane, slots in SLOTS.items()}, latency_s=HELD_S
        )
        end_s = time.monotonic() + 4 * HELD_S
        while most < wanted and time.monotonic() < end_s:
            most = max(most, ground.api.running)
            await asyncio.sleep(0.02)
        await all_answered(ground, within_s=ANSWERED_WITHIN_S)
        if most >= wanted:
            return []
    return [Violation(SLOTS_LOST, "", f"{most} of {wanted} work")]
