"""Gathers the requests of `lane.batches` into tickets (`ticket.py`), each of which becomes one batch of a provider.

Of all workers one consumes the queue, so that batches are full however many there are. A request stays unacknowledged
until a ticket with it is confirmed. Before that, the store marks it as belonging to the ticket: a request whose mark
belongs to a ticket that was submitted is not put into another one, because it would be paid twice. It goes back to its
lane after a while, as do requests that may not wait any longer, or that an operator has paused. A dead letter that is
published again soon runs live for the same reason.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import structlog

from consumers.batches.ticket import Ticket, TicketItem, pack, parts, ticket_message
from consumers.brake import Brake
from consumers.job import Route
from consumers.settle import FAULTS_AT_MOST, Settler
from consumers.state.base import Identity, StoreUnavailable
from consumers.state.store import Store
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import BrokerError, MessageTooLarge
from lanekeeper.telemetry import signals
from topology.broker.consume import ChannelLost, Deliveries, Delivery, supervised
from topology.codec.decoding import app_of
from topology.codec.headers import BatchHop, read_batch, split_tail, with_batch, without_params
from topology.delays import hop
from topology.lanes import BatchSpec

AGAIN_MS: Final = 30_000
LONGEST_MS: Final = 900_000
"""A request that another ticket has comes back to its lane after these times: each is twice as long as the one before,
because the batch may take hours."""
PAUSED_MS: Final = 1000
KEPT_MS: Final = 3_600_000
"""For so long after a request's deadline its mark is kept."""
AT_ONCE: Final = 64
BATCHES_IN_HAND: Final = 2
"""For so many full batches requests are held at a time."""
GROUPS_PER_TENANT: Final = 16
"""A tenant's requests open at most so many batches at a time: what would open another one runs live. So a tenant that
varies its models or `anthropic-beta` makes no small batches without end."""
MILLION: Final = 1_000_000
log = structlog.get_logger()


