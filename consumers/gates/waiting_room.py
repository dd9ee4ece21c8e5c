"""How long a request may wait for its budget in a slot of its lane. Pure.

What waits for the budget keeps its slot: what is behind it would wait as well, and order is kept. But a lane may have
requests for several accounts, and those that wait for one must not hold up another's. So where all slots of a lane but
one wait for the same account, the next request for it is put off after a moment, keeps its place in line, and the slot
looks at what comes behind. As long as nothing else is found there, the moments grow: then putting off helps nobody.
"""

from collections import Counter, OrderedDict

SHORTEST_S = 0.25
LONGEST_S = 15.0
LANES_KNOWN = 64


class WaitingRoom:
    """Of all lanes and accounts of this process."""

    def __init__(self) -> None:
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._patience_s: OrderedDict[str, float] = OrderedDict()

    def enter(self, lane: str, account: str, *, slots: int) -> float | None:
        """In how many seconds it is to be put off; None: it may wait as long as any. `leave` follows."""
        waiting = self._waiting[lane, account]
        self._waiting[lane, account] += 1
        if sum(count for (each, _), count in self._waiting.items() if each == lane) > waiting + 1:
            self._patience_s[lane] = SHORTEST_S  # others come, too
        if waiting < max(1, slots - 1):
            return None
        patience_s = self._patience_s.pop(lane, SHORTEST_S)
        self._patience_s[lane] = min(LONGEST_S, 2 * patience_s)
        if len(self._patience_s) > LANES_KNOWN:
            self._patience_s.popitem(last=False)
        return patience_s

    def leave(self, lane: str, account: str) -> None:
        """It waits no longer, whatever came of it."""
        self._waiting[lane, account] -= 1
        if not self._waiting[lane, account]:
            del self._waiting[lane, account]

    def passed(self, lane: str, account: str) -> None:
        """One was granted at once: where others of its lane wait, for another account, it was worth looking."""
        if any(each == lane and other != account for each, other in self._waiting):
            self._patience_s[lane] = SHORTEST_S
