"""Decides how long a request may hold a slot of its lane (the right to be worked on) while it waits for a provider's
budget. This file has no I/O.

A request that waits for the budget of an account (one provider's limits for a class of models) keeps its slot, because
requests behind it for the same account would wait too. But requests for another account must not be held up. So if
requests that wait for the same account hold all slots of a lane but one, the next request for that account may wait for
a short time only (its patience). Then it is deferred, which frees its slot for the request behind it; when it comes
back, it has its old place among the requests that wait for the account. As long as only requests for that account
follow, the patience doubles with each of them, because deferring them helps no other request.
"""

from collections import Counter, defaultdict

SHORTEST_S = 0.25
"""A request may always wait for budget for this many seconds, even if other requests need its slot."""
LONGEST_S = 15.0
"""If other requests need its slot, a request may wait for budget for at most this many seconds; then it is deferred."""


class WaitingRoom:
    """Counts the requests of this process that wait for a provider's budget, by lane and account, and decides how long
    each may wait."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """For each lane: how many of its requests wait for budget, by account."""
        self._patience_s: dict[str, float] = {}

    def enter(self, lane: str, account: str, *, slots: int) -> float | None:
        """Count a request that begins to wait for budget of this account. Return for how many seconds the request may
        wait before it must be deferred to let others pass; None: it need not let others pass. Call `leave` when the
        wait has ended. `slots`: how many slots the lane has."""
        waiting = self._waiting[lane]
        waiting[account] += 1
        if len(waiting) > 1:
            self._patience_s[lane] = SHORTEST_S  # requests for other accounts follow too: deferring helps them
        if waiting[account] <= max(1, slots - 1):
            return None
        patience_s = self._patience_s.get(lane, SHORTEST_S)
        self._patience_s[lane] = min(LONGEST_S, 2 * patience_s)
        return patience_s

    def leave(self, lane: str, account: str) -> None:
        """Note that a request of this lane no longer waits for budget of this account, whatever the reason."""
        self._waiting[lane][account] -= 1
        if not self._waiting[lane][account]:
            del self._waiting[lane][account]

    def passed(self, lane: str, account: str) -> None:
        """Note that a request got its budget without a wait. If other requests of its lane wait for another account,
        deferring those requests lets others, like this one, pass, so the time for which the lane's requests may wait
        becomes short again."""
        if self._waiting[lane].keys() - {account}:
            self._patience_s[lane] = SHORTEST_S
