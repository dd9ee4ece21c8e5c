"""Decides how many slots each queue gets in addition to its own (those that the settings give to it), by the load of
all queues. A slot works on one request at a time. This file has no I/O.

First, idle slots are lent to queues whose requests wait, the most urgent queue first; each queue keeps some idle slots,
which it does not lend. If a queue's requests still wait longer than its lane's target, it grows: it gets further slots,
a quarter more at a time, up to its maximum. A queue whose requests wait for a provider's budget does not grow, because
more slots would only hold more waiting requests.

So that slots do not move back and forth, a slot is lent only after it was idle for some seconds, and an additional slot
is given up only after it was unused for some seconds (see `QueueLoad.busiest`). A queue that needs the slots which it
has lent gets them back at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GROWTH = 4
"""A queue that grows gets further slots in steps: each step adds the number of slots that the queue has (its own,
borrowed and new ones), divided by this number, but at least one."""
AT_MOST = "slots_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLoad:
    """What the decision about additional slots must know of one queue: its settings, its slots, and its load in this
    worker."""

    slots: int
    """How many slots (each works on one request at a time) the queue has of its own, that is, by the lane's
    settings."""
    reserved: int
    """How many of its own slots (those that the settings give to it) the queue never lends to other queues, even if
    they are idle."""
    max_slots: int
    """How many slots the queue may have at most: those that the settings give to it, and additional ones."""
    target_wait_s: float
    """The queue may get further slots if its requests wait longer than this many seconds."""
    extra: int = 0
    """How many slots the queue has now in addition to those that the settings give to it, including those that were
    taken back but on which a request still runs (`ending`)."""
    grown: int = 0
    """How many of the queue's additional slots are new, that is, not lent by another queue."""
    ending: int = 0
    """How many requests still run on additional slots that were taken back from the queue."""
    busiest: int = 0
    """The highest number of the queue's requests that this worker had at the same time, within the last seconds
    (`STEADY_S` in `scaling.py`)."""
    waiting: int = 0
    """How many messages wait in the queue on the broker; 0 while the queue has free slots, because the broker is not
    asked then."""
    wait_s: float = 0.0
    """How long requests wait in the queue, in seconds (`ScaledQueue.wait_s`); 0 if `waiting` is 0."""
    bottleneck: str | None = None
    """The provider's limit (such as input tokens per minute) for which requests of the queue's lane wait; None: they do
    not wait for a provider's budget."""


@dataclass(frozen=True, slots=True)
class ExtraSlots:
    """The slots that a queue should have in addition to those that the settings give to it. A slot works on one request
    at a time."""

    lent: int = 0
    """How many idle slots this queue borrows from other queues."""
    grown: int = 0
    """How many new slots, which no other queue lends, are created for the queue."""
    limit: str | None = None
    """Why the queue gets no further slots although its requests wait longer than the lane's target: `AT_MOST` (it has
    its maximum), or the value of `QueueLoad.bottleneck`. None: nothing prevents further slots, or the queue needs none.
    """

    @property
    def total(self) -> int:
        return self.lent + self.grown


def decide(queues: Sequence[QueueLoad]) -> list[ExtraSlots]:
    """Compute how many slots each queue should have in addition to those that the settings give to it. `queues`: the
    most urgent first; the result has the same order."""
    idle = sum(max(0, queue.slots - queue.reserved - queue.busiest) for queue in queues)
    idle -= sum(queue.ending for queue in queues)
    decided = []
    for queue in queues:
        wanted = _wanted(queue)
        lent = min(wanted, queue.ending + max(0, idle))
        idle -= max(0, lent - queue.ending)
        grown = min(queue.grown, wanted - lent)
        limit = None
        if queue.waiting and queue.wait_s > queue.target_wait_s:
            if queue.bottleneck is not None:
                limit = queue.bottleneck
            elif lent + grown < wanted:
                grown = min(wanted - lent, grown + max(1, (queue.slots + lent + grown) // GROWTH))
            elif queue.slots + wanted == queue.max_slots:
                limit = AT_MOST
        decided.append(ExtraSlots(lent=lent, grown=grown, limit=limit))
    return decided


def _wanted(queue: QueueLoad) -> int:
    """How many additional slots the queue could use, up to its maximum. If messages wait in the queue, it could use the
    additional slots that it has, and one more for each waiting message; but while its requests wait for a provider's
    budget none are added, because then only more requests would wait for the budget. If no message waits, it needs only
    as many of its additional slots as it used within the last seconds."""
    if not queue.waiting:
        wanted = min(queue.extra, max(0, queue.busiest - queue.slots))
    elif queue.bottleneck is None:
        wanted = queue.extra + queue.waiting
    else:
        wanted = queue.extra
    return min(wanted, max(0, queue.max_slots - queue.slots))
