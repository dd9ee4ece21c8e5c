"""Each fault: what it is called in the catalogue, how it is injected, how it is healed. START HERE for a new one.

A fault is a function that breaks something, holds that for so many seconds, mends it, and returns what it was done to.
"""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.faults.ground import Ground
from tests.faults.proxy import FROM

Break = Callable[[Ground, random.Random, float], Awaitable[str]]
BOTH = ("single", "cluster")
VERY_LITTLE_MEMORY = "0.00001"
MEMORY = "0.6"
EVERY_BYTE = "999TB"
DISK = "50MB"


@dataclass(frozen=True, slots=True)
class Fault:
    code: str
    """In the catalogue."""
    title: str
    inject: Break
    lasts_s: tuple[float, float] = (0.0, 0.0)
    on: tuple[str, ...] = BOTH
    needs: str = ""
    """`mount`: a file system of the store's own."""


# ---- workers ---------------------------------------------------------------------------------------------------------


async def worker_killed(ground: Ground, rng: random.Random, _: float) -> str:
    worker = rng.choice(ground.workers)
    worker.send(signal.SIGKILL)
    return f"worker {worker.number}"


async def worker_stopped(ground: Ground, rng: random.Random, _: float) -> str:
    worker = rng.choice(ground.workers)
    worker.send(signal.SIGTERM)
    await worker.ended()
    return f"worker {worker.number}"


async def worker_stopped_at_once(ground: Ground, rng: random.Random, _: float) -> str:
    worker = rng.choice(ground.workers)
    worker.send(signal.SIGTERM)
    await asyncio.sleep(0.2)
    worker.send(signal.SIGTERM)
    await worker.ended()
    return f"worker {worker.number}"


