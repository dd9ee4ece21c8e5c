"""Makes the argument of the Redis script that shares an account's budget among processes. The argument contains the
waiting requests of this process, the account as this process knows it, and the changes that this process has made since
the last run of the script.

The answer of the script says which of these requests get their budget (`shared_turns.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from consumers.limits.account import Account
from consumers.limits.base import Feedback
from consumers.limits.lines import Waiter

TOGETHER: Final = 16
"""The maximum number of waiting requests of each lane that can get budget in one run of the script in Redis."""


@dataclass(slots=True)
class Changes:
    """Changes of an account's budget that this process has made since the last run of the script."""

    back: list[dict[str, Any]] = field(default_factory=list)
    """For each call that has ended: the amounts that it reserved and did not use, or used beyond its reservation (see
    `give_back`)."""
    lower: list[float] = field(default_factory=lambda: [inf, inf, inf])
    """For each token bucket: the level to which it was lowered because the provider had less left than was assumed;
    infinite if it was not lowered."""
    feedback: list[Feedback] = field(default_factory=list)
    """Responses that changed what was learned about the account's limits. If another process changed the learned limits
    in Redis first, this process takes those over in place of its own, and then learns from these responses again."""

    @property
    def must_be_sent(self) -> bool:
        """True if there are changes that must be sent to Redis even if no request waits for budget."""
        return bool(self.back or self.feedback)

    def give_back(self, lane: int, unused: Sequence[float], from_savings: Sequence[float]) -> None:
        """Note what to return to the account's budget after a call. `unused`: for each bucket, the amount that was
        reserved and not used; a negative amount was used beyond the reservation. `from_savings`: the part of the
        reservation that came from the lane's savings."""
        self.back.append({"lane": lane + 1, "over": list(unused), "own": list(from_savings)})

    def levels_fell(self, before: Sequence[float], after: Sequence[float]) -> bool:
        """Note to which levels the buckets were lowered because the provider has less left than was assumed. Returns
        True if a level fell."""
        found = False
        for index, (was, now) in enumerate(zip(before, after, strict=True)):
            if now < was:
                self.lower[index] = min(self.lower[index], max(0.0, now))
                found = True
        return found

    def add_failed(self, sent: "Changes") -> None:
        """Add the changes that were sent with a failed run of the script, so that they are sent with the next one. It
        is unknown whether Redis has counted them. Amounts used beyond a reservation are sent again. Amounts given back
        are not sent again, because if they were counted twice, more would be spent than the limits allow."""
        for change in sent.back:
            change["over"] = [min(0.0, unused) for unused in change["over"]]
        self.back = [change for change in sent.back if any(change["over"])] + self.back
        self.feedback = sent.feedback + self.feedback


def candidates(account: Account, now_s: float) -> tuple[Sequence[Waiter], int]:
    """Returns the waiting requests that the script in Redis may grant in one run (ordered by lane, and by arrival
    within a lane), and how many of them it may grant at most."""
    calls = account.concurrency
    calls.regain(now_s)
    if account.stopped_s(now_s) > 0 or calls.is_full:
        return (), 0
    waiters = [waiter for lane in range(len(account.lanes)) for waiter in account.lines.firsts(lane, TOGETHER)]
    if not calls.is_limited:
        return waiters, len(waiters)
    return waiters, 1 if any(account.due_for_a_call()) else max(1, int(calls.limit) - calls.running)


def argument(
    account: Account, waiters: Sequence[Waiter], changes: Changes, *, max_grants: int, now_s: float
) -> dict[str, Any]:
    """Returns the argument of the script in Redis that grants waiting requests, before it is turned into JSON.
    `max_grants`: how many of `waiters` the script may grant at most."""
    return {
        "limits": account.per_minute(),
        "shares": account.shares,
        "bursts": [bucket.burst for bucket in account.buckets],
        "most": [bucket.most for bucket in account.buckets],
        "guessed": account.guessed,
        "stopped_until": max(account.paused_until_s, account.held_until_s, 0.0),
        "changed": bool(changes.feedback),
        "back": changes.back,
        "lower": [-1 if level == inf else level for level in changes.lower],
        "waiters": [
            {"lane": waiter.lane + 1, "age": now_s - waiter.arrived_s, "amounts": waiter.amounts} for waiter in waiters
        ],
        "sums": [account.lines.sums(lane) for lane in range(len(account.lanes))],
        "room": max_grants,
        "turns": account.due_for_a_call(),
    }
