"""The question that a process sends to Redis in one step: which of its waiters may go, given the account as this
process knows it."""

from collections.abc import Sequence
from math import inf
from typing import Any, Final

from consumers.limits.account import Account
from consumers.limits.waiter import Waiter
from consumers.state.redis.unsent import Sent

TOGETHER: Final = 16
"""How many waiters of each lane may be granted in one step."""


def candidates(account: Account, now_s: float) -> tuple[Sequence[Waiter], int]:
    """The waiters that may be granted in one step, in order lane by lane, and how many of them may be."""
    calls = account.concurrency
    calls.regain(now_s)
    if account.stopped_s(now_s) > 0 or calls.is_full:
        return (), 0
    waiters = [each for lane in range(len(account.lanes)) for each in account.lines.firsts(lane, TOGETHER)]
    if not calls.is_limited:
        return waiters, len(waiters)
    return waiters, 1 if any(account.due_for_a_call()) else max(1, int(calls.limit) - calls.running)


def question(account: Account, waiters: Sequence[Waiter], sent: Sent, *, room: int, now_s: float) -> dict[str, Any]:
    """The argument of the script, to be written as JSON. `room`: how many of the waiters may be granted."""
    return {
        "limits": account.per_minute(),
        "bursts": [bucket.burst for bucket in account.buckets],
        "most": [bucket.most for bucket in account.buckets],
        "guessed": account.guessed,
        "stopped_until": max(account.paused_until_s, account.held_until_s, 0.0),
        "changed": sent.has_learned,
        "back": sent.back,
        "lower": [-1 if each == inf else each for each in sent.lower],
        "waiters": [
            {"lane": each.lane + 1, "age": now_s - each.arrived_s, "amounts": each.amounts} for each in waiters
        ],
        "sums": [account.lines.sums(lane) for lane in range(len(account.lanes))],
        "room": room,
        "turns": account.due_for_a_call(),
    }
