"""Decides how long a request may wait for its budget in a slot of its lane. Pure.

A request that waits for the budget keeps its slot, because the requests behind it would wait as well. But a lane may
have requests for several accounts, and those for one must not hold up those for another. So if all slots of a lane but
one wait for the same account, the next request for that account is deferred after a moment and keeps its place in the
line; its slot takes the request behind it. While only requests for that account follow, the moments grow, because
deferring helps nobody then.
"""

from collections import Counter, OrderedDict

SHORTEST_S = 0.25
LONGEST_S = 15.0
LANES_KNOWN = 64


class WaitingRoom:
    """Counts the waiting requests of all lanes and accounts of this process."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._patience_s: OrderedDict[str, float] = OrderedDict()

    def enter(self, lane: str, account: str, *, slots: int) -> float | None:
        """After how many seconds it must be deferred; None: it may keep waiting. Call `leave` afterwards."""
        waiting = self._waiting[lane, account]
        self._waiting[lane, account] += 1
        if sum(count for (each, _), count in self._waiting.items() if each == lane) > waiting + 1:
            self._patience_s[lane] = SHORTEST_S  # requests for other accounts follow, too
        if waiting < max(1, slots - 1):
            return None
        patience_s = self._patience_s.pop(lane, SHORTEST_S)
        self._patience_s[lane] = min(LONGEST_S, 2 * patience_s)
        if len(self._patience_s) > LANES_KNOWN:
            self._patience_s.popitem(last=False)
        return patience_s

    def leave(self, lane: str, account: str) -> None:
        """A request has ended its wait, for whatever reason."""
        self._waiting[lane, account] -= 1
        if not self._waiting[lane, account]:
            del self._waiting[lane, account]

    def passed(self, lane: str, account: str) -> None:
        """Note that a request was granted at once. If requests of its lane wait for another account, deferring those
        was useful."""
        if any(each == lane and other != account for each, other in self._waiting):
            self._patience_s[lane] = SHORTEST_S
