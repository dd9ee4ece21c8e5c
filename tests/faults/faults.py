"""All faults by their name in the catalogue; `inject/` has the code that causes and repairs them. START HERE for a new
one.

A fault is a function that breaks something, keeps it broken for so many seconds, repairs it, and returns what it had
broken.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.faults.ground import Ground
from tests.faults.inject import broker, clients, lines, provider, store, workers

Break = Callable[[Ground, random.Random, float], Awaitable[str]]
BOTH = ("single", "cluster")
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
    Fault("A1", "worker killed", workers.killed),
    Fault("A1", "all workers killed", workers.all_killed),
    Fault("A2", "worker told to stop", workers.told_to_stop),
    Fault("A3", "worker told twice to stop", workers.told_twice),
    Fault("A4", "worker frozen, then awake again", workers.frozen, (12, 30)),
    Fault("A5", "worker hangs for a moment", workers.frozen, (2, 4)),
    Fault("B1", "broker restarted", broker.node_restarted, on=("single",)),
    Fault("B2", "broker killed", broker.node_killed, (0, 3), on=("single",)),
    Fault("B3", "leader's node killed", broker.leader_killed, (1, 5), on=("cluster",)),
    Fault("B4", "node cut off", broker.node_partitioned, (8, 15), on=("cluster",)),
    Fault("B4", "node frozen", broker.node_frozen, (5, 8)),
    Fault("B5", "rolling restart of the cluster", broker.rolling_restart, on=("cluster",)),
    Fault("B6", "connections closed by the broker", broker.connections_closed),
    Fault("B6", "connections reset", lines.reset),
    Fault("B7", "blackhole before one worker", lines.blackhole, (8, 35)),
    Fault("B7", "blackhole before all workers", lines.blackhole_for_all, (6, 12)),
    Fault("B8", "half-open line", lines.half_open, (8, 15)),
    Fault("B9", "slow line", lines.slow, (8, 15)),
    Fault("B10", "bytes garbled", lines.garbled),
    Fault("B10", "connections cut in the middle", lines.cut),
    Fault("B13", "memory alarm", broker.memory_alarm, (5, 8)),
    Fault("B14", "disk alarm", broker.disk_alarm, (5, 8)),
    Fault("B15", "lane full", broker.lane_full, (2, 4)),
    Fault("C1", "provider's rate limit", provider.limited, LONGER),
    Fault("C3", "provider overloaded", provider.failing(overloaded=0.1, server_error=0.1, unavailable=0.1), LONGER),
    Fault("C4", "provider down", provider.down, LONGER),
    Fault("C5", "line to the provider frozen", provider.silent, (5, 8)),
    Fault("C6", "provider hangs", provider.failing(hang=0.2), LONGER),
    Fault("C7", "provider's answers drip or stall", provider.failing(drip=0.1, stall=0.1), LONGER),
    Fault("C8", "answers cut", provider.failing(cut=0.1, truncated=0.1, reset=0.1, error_mid_stream=0.1), LONGER),
    Fault(
        "C9", "answers broken", provider.failing(html=0.1, broken_json=0.1, not_a_message=0.1, unfinished=0.1), LONGER
    ),
    Fault("D1", "store locked", store.locked, (4, 10), needs="file"),
    Fault("D3", "store's disk full", store.full, LONGER, needs="mount"),
    Fault("D4", "Redis cannot be reached", store.gone, LONGER, needs="redis"),
    Fault("D4", "line to Redis frozen", store.silent, LONGER, needs="redis"),
    Fault("D5", "worker dies between any two steps", workers.dying_between_steps, (10, 15)),
    Fault("E3", "50 of one id at once", clients.many_of_one),
    Fault("G1", "retry storm", provider.failing(overloaded=1.0), (5, 8)),
)