class _Group(NamedTuple):
    """The requests that one batch may have together."""

    lane: str
    provider: str
    account: str
    model: str
    headers: str
    dialect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    delivery: Delivery
    routing_key: str
    batch: BatchHop
    params: bytes
    """What the provider gets."""

    @property
    def identity(self) -> Identity:
        return Identity(self.batch.tenant, self.delivery.message.message_id or "")

    @property
    def size(self) -> int:
        body = self.delivery.message.body
        return len(body) if self.params is body else len(body) + len(self.params)

    @property
    def lane(self) -> str:
        return self.routing_key.partition(".")[0]

    @property
    def route(self) -> Route:
        batch = self.batch
        return Route(provider=batch.provider, model=batch.model, name=batch.model, account=batch.account)

    def message(self, batch: BatchHop, names: Names) -> Message:
        """As its lane gets it back."""
        headers = with_batch(self.delivery.message.headers, batch, of=names)
        return replace(self.delivery.message, exchange="", routing_key="", headers=headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unread:
    """A request that another version has published: it goes back to its lane, where it waits for a worker of that
    version."""

    found: Message
    routing_key: str
    batch: str
    body: bytes

    def message(self, names: Names) -> Message:
        headers = with_batch(self.found.headers, self.batch, of=names)
        return replace(self.found, body=self.body, exchange="", routing_key="", headers=headers)


@dataclass(slots=True, eq=False)
class _Gathering:
    """A batch that is not full yet."""

    opened_by: str
    """The tenant of its first request."""
    requests: list[_Request] = field(default_factory=list)
    bytes: int = 0
    part: int = 0
    """How large a part of a full batch it is, in millionths."""
    parts: Counter[str] = field(default_factory=Counter, init=False)
    """The same of each tenant."""
    full: asyncio.Event = field(default_factory=asyncio.Event)


class _Back(NamedTuple):
    request: _Request
    batch: BatchHop
    delay_ms: int


@dataclass(slots=True, eq=False, repr=False)
class Gatherer:
    """Consumes `lane.batches`, also where no lane has batches any more: then it sends back what waits there. `specs`:
    of each lane, also of those that this worker does not consume."""

    deliveries: Deliveries
    _: KW_ONLY
    specs: Mapping[str, BatchSpec]
    publisher: Publisher
    settler: Settler
    store: Store
    pauses: Brake
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """What became of requests: `gathered`; or sent back, because another ticket has them (`repeated`), they are
    `paused`, they may not wait any longer (`late`), or their tenant has too many batches open (`rare`)."""
    _groups: dict[_Group, _Gathering] = field(default_factory=dict, init=False)
    _in_hand: set[int] = field(default_factory=set, init=False)
    """The tags of the deliveries that are not settled."""

    @property
    def in_hand(self) -> int:
        """How many requests this worker holds."""
        return len(self._in_hand)

    async def run(self) -> None:
        async with aclosing(self.deliveries.sessions()) as sessions:
            async for session in sessions:
                self._groups.clear()
                self._in_hand.clear()
                try:
                    async with asyncio.TaskGroup() as gathering:
                        take = partial(self._take, gathering=gathering)
                        async for delivery in session:
                            self._in_hand.add(delivery.tag)
                            await supervised(take, delivery, on_fault=partial(self._fault, gathering=gathering))
                        for group in list(self._groups):
                            self._close(group)
                except* ChannelLost as lost:
                    log.warning(signals.DELIVERY_LOST, queue=self.deliveries.queue, error=str(lost.exceptions[0]))

    async def _fault(self, delivery: Delivery, *, gathering: asyncio.TaskGroup) -> None:
        settling = self._settle([delivery], self.settler.reject_later)
        gathering.create_task(settling, name=f"fault {delivery.tag}")

    async def _settle(self, deliveries: Iterable[Delivery], settle: Callable[[Delivery], Awaitable[None]]) -> None:
        """Each by itself: one acknowledgement for several would cover others, which are still in hand."""

        async def one(delivery: Delivery) -> None:
            await settle(delivery)
            self._in_hand.discard(delivery.tag)

        await asyncio.gather(*map(one, deliveries))

    async def _take(self, delivery: Delivery, *, gathering: asyncio.TaskGroup) -> None:
        request = _read(delivery)
        if not isinstance(request, _Request) or not self._join(request, gathering):
            self.counts["rare"] += isinstance(request, _Request)
            gathering.create_task(self._divert(delivery, request), name=f"divert {delivery.tag}")

    async def _divert(self, delivery: Delivery, request: _Request | _Unread | None) -> None:
        """Settle a delivery that joins no batch."""
        settle = self.settler.ack
        try:
            match request:
                case _Request():
                    await self._send_one_back(_Back(request, replace(request.batch, live=True), 0))
                case _Unread():
                    await self._publish_back(request.message(self.settler.names), request.routing_key, 0)
                case None:  # no worker has published it
                    await self.settler.publish_stray(delivery.message)
        except BrokerError as error:
            log.error(signals.HANDLER_FAILED, where="gather", error=str(error))
            settle = self.settler.nack_later
        except Exception:
            log.exception(signals.HANDLER_FAILED, where="gather")
            settle = self.settler.reject_later
        await self._settle([delivery], settle)

    def _join(self, request: _Request, gathering: asyncio.TaskGroup) -> bool:
        """Add a request to its batch. Returns False if that would be one more than its tenant may have at a time."""
        batch, spec = request.batch, self.specs.get(request.lane, BatchSpec())
        group = _Group(request.lane, batch.provider, batch.account, batch.model, batch.headers, batch.dialect)
        if (found := self._groups.get(group)) is None:
            if sum(each.opened_by == batch.tenant for each in self._groups.values()) >= GROUPS_PER_TENANT:
                return False
            found = self._groups[group] = _Gathering(batch.tenant)
            gathering.create_task(self._gather(group, found, spec), name=f"gather {request.delivery.tag}")
        found.requests.append(request)
        found.bytes += request.size
        part = max(-(-MILLION // spec.count), -(-MILLION * request.size // spec.bytes))
        found.part += part
        found.parts[batch.tenant] += part
        if not spec.enabled or len(found.requests) >= spec.count or found.bytes >= spec.bytes:
            self._close(group)
        else:
            self._limit()
        return True

    def _limit(self) -> None:
        """If more is held than may be, close a batch of the tenant that has most: so none closes its neighbour's."""
        groups = self._groups.values()
        if sum(each.part for each in groups) < BATCHES_IN_HAND * MILLION:
            return
        ((tenant, _),) = sum((each.parts for each in groups), Counter[str]()).most_common(1)
        self._close(max(self._groups, key=lambda each: self._groups[each].parts[tenant]))

    def _close(self, group: _Group) -> None:
        self._groups.pop(group).full.set()

    async def _gather(self, group: _Group, found: _Gathering, spec: BatchSpec) -> None:
        try:
            async with asyncio.timeout(spec.window_s):
                await found.full.wait()
        except TimeoutError:
            if self._groups.get(group) is found:
                del self._groups[group]
        deliveries = [request.delivery for request in found.requests]
        settle: Callable[[Delivery], Awaitable[None]] = self.settler.nack
        try:
            if not self.deliveries.is_stopping:
                await self._flush(group, found.requests, spec)
                settle = self.settler.ack
        except (BrokerError, StoreUnavailable) as error:
            log.error(signals.HANDLER_FAILED, where="gather", error=str(error))
            settle = self.settler.nack_later
        except Exception:
            log.exception(signals.HANDLER_FAILED, where="gather")
            if any((delivery.times_delivered or 1) >= FAULTS_AT_MOST for delivery in deliveries):
                # each by itself, to run live: so one of them spoils no other
                await asyncio.gather(*(self._divert(each.delivery, each) for each in found.requests))
                return
            settle = self.settler.reject_later  # which is counted
        await self._settle(deliveries, settle)

    async def _flush(self, group: _Group, requests: Sequence[_Request], spec: BatchSpec) -> None:
        """Publish a ticket of these requests, and send back those that are not in it. Raises BrokerError,
        StoreUnavailable."""
        now_ms, ticket_id = self.settler.now_ms(), secrets.token_hex(12)
        wanted: dict[Identity, _Request] = {}
        back: list[_Back] = []
        for request in requests:
            if self._is_paused(request):
                self.counts["paused"] += 1
                back.append(_Back(request, request.batch, PAUSED_MS))
            elif not spec.enabled or request.batch.deadline_ms - 1000 * spec.promote_s <= now_ms:
                self.counts["late"] += 1
                back.append(_Back(request, replace(request.batch, live=True), 0))
            elif request.identity in wanted:
                back.append(self._again(request, spec, now_ms))
            else:
                wanted[request.identity] = request
        if wanted:
            until_ms = max(request.batch.deadline_ms for request in wanted.values()) + KEPT_MS
            former = {identity: request.batch.ticket for identity, request in wanted.items()}
            granted = await self.store.gather(ticket_id, list(wanted), until_ms=until_ms, former=former)
            self.settler.failpoints.reach("after_gather_mark")
            back += [self._again(wanted[each], spec, now_ms) for each in wanted if each not in granted]
            await self._publish(ticket_id, group, [wanted[each] for each in wanted if each in granted], now_ms)
        await self._send_back(back)
        self.settler.failpoints.reach("after_ticket")

    def _is_paused(self, request: _Request) -> bool:
        batch, pauses = request.batch, self.pauses
        return pauses.of("lane", request.lane) is not None or (
            pauses.of_request(tenant=batch.tenant, app=app_of(request.routing_key), routes=(request.route,)) is not None
        )

    def _again(self, request: _Request, spec: BatchSpec, now_ms: int) -> _Back:
        self.counts["repeated"] += 1
        batch = request.batch
        if n.DEAD_AT in request.delivery.message.headers:
            # a dead letter that was published again: the mark is from the batch in which it failed
            return _Back(request, replace(batch, live=True), 0)
        left_ms = batch.deadline_ms - round(1000 * spec.promote_s) - now_ms
        delay_ms = min(AGAIN_MS << min(batch.tries, 5), LONGEST_MS, left_ms)
        return _Back(request, replace(batch, tries=batch.tries + 1), delay_ms)

    async def _publish(self, id: str, group: _Group, requests: Sequence[_Request], now_ms: int) -> None:
        if not requests:
            return
        names = self.settler.names
        items = [
            TicketItem(
                number=number,
                message=request.message(request.batch, names),
                routing_key=request.routing_key,
                identity=request.identity,
                deadline_ms=request.batch.deadline_ms,
                params=request.params,
                tokens=request.batch.tokens,
            )
            for number, request in enumerate(requests)
        ]
        divided = await asyncio.to_thread(list, parts(items))
        for nth, part in enumerate(divided):
            ticket = Ticket(
                id=id if len(divided) == 1 else f"{id}{nth:02x}",
                lane=group.lane,
                account=group.account,
                provider=group.provider,
                model=group.model,
                headers=group.headers,
                dialect=group.dialect,
                gathered_ms=now_ms,
                items=part,
            )
            message = ticket_message(ticket, await asyncio.to_thread(pack, ticket))
            try:
                await self.publisher.publish_surely(message, exchange="", routing_key=names.tickets)
            except MessageTooLarge as error:  # the broker was told to take only smaller ones
                log.error(signals.HANDLER_FAILED, where="gather", error=str(error))
                live = (requests[item.number] for item in part)
                await self._send_back([_Back(each, replace(each.batch, live=True), 0) for each in live])
            else:
                self.counts["gathered"] += len(part)

    async def _send_back(self, back: Sequence[_Back]) -> None:
        for begin in range(0, len(back), AT_ONCE):
            await asyncio.gather(*map(self._send_one_back, back[begin : begin + AT_ONCE]))

    async def _send_one_back(self, back: _Back) -> None:
        message = back.request.message(back.batch, self.settler.names)
        await self._publish_back(message, back.request.routing_key, back.delay_ms)

    async def _publish_back(self, message: Message, routing_key: str, delay_ms: int) -> None:
        first_hop, now_ms = hop(delay_ms, self.settler.names), self.settler.now_ms()
        times = {n.HOP_MS: now_ms, n.BACK_MS: now_ms + first_hop.delay_ms}
        message.headers = {**message.headers, **times, **first_hop.headers}
        try:
            await self.publisher.publish_surely(message, exchange=first_hop.exchange, routing_key=routing_key)
        except MessageTooLarge as error:
            await self.settler.end_too_large(message, error, routing_key=routing_key)


def _read(delivery: Delivery) -> _Request | _Unread | None:
    """None: no worker has published it."""
    message = delivery.message
    text, key = message.headers.get(n.BATCH), message.headers.get(n.ROUTING_KEY)
    if message.exchange or not message.message_id or not isinstance(key, str) or not isinstance(text, str):
        return None
    batch = read_batch(message.headers)
    if batch is not None:
        body, tail = split_tail(message.body, batch.params_bytes)
        message.body = body  # so that the two are in memory once
        batch = replace(batch, params_bytes=0)
        return _Request(delivery=delivery, routing_key=key, batch=batch, params=tail or body)
    if (found := without_params(text)) is None:
        return None
    header, length = found
    return _Unread(found=message, routing_key=key, batch=header, body=split_tail(message.body, length)[0])


def prefetch_of(specs: Iterable[BatchSpec]) -> int:
    """How many requests a worker holds at most."""
    return BATCHES_IN_HAND * max((spec.count for spec in specs if spec.enabled), default=BatchSpec().count)
