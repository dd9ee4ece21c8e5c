"""Decides how many slots each queue gets in addition to its own. Pure arithmetic over what was seen of all queues.

Idle slots of a lane are lent to queues whose requests wait, the most urgent queue first; a lane keeps some. If that is
not enough and waits exceed the lane's target, the queue grows by a quarter at a time, up to its maximum. A queue whose
requests wait for the provider does not grow: more slots would only hold more waiting requests.

To avoid moving slots back and forth, a slot is lent only after it was idle for a while, and given up only after it was
unused for a while (`busiest` is the most that was in use meanwhile). Lent slots come back at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GROWTH = 4
"""A queue grows by a quarter of its slots, at least one."""
AT_MOST = "slots_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One queue: its settings, its slots, and its observed load."""

    slots: int
    """The queue's own slots."""
    kept: int
    """How many of them it never lends, even if idle."""
    most: int
    """The most slots that it may have, added ones included."""
    target_wait_s: float
    extra: int = 0
    """The slots that it has now in addition to its own, `ending` included."""
    grown: int = 0
    """How many of these are grown and not lent."""
    ending: int = 0
    """Requests that still run on slots that were taken back."""
    busiest: int = 0
    """The most requests that it held at the same time lately; it needed this many slots."""
    waiting: int = 0
    """Requests that wait in the queue while all its slots are in use."""
    wait_s: float = 0.0
    """How long the waiting requests have waited."""
    held: str | None = None
    """Which part of the provider's budget its requests wait for; None: they do not."""


@dataclass(frozen=True, slots=True)
class Share:
    """The slots that a queue should have in addition to its own."""

    lent: int = 0
    grown: int = 0
    limit: str | None = None
    """Why it does not grow although its waits exceed the target; None: nothing limits it."""

    @property
    def extra(self) -> int:
        return self.lent + self.grown


def decide(queues: Sequence[Seen]) -> list[Share]:
    """The slots that each queue should have, in the order given: the most urgent first."""
    idle = sum(max(0, each.slots - each.kept - each.busiest) for each in queues) - sum(each.ending for each in queues)
    shares = []
    for each in queues:
        wanted = _wanted(each)
        lent = min(wanted, each.ending + max(0, idle))
        idle -= max(0, lent - each.ending)
        grown = min(each.grown, wanted - lent)
        limit = None
        if each.waiting and each.wait_s > each.target_wait_s:
            if each.held is not None:
                limit = each.held
            elif lent + grown < wanted:
                grown = min(wanted - lent, grown + max(1, (each.slots + lent + grown) // GROWTH))
            elif each.slots + wanted == each.most:
                limit = AT_MOST
        shares.append(Share(lent, grown, limit))
    return shares


def _wanted(queue: Seen) -> int:
    """How many more slots it could use. Waiting requests count, unless they would wait at the provider."""
    if not queue.waiting:
        wanted = min(queue.extra, max(0, queue.busiest - queue.slots))
    elif queue.held is None:
        wanted = queue.extra + queue.waiting
    else:
        wanted = queue.extra
    return min(wanted, max(0, queue.most - queue.slots))
