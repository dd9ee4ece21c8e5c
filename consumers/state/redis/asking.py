"""Builds the argument of the Redis script that shares an account's budget among processes: the waiting requests of this
process, and the account as this process knows it.

The script answers which of these requests get their budget (`shared_turns.py`)."""

from collections.abc import Sequence
from math import inf
from typing import Any, Final

from consumers.limits.account import Account
from consumers.limits.lines import Waiter
from consumers.state.redis.unsent import Sent

TOGETHER: Final = 16
"""How many waiting requests of each lane may get budget in one run of the script in Redis."""


def candidates(account: Account, now_s: float) -> tuple[Sequence[Waiter], int]:
    """The waiting requests that the script in Redis may grant in one run, lane by lane in the order of their lines; and
    how many of them it may grant at most."""
    calls = account.concurrency
    calls.regain(now_s)
    if account.stopped_s(now_s) > 0 or calls.is_full:
        return (), 0
    waiters = [waiter for lane in range(len(account.lanes)) for waiter in account.lines.firsts(lane, TOGETHER)]
    if not calls.is_limited:
        return waiters, len(waiters)
    return waiters, 1 if any(account.due_for_a_call()) else max(1, int(calls.limit) - calls.running)


def argument(
    account: Account, waiters: Sequence[Waiter], sent: Sent, *, max_grants: int, now_s: float
) -> dict[str, Any]:
    """The argument of the script in Redis that grants waiting requests, before it is turned into JSON. `max_grants`:
    how many of `waiters` it may grant. `sent`: this process's changes of the account that Redis does not know yet."""
    return {
        "limits": account.per_minute(),
        "bursts": [bucket.burst for bucket in account.buckets],
        "most": [bucket.most for bucket in account.buckets],
        "guessed": account.guessed,
        "stopped_until": max(account.paused_until_s, account.held_until_s, 0.0),
        "changed": sent.has_learned,
        "back": sent.back,
        "lower": [-1 if level == inf else level for level in sent.lower],
        "waiters": [
            {"lane": waiter.lane + 1, "age": now_s - waiter.arrived_s, "amounts": waiter.amounts} for waiter in waiters
        ],
        "sums": [account.lines.sums(lane) for lane in range(len(account.lanes))],
        "room": max_grants,
        "turns": account.due_for_a_call(),
    }
