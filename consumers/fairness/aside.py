"""Sets requests aside: moves requests that exceed their tenant's share of a lane into a side queue of the lane, where
they do not delay other tenants.

The worker publishes such a request to the side queue, and acknowledges its delivery after the broker's confirm
(`consumers/pool.py`). If the worker dies between confirm and acknowledgement, there are two messages of one request;
the claim (the store's record that a worker runs the request) then lets only one of them run. Setting a request aside
takes no claim, and does not count as an attempt.

Each tenant gets a side queue of its own while there are enough of them. A process knows to which tenant a side queue
belongs if it holds the queue's first message (its head), or has just published a message there itself. Two processes
that begin at the same time to set requests of one tenant aside may choose different queues; the order of the tenant's
requests is then lost."""

import asyncio
from hashlib import blake2b
from typing import Final

from consumers.copies import set_aside
from consumers.job import Job, NowMs
from consumers.outcomes import Deferred, Outcome, ended
from consumers.rank import HIGHEST
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import UNREADABLE
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PublishRefused
from topology.broker.heads import Heads
from topology.lanes import LaneSpec

PLACE_KEPT_S: Final = 1.0
"""For how many seconds after a tenant's last request was published to a side queue (a queue for requests over their
tenant's share), that queue stays assigned to the tenant. By then this process usually holds the queue's first message,
which shows to which tenant the queue belongs."""
FULL_FOR_S: Final = 1.0
"""If a side queue (a queue for requests over their tenant's share) refused a message because it was full, nothing is
published to it for this many seconds."""
LATER_MS: Final = 1000
"""For how many ms a request is deferred if it must be moved to a side queue (a queue for requests over their tenant's
share), and that queue is full."""


class SideQueues:
    """Moves requests that exceed their tenant's share to the side queues of one lane, and notes which tenant has which
    side queue."""

    def __init__(self, lane: LaneSpec, heads: Heads, *, publisher: Publisher, names: Names, now_ms: NowMs) -> None:
        self._lane = lane
        self._heads = heads
        self._publisher = publisher
        self._names = names
        self._now_ms = now_ms
        self._numbers = {names.side(lane.name, number): number for number in range(lane.side_queues)}
        """The number of each side queue, by the queue's name."""
        self._tenants: dict[int, str] = {}
        """The tenant of each side queue whose first message (its head) waits in this process for a slot, by the queue's
        number."""
        self._places: dict[str, tuple[int, float]] = {}
        """For each tenant: the number of the side queue that is assigned to it, and when it was last assigned, by the
        event loop's clock."""
        self._full_until_s: dict[int, float] = {}
        """For each side queue that refused a message because it was full, by the queue's number: until when nothing is
        published to it, by the event loop's clock."""

    def has(self, tenant: str) -> bool:
        """Whether requests of the tenant are in a side queue (they were moved there because they exceeded the tenant's
        share), as far as this process knows."""
        return self._number_of(tenant) is not None

    def may_take(self, job: Job) -> bool:
        """Whether a request may be moved to a side queue. A request that will be refused because of its headers may not
        be moved, because its copy in the side queue would not have these headers, and so would not be refused."""
        message = job.message
        if job.trusted:
            return not job.hop.reply_try  # if only the reply is left to send, the request needs no slot for long
        headers = message.headers
        return (
            message.exchange == self._names.requests
            and message.routing_key.partition(".")[0] == self._lane.name
            and (message.priority or 0) <= HIGHEST
            and not any(header in headers for header in (UNREADABLE, n.DEATH, n.CC, n.BCC))
        )

    def head_arrived(self, job: Job) -> None:
        """Note that the first message (the head) of a side queue was delivered to this process."""
        number = self._numbers[job.delivery.queue]
        self._tenants[number] = job.identity.tenant

    def head_left(self, job: Job) -> None:
        """Note that the first message (the head) of a side queue no longer waits here, because it got a slot, will be
        moved, or was lost with its channel. So the queue's next message may be fetched."""
        number = self._numbers[job.delivery.queue]
        if self._tenants.pop(number, None) is not None:
            self._keep(job.identity.tenant, number)
        self._heads.pass_on(job.delivery.queue)

    def head_unread(self, queue: str) -> None:
        """Note that the first message (the head) of a side queue could not be read, so that the queue's next message
        may be fetched."""
        self._heads.pass_on(queue)

    async def put(self, job: Job) -> Outcome | None:
        """Publish a request to a side queue, and wait for the confirm. Return None if the broker has confirmed it; if
        the queue is full, the outcome with which the request is settled instead. Raises BrokerError."""
        number = self._place(job.identity.tenant)
        if asyncio.get_running_loop().time() < self._full_until_s.get(number, 0):
            return self._full(job)
        self._keep(job.identity.tenant, number)
        message = set_aside(job, now_ms=self._now_ms(), names=self._names)
        try:
            await self._publisher.publish_surely(
                message, exchange=self._names.side_exchange(number), routing_key=job.routing_key, refused_within_s=0
            )
        except PublishRefused:
            self._full_until_s[number] = asyncio.get_running_loop().time() + FULL_FOR_S
            return self._full(job)
        self._heads.publish_seen(self._names.side(self._lane.name, number))
        return None

    def _full(self, job: Job) -> Outcome:
        """The outcome of a request that cannot be moved to its tenant's side queue, because that queue is full: it is
        refused if it comes directly from its publisher, and deferred if it comes from a delay or a side queue."""
        if job.hop.is_fresh and not job.trusted:
            return ended(
                "too_many_waiting",
                f"lane {self._lane.name} holds {self._lane.max_length} waiting requests of this tenant (and of "
                "those that share its side queue), and takes no more; send them later",
            )
        return Deferred(delay_ms=LATER_MS, reason="too many waiting")

    def _place(self, tenant: str) -> int:
        """The number of the side queue for a tenant's requests: the queue that has some of them already; else the first
        free queue (it has no requests and is assigned to no tenant), in an order that is computed from the tenant's
        name; else the shortest queue."""
        if (known := self._number_of(tenant)) is not None:
            return known
        now_s = asyncio.get_running_loop().time()
        assigned = {number for number, at_s in self._places.values() if at_s + PLACE_KEPT_S > now_s}
        waiting = {number: self._heads.ready_in(queue) for queue, number in self._numbers.items()}
        preferred = sorted(waiting, key=lambda number: blake2b(f"{number} {tenant}".encode(), digest_size=8).digest())

        def is_used(number: int) -> bool:
            return number in assigned or number in self._tenants or waiting[number] > 0

        return min(preferred, key=lambda number: (is_used(number), waiting[number]))

    def _number_of(self, tenant: str) -> int | None:
        """The number of the side queue whose first message, held by this process, is a request of the tenant, or that
        was assigned to the tenant at most `PLACE_KEPT_S` ago; None if there is no such queue."""
        for number, owner in self._tenants.items():
            if owner == tenant:
                return number
        number, at_s = self._places.get(tenant, (0, -PLACE_KEPT_S))
        return number if at_s + PLACE_KEPT_S > asyncio.get_running_loop().time() else None

    def _keep(self, tenant: str, number: int) -> None:
        """Assign the side queue with this number to the tenant from now on."""
        now_s = asyncio.get_running_loop().time()
        self._places.pop(tenant, None)
        self._places[tenant] = number, now_s
        while self._places[oldest := next(iter(self._places))][1] + PLACE_KEPT_S <= now_s:
            del self._places[oldest]
