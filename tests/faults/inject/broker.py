"""The broker, or one of its nodes, is restarted, killed, paused or disconnected, has an alarm, or is full."""

import asyncio
import random
import signal

from tests.faults.ground import Ground

VERY_LITTLE_MEMORY = "0.00001"
MEMORY = "0.6"
EVERY_BYTE = "999000GB"
DISK = "50MB"


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
    """Kill the leader of a lane's queue, but not the node from which replies are read: that would delay our own
    reading."""
    lanes = rng.sample(("lane.critical", "lane.normal", "lane.batch"), 3)
    leaders = {lane: await ground.broker.leader_of(lane) for lane in lanes}
    led = {lane: node for lane, node in leaders.items() if node != ground.broker.nodes[-1]}
    lane, node = next(iter(led.items()), (lanes[0], ground.node(rng)))
    await node.kill()
    await asyncio.sleep(lasts_s)
    await node.start()
    # Leaders do not move back by themselves: after three such faults one node would lead every queue.
    await node.run("rabbitmq-queues", "--quiet", "rebalance", "quorum")
    return f"leader of {', '.join(each for each in lanes if leaders[each] == node)}" if lane in led else node.name


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
    """All calls hang, and a lane accepts hardly any message: publishers are refused, and try again."""
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
