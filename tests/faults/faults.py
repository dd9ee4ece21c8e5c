"""All faults by their name in the catalogue; `inject.py` causes and repairs them. START HERE for a new one.

A fault is a function that breaks something, keeps it broken for so many seconds, repairs it, and returns what it had
broken.
"""

from dataclasses import dataclass
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from tests.faults import inject
from tests.faults.inject import DISK, MEMORY, Break, failing, line_to, lines, node, to_provider, to_redis, told
from tests.faults.proxy import Proxy
from tests.support.nodes import Node

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
    Fault("A1", "worker killed", told(SIGKILL)),
    Fault("A1", "all workers killed", inject.all_killed),
    Fault("A2", "worker told to stop", told(SIGTERM, ends=True)),
    Fault("A3", "worker told twice to stop", told(SIGTERM, SIGTERM, ends=True)),
    Fault("A4", "worker frozen, then awake again", told(SIGSTOP, SIGCONT), (12, 30)),
    Fault("A5", "worker hangs for a moment", told(SIGSTOP, SIGCONT), (2, 4)),
    Fault("B1", "broker restarted", node(Node.restart, end=lambda it: it.ready()), on=("single",)),
    Fault("B2", "broker killed", node(Node.kill, end=Node.start), (0, 3), on=("single",)),
    Fault("B3", "leader's node killed", inject.leader_killed, (1, 5), on=("cluster",)),
    Fault("B4", "node cut off", node(Node.partition, end=Node.heal), (8, 15), on=("cluster",)),
    Fault("B4", "node frozen", node(Node.pause, end=Node.unpause), (5, 8)),
    Fault("B5", "rolling restart of the cluster", inject.rolling_restart, on=("cluster",)),
    Fault("B6", "connections closed by the broker", inject.connections_closed),
    Fault("B6", "connections reset", lines(Proxy.reset)),
    Fault("B7", "blackhole before one worker", lines(inject.frozen, of_one=True), (8, 35)),
    Fault("B7", "blackhole before all workers", lines(inject.frozen), (6, 12)),
    Fault("B8", "half-open line", lines(inject.half_open, of_one=True), (8, 15)),
    Fault("B9", "slow line", lines(inject.slow), (8, 15)),
    Fault("B10", "bytes garbled", lines(Proxy.garble)),
    Fault("B10", "connections cut in the middle", inject.cut),
    Fault("B13", "memory alarm", inject.alarm(*MEMORY), (5, 8)),
    Fault("B14", "disk alarm", inject.alarm(*DISK), (5, 8)),
    Fault("B15", "lane full", inject.lane_full, (2, 4)),
    Fault("C1", "provider's rate limit", failing(**{"rate_limited retry_after=1": 0.5}), LONGER),
    Fault("C3", "provider overloaded", failing(overloaded=0.1, server_error=0.1, unavailable=0.1), LONGER),
    Fault("C4", "provider down", line_to("provider", to_provider, is_gone=True), LONGER),
    Fault("C5", "line to the provider frozen", line_to("provider", to_provider, is_gone=False), (5, 8)),
    Fault("C6", "provider hangs", failing(hang=0.2), LONGER),
    Fault("C7", "provider's answers drip or stall", failing(drip=0.1, stall=0.1), LONGER),
    Fault("C8", "answers cut", failing(cut=0.1, truncated=0.1, reset=0.1, error_mid_stream=0.1), LONGER),
    Fault("C9", "answers broken", failing(html=0.1, broken_json=0.1, not_a_message=0.1, unfinished=0.1), LONGER),
    Fault("D1", "store locked", inject.store_locked, (4, 10), needs="file"),
    Fault("D3", "store's disk full", inject.store_full, LONGER, needs="mount"),
    Fault("D4", "Redis cannot be reached", line_to("Redis", to_redis, is_gone=True), LONGER, needs="redis"),
    Fault("D4", "line to Redis frozen", line_to("Redis", to_redis, is_gone=False), LONGER, needs="redis"),
    Fault("D5", "worker dies between any two steps", inject.dying_between_steps, (10, 15)),
    Fault("E3", "50 of one id at once", inject.many_of_one),
    Fault("G1", "retry storm", failing(overloaded=1.0), (5, 8)),
)
