"""Moves requests over their tenant's share into a side queue of their lane, where they delay nobody else.

A request is published there with a confirm, and then acknowledged (`consumers/pool.py`). A worker that dies between the
two leaves two messages of one request; the claim detects that. No claim is taken and no attempt counted.

Each tenant has a side queue of its own while there are enough of them. A process knows which tenant a side queue
belongs to if it holds the queue's first message (its head), or put a message there itself. For a moment two processes
may choose different queues for one tenant; then that tenant's order is lost."""

import asyncio
from hashlib import blake2b
from typing import Final

from consumers.copies import set_aside
from consumers.job import Job, NowMs
from consumers.outcomes import Deferred, Outcome, Refused
from consumers.rank import HIGHEST
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import UNREADABLE
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PublishRefused, RequestProblem
from topology.broker.heads import Heads
from topology.lanes import LaneSpec

PLACE_KEPT_S: Final = 1.0
"""How long a tenant keeps its queue after the last request was put there, until the queue's head has been seen."""
FULL_FOR_S: Final = 1.0
"""A queue that was full is not tried again earlier."""
LATER_MS: Final = 1000


class Aside:
    """The side queues of one lane, as this process knows them."""

    def __init__(self, lane: LaneSpec, heads: Heads, *, publisher: Publisher, names: Names, now_ms: NowMs) -> None:
        self._lane = lane
        self._heads = heads
        self._publisher = publisher
        self._names = names
        self._now_ms = now_ms
        self._queues = {names.side(lane.name, each): each for each in range(lane.side_queues)}
        self._tenants: dict[int, str] = {}
        """For each side queue: the tenant of the head that this process holds."""
        self._places: dict[str, tuple[int, float]] = {}
        """For each tenant: the side queue that is kept for it, and since when."""
        self._full_until_s: dict[int, float] = {}

    def has(self, tenant: str) -> bool:
        """Whether the tenant has requests set aside, as far as this process knows."""
        return tenant in self._tenants.values() or self._placed(tenant) is not None

    def may_take(self, job: Job) -> bool:
        """Whether a request may be moved. One with wrong headers may not, because the copy would lose them."""
        message = job.message
        if job.trusted:
            return not job.hop.reply_try  # only its reply is left, which needs no call
        headers = message.headers
        return (
            message.exchange == self._names.requests
            and message.routing_key.split(".", 1)[0] == self._lane.name
            and (message.priority or 0) <= HIGHEST
            and not any(each in headers for each in (UNREADABLE, n.DEATH, n.CC, n.BCC))
        )

    def arrived(self, job: Job) -> None:
        """The head of a side queue is held now."""
        number = self._queues[job.delivery.queue]
        self._tenants[number] = job.identity.tenant

    def left(self, job: Job) -> None:
        """The head is being worked on, or is gone: the next one may be fetched."""
        number = self._queues[job.delivery.queue]
        if self._tenants.pop(number, None) is not None:
            self._keep(job.identity.tenant, number)
        self._heads.pass_on(job.delivery.queue)

    def passed_over(self, queue: str) -> None:
        """The head of a side queue cannot be read: the next one may be fetched."""
        self._heads.pass_on(queue)

    async def put(self, job: Job) -> Outcome | None:
        """Move a request and wait for the confirm. If there is no room, return the outcome. Raises BrokerError."""
        number = self._place(job.identity.tenant)
        if asyncio.get_running_loop().time() < self._full_until_s.get(number, 0):
            return self._full(job)
        self._keep(job.identity.tenant, number)
        message = set_aside(job, now_ms=self._now_ms(), names=self._names)
        try:
            await self._publisher.publish_surely(
                message,
                exchange=self._names.side_exchange(number),
                routing_key=job.routing_key,
                refused_within_s=0,
            )
        except PublishRefused:
            self._full_until_s[number] = asyncio.get_running_loop().time() + FULL_FOR_S
            return self._full(job)
        self._heads.publish_seen(self._names.side(self._lane.name, number))
        return None

    def _full(self, job: Job) -> Outcome:
        if job.is_fresh and not job.trusted:
            return Refused(
                RequestProblem(
                    "too_many_waiting",
                    f"lane {self._lane.name} holds {self._lane.max_length} waiting requests of this tenant (and of "
                    "those that share its side queue), and takes no more; send them later",
                )
            )
        return Deferred(delay_ms=LATER_MS, reason="too many waiting", due_ms=job.hop.due_ms)

    def _place(self, tenant: str) -> int:
        """The tenant's own queue, else the first of its preferences that no tenant has, else the shortest."""
        now_s = asyncio.get_running_loop().time()
        for number, owner in self._tenants.items():
            if owner == tenant:
                return number
        if (placed := self._placed(tenant)) is not None:
            return placed
        others = {queue for queue, at_s in self._places.values() if at_s + PLACE_KEPT_S > now_s}
        waiting = {each: self._heads.ready_in(queue) for queue, each in self._queues.items()}
        preferred = sorted(waiting, key=lambda each: blake2b(f"{each} {tenant}".encode(), digest_size=8).digest())
        return min(
            preferred, key=lambda each: (each in others or each in self._tenants or waiting[each] > 0, waiting[each])
        )

    def _placed(self, tenant: str) -> int | None:
        queue, at_s = self._places.get(tenant, (0, -PLACE_KEPT_S))
        return queue if at_s + PLACE_KEPT_S > asyncio.get_running_loop().time() else None

    def _keep(self, tenant: str, number: int) -> None:
        now_s = asyncio.get_running_loop().time()
        self._places.pop(tenant, None)
        self._places[tenant] = number, now_s
        while (oldest := next(iter(self._places))) and self._places[oldest][1] + PLACE_KEPT_S <= now_s:
            del self._places[oldest]
