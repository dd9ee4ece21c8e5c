"""How each fault is caused and repaired. A function returns what it had broken."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from functools import partial

from tests.faults.ground import Ground
from tests.faults.proxy import FROM, Proxy
from tests.faults.store import FileStore, RedisStore
from tests.support.nodes import Node

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
    places = ("before_claim", "after_claim", "after_call", "after_store", "after_publish", "after_confirm", "after_ack")
    worker.environ["LANEKEEPER_FAILPOINTS"] = ",".join(f"{place}:0.01" for place in places)
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


async def many_of_one(ground: Ground, rng: random.Random, _: float) -> str:
    return await ground.load.burst(50)
