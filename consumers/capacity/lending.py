"""How many slots each queue gets beside its own: pure arithmetic over what was seen of all of them.

Idle slots of a lane are lent to queues that wait, the most urgent first, all but those that the lane keeps. Where that
is not enough and waits exceed the lane's target, a queue grows, a quarter at a time, up to its most: unless its
requests wait for the provider already, where more slots would only hold more of them.

It does not flap: slots are lent once they have been idle for a while and are back at once; they are asked for at once,
and given up once they have been unused for a while; `busiest` is the most that was in hand meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GROWTH = 4
"""It grows by one in so many of the slots that it has, at least one."""
AT_MOST = "slots_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One queue: what is settled about it, what it has, and what was seen."""

    slots: int
    """Its own."""
    kept: int
    """Of them, if idle, those that are never lent."""
    most: int
    """What its slots may come to with all that is added."""
    target_wait_s: float
    extra: int = 0
    """Slots beside its own that it has now, those `ending` included."""
    grown: int = 0
    """Of these, those that nobody lent."""
    ending: int = 0
    """Requests on slots that were taken back and take no more."""
    busiest: int = 0
    """The most requests that were in hand at a time, lately, and so for how many it has needed slots."""
    waiting: int = 0
    """Requests that wait in the queue while all its slots are in use."""
    wait_s: float = 0.0
    """How long they wait."""
    held: str | None = None
    """What of the provider's budget its requests wait for."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a queue is to have beside its own slots."""

    lent: int = 0
    grown: int = 0
    limit: str | None = None
    """Its waits exceed the target, and it does not grow: what it is that limits it."""

    @property
    def extra(self) -> int:
        return self.lent + self.grown


def decide(queues: Sequence[Seen]) -> list[Share]:
    """What each is to have, in the order given: the most urgent first."""
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
    """The slots that it could use beside its own: for what waits as well, unless that would wait at the provider."""
    if not queue.waiting:
        wanted = min(queue.extra, max(0, queue.busiest - queue.slots))
    elif queue.held is None:
        wanted = queue.extra + queue.waiting
    else:
        wanted = queue.extra
    return min(wanted, max(0, queue.most - queue.slots))
