"""What a process sends to Redis about one account with its next step, and what happens to it if that step fails."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from consumers.limits.base import Heard


@dataclass(slots=True)
class Sent:
    """What one step sends to Redis."""

    back: list[dict[str, Any]]
    lower: list[float]
    heard: int
    """How many of `Unsent.heard` are contained in the knowledge that the step sends."""
    has_learned: bool


@dataclass(slots=True)
class Unsent:
    """What was not sent to Redis yet about one account."""

    back: list[dict[str, Any]] = field(default_factory=list)
    lower: list[float] = field(default_factory=lambda: [inf, inf, inf])
    heard: list[Heard] = field(default_factory=list)
    """Responses that changed what was learned. They are learned from again if another process has learned meanwhile."""
    has_learned: bool = False

    def give_back(self, lane: int, over: Sequence[float], own: Sequence[float]) -> None:
        """`over`: what was reserved and not used; below 0: what was used beyond the reservation."""
        self.back.append({"lane": lane + 1, "over": list(over), "own": list(own)})

    def levels_fell(self, before: Sequence[float], after: Sequence[float]) -> bool:
        """Note which levels fell because the provider has less than was assumed. True if any did."""
        found = False
        for each, (was, now) in enumerate(zip(before, after, strict=True)):
            if now < was:
                self.lower[each] = min(self.lower[each], max(0.0, now))
                found = True
        return found

    def take(self) -> Sent:
        """What the next step sends. It is not sent again, unless the step fails."""
        sent = Sent(self.back, self.lower, len(self.heard), self.has_learned)
        self.back, self.lower, self.has_learned = [], [inf, inf, inf], False
        return sent

    def failed(self, sent: Sent) -> None:
        """It is unknown whether Redis counted the step. What was used beyond a reservation is sent again. What was
        given back is not, because counting it twice would spend more than there is."""
        for each in sent.back:
            each["over"] = [min(0.0, over) for over in each["over"]]
        self.back = [each for each in sent.back if any(each["over"])] + self.back
        self.has_learned = self.has_learned or sent.has_learned