async def worker_frozen(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    worker = rng.choice(ground.workers)
    worker.send(signal.SIGSTOP)
    await asyncio.sleep(lasts_s)
    worker.send(signal.SIGCONT)
    return f"worker {worker.number}"


async def all_workers_killed(ground: Ground, rng: random.Random, _: float) -> str:
    for worker in ground.workers:
        worker.send(signal.SIGKILL)
    await asyncio.sleep(0)
    return "all workers"


async def failpoints(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    """One worker dies again and again, between any two of store, publish, confirm and acknowledge."""
    worker = rng.choice(ground.workers)
    places = ("before_claim", "after_claim", "after_call", "after_store", "after_publish", "after_confirm", "after_ack")
    worker.environ["LANEKEEPER_FAILPOINTS"] = ",".join(f"{place}:0.01" for place in places)
    worker.send(signal.SIGKILL)
    await asyncio.sleep(lasts_s)
    del worker.environ["LANEKEEPER_FAILPOINTS"]
    worker.send(signal.SIGKILL)
    return f"worker {worker.number}"


# ---- the broker ------------------------------------------------------------------------------------------------------


async def node_restarted(ground: Ground, rng: random.Random, _: float) -> str:
    node = ground.node(rng)
    await node.restart()
    return node.name


async def node_killed(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    node = ground.node(rng)
    await node.kill()
    await asyncio.sleep(lasts_s)
    await node.start()
    return node.name


async def leader_killed(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    lane = rng.choice(("lane.critical", "lane.normal", "lane.batch"))
    node = await ground.broker.leader_of(lane)
    await node.kill()
    await asyncio.sleep(lasts_s)
    await node.start()
    return f"leader of {lane}"


async def node_frozen(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    node = ground.node(rng)
    await node.pause()
    try:
        await asyncio.sleep(lasts_s)
    finally:
        await node.unpause()
    return node.name


async def node_partitioned(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    node = ground.node(rng)
    await node.partition()
    try:
        await asyncio.sleep(lasts_s)
    finally:
        await node.heal()
    return node.name


async def rolling_restart(ground: Ground, rng: random.Random, _: float) -> str:
    for node in ground.broker.nodes:
        await node.drain()
        await node.restart()
        await ground.broker.whole()
    return "each node in turn"


async def connections_closed(ground: Ground, rng: random.Random, _: float) -> str:
    for node in ground.broker.nodes:
        await node.run("rabbitmqctl", "--quiet", "close_all_connections", "fault suite")
    return "all connections, clients' too"


async def memory_alarm(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    node = ground.node(rng)
    await node.run("rabbitmqctl", "set_vm_memory_high_watermark", VERY_LITTLE_MEMORY)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        await node.run("rabbitmqctl", "set_vm_memory_high_watermark", MEMORY)
    return node.name


async def disk_alarm(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    node = ground.node(rng)
    await node.run("rabbitmqctl", "set_disk_free_limit", EVERY_BYTE)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        await node.run("rabbitmqctl", "set_disk_free_limit", DISK)
    return node.name


async def lane_full(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    """All workers hang, and a lane takes next to nothing more: who publishes is refused, and tries again."""
    node, lane = ground.broker.nodes[0], rng.choice(("critical", "normal", "batch"))
    policy = '{"max-length": 2, "overflow": "reject-publish"}'
    await node.run("rabbitmqctl", "--quiet", "set_policy", "--apply-to", "queues", "full", f"^lane\\.{lane}$", policy)
    for worker in ground.workers:
        worker.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        for worker in ground.workers:
            worker.send(signal.SIGCONT)
        await node.run("rabbitmqctl", "--quiet", "clear_policy", "full")
    return f"lane.{lane}"


# ---- the lines between workers and broker ----------------------------------------------------------------------------


async def blackhole(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    worker = rng.choice(ground.workers)
    for line in ground.lines_of(worker):
        line.freeze()
    await _held(ground, lasts_s)
    return f"worker {worker.number}"


async def blackhole_for_all(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.freeze()
    await _held(ground, lasts_s)
    return "all workers"


async def half_open(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    worker = rng.choice(ground.workers)
    for line in ground.lines_of(worker):
        line.freeze(FROM)
    await _held(ground, lasts_s)
    return f"worker {worker.number}"


async def slow_line(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.slow(delay_s=0.4, jitter_s=0.3, bytes_per_s=64_000)
    await _held(ground, lasts_s)
    return "all workers"


async def connections_reset(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.reset()
    await asyncio.sleep(0)
    return "all workers"


async def garbled(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.garble()
    await asyncio.sleep(0)
    return "all workers"


async def cut(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    for line in ground.every_line:
        line.cut(after_bytes=rng.randrange(1, 500))
    await _held(ground, 0.5)
    return "all workers"


async def _held(ground: Ground, lasts_s: float) -> None:
    try:
        await asyncio.sleep(lasts_s)
    finally:
        for line in ground.every_line:
            await line.mend()


# ---- the provider ----------------------------------------------------------------------------------------------------


def provider(**shares: float) -> Break:
    """The simulated API fails this share of its calls."""

    async def fails(ground: Ground, rng: random.Random, lasts_s: float) -> str:
        ground.misbehave(**shares)
        await asyncio.sleep(lasts_s)
        ground.misbehave()
        return "provider"

    return fails


async def provider_limits(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    ground.misbehave(**{"rate_limited retry_after=1": 0.5})
    await asyncio.sleep(lasts_s)
    ground.misbehave()
    return "provider"


async def provider_down(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    await ground.provider_line.refuse()
    ground.provider_line.reset()
    await asyncio.sleep(lasts_s)
    await ground.provider_line.mend()
    return "provider"


async def provider_silent(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    ground.provider_line.freeze()
    await asyncio.sleep(lasts_s)
    await ground.provider_line.mend()
    return "provider"


# ---- the store -------------------------------------------------------------------------------------------------------


async def store_locked(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    await ground.store.lock(lasts_s)
    return "store"


async def store_full(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    await ground.store.fill(lasts_s)
    return "store"


async def store_read_only(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    await ground.store.make_read_only(lasts_s)
    return "store"


# ---- clients ---------------------------------------------------------------------------------------------------------


async def many_of_one(ground: Ground, rng: random.Random, lasts_s: float) -> str:
    return await ground.load.burst(50)


FAULTS = (
    Fault("A1", "worker killed", worker_killed),
    Fault("A1", "all workers killed", all_workers_killed),
    Fault("A2", "worker told to stop", worker_stopped),
    Fault("A3", "worker told twice to stop", worker_stopped_at_once),
    Fault("A4", "worker frozen, then awake again", worker_frozen, (12, 30)),
    Fault("A5", "worker hangs for a moment", worker_frozen, (2, 4)),
    Fault("B1", "broker restarted", node_restarted, on=("single",)),
    Fault("B2", "broker killed", node_killed, (0, 3), on=("single",)),
    Fault("B3", "leader's node killed", leader_killed, (1, 5), on=("cluster",)),
    Fault("B4", "node cut off", node_partitioned, (8, 15), on=("cluster",)),
    Fault("B4", "node frozen", node_frozen, (5, 8)),
    Fault("B5", "rolling restart of the cluster", rolling_restart, on=("cluster",)),
    Fault("B6", "connections closed by the broker", connections_closed),
    Fault("B6", "connections reset", connections_reset),
    Fault("B7", "blackhole before one worker", blackhole, (8, 35)),
    Fault("B7", "blackhole before all workers", blackhole_for_all, (6, 12)),
    Fault("B8", "half-open line", half_open, (8, 15)),
    Fault("B9", "slow line", slow_line, (8, 15)),
    Fault("B10", "bytes garbled", garbled),
    Fault("B10", "connections cut in the middle", cut),
    Fault("B13", "memory alarm", memory_alarm, (5, 8)),
    Fault("B14", "disk alarm", disk_alarm, (5, 8)),
    Fault("B15", "lane full", lane_full, (2, 4)),
    Fault("C1", "provider's rate limit", provider_limits, (4, 8)),
    Fault("C3", "provider overloaded", provider(overloaded=0.1, server_error=0.1, unavailable=0.1), (4, 8)),
    Fault("C4", "provider down", provider_down, (4, 8)),
    Fault("C5", "line to the provider frozen", provider_silent, (5, 8)),
    Fault("C6", "provider hangs", provider(hang=0.2), (4, 8)),
    Fault("C7", "provider's answers drip or stall", provider(drip=0.1, stall=0.1), (4, 8)),
    Fault("C8", "answers cut", provider(cut=0.1, truncated=0.1, reset=0.1, error_mid_stream=0.1), (4, 8)),
    Fault("C9", "answers broken", provider(html=0.1, broken_json=0.1, not_a_message=0.1, unfinished=0.1), (4, 8)),
    Fault("D1", "store locked", store_locked, (4, 10)),
    Fault("D2", "store read-only", store_read_only, (4, 8), needs="mount"),
    Fault("D3", "store's disk full", store_full, (4, 8), needs="mount"),
    Fault("D5", "worker dies between any two steps", failpoints, (10, 15)),
    Fault("E3", "50 of one id at once", many_of_one),
    Fault("G1", "retry storm", provider(overloaded=1.0), (5, 8)),
)
