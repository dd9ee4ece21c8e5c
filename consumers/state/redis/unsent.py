"""Changes of an account's budget, which several processes share, that this process has not sent to Redis yet. The next
run of the script (a step of `shared_turns.py`) sends them; if it fails, some are sent again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from consumers.limits.base import Feedback


@dataclass(slots=True)
class Sent:
    """Changes of an account's budget that one step (one run of the script in Redis) sends."""

    back: list[dict[str, Any]]
    """Amounts that were given back, or used beyond a reservation (`Unsent.give_back`)."""
    lower: list[float]
    """For each bucket: the level to which it fell because the provider had less than was assumed; infinite: it did not
    fall."""
    learned_from: int
    """From how many responses of `Unsent.feedback` the sent text of learned limits was made."""
    has_learned: bool
    """True if this process has learned something about the account's limits that Redis does not have yet."""


@dataclass(slots=True)
class Unsent:
    """Changes of an account's budget that this process has made and not sent to Redis yet, where several processes
    share the account: amounts given back (`back`), levels that fell (`lower`), limits that were learned. The fields are
    those of `Sent`."""

    back: list[dict[str, Any]] = field(default_factory=list)
    lower: list[float] = field(default_factory=lambda: [inf, inf, inf])
    feedback: list[Feedback] = field(default_factory=list)
    """Responses that changed what was learned. If another process was faster to send what it has learned, this process
    takes that over, and then learns from these responses again."""
    has_learned: bool = False

    def give_back(self, lane: int, unused: Sequence[float], from_savings: Sequence[float]) -> None:
        """Note what to return to the account's budget after a call. `unused`: for each bucket, what was reserved and
        not used; below 0: what was used beyond the reservation. `from_savings`: see `Reservation`."""
        self.back.append({"lane": lane + 1, "over": list(unused), "own": list(from_savings)})

    def levels_fell(self, before: Sequence[float], after: Sequence[float]) -> bool:
        """Note to which levels the buckets fell because the provider has less left than was assumed. Returns True if a
        level fell."""
        found = False
        for index, (was, now) in enumerate(zip(before, after, strict=True)):
            if now < was:
                self.lower[index] = min(self.lower[index], max(0.0, now))
                found = True
        return found

    def take(self) -> Sent:
        """Return the changes that Redis does not know yet, for the next run of the script to send, and remove them from
        here."""
        sent = Sent(self.back, self.lower, len(self.feedback), self.has_learned)
        self.back, self.lower, self.has_learned = [], [inf, inf, inf], False
        return sent

    def failed(self, sent: Sent) -> None:
        """Keep the changes of a failed step for the next one. It is unknown whether Redis has counted them. Amounts
        used beyond a reservation are sent again. Amounts given back are not: if they were counted twice, more would be
        spent than the limits allow."""
        for change in sent.back:
            change["over"] = [min(0.0, unused) for unused in change["over"]]
        self.back = [change for change in sent.back if any(change["over"])] + self.back
        self.has_learned = self.has_learned or sent.has_learned
