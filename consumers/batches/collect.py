"""Takes tickets (`ticket.py`) from `lane.tickets`: submits the batch of each, looks from time to time whether it has
ended, and brings each result back to its request's lane, where the request ends like any other (`attempt.py`).

    gathered ──create──► submitted ──ended──► each request back to its lane, with its result; the ticket is gone
        │ an answer to create was lost ──► adopting ──► submitted, or created now

Between two looks a ticket waits in the delay exchanges. Of all workers one consumes the queue. It may die at any point:
the ticket is then delivered again, and what was done already is harmless if it is done again. A second batch with the
same requests would be paid twice; so before a batch is created, the store marks its requests as submitted, and a ticket
whose requests are marked already looks first for the batch that may exist. A lease in the store (`_may_create`) belongs
to one delivery of the ticket, and keeps others from creating the batch meanwhile, also in the same process: the
provider may still create what was asked for before the broker's channel was lost.

A request leaves its batch before the end if its deadline comes near (it is promoted: its lane runs it live), or if it
was cancelled.
"""

import asyncio
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Final, assert_never

import structlog

from consumers.batches.ticket import (
    Ticket,
    TicketItem,
    TicketStage,
    UnreadTicket,
    items_in,
    pack,
    ticket_message,
    unpack,
)
from consumers.failures import ProviderError, RejectedError
from consumers.job import Route
from consumers.limits.base import BatchLimits
from consumers.providers.batches import CREATE_WITHIN_S, NONE_MADE, Batches, BatchInfo
from consumers.providers.breakers import Breakers
from consumers.settle import Settler
from consumers.state.base import Identity, StoreUnavailable
from consumers.state.store import Store
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, MessageTooLarge
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import headers_with
from topology.broker.consume import Deliveries, Delivery
from topology.codec.headers import BatchHop, item_of, read_batch, with_batch
from topology.delays import UNIT_MS, hop, wait_ms
from topology.lanes import BatchSpec

SLOTS: Final = 8
"""How many tickets are worked on at a time; each may be 4 MiB, and several times as much unpacked."""
LONGEST_POLL_MS: Final = 600_000
SURE_AFTER_MS: Final = 5_000
"""A call to create a batch that was cut off may take effect so late."""
FENCE_S: Final = 600.0
"""For so long after a delivery of a ticket began to create its batch no other delivery does."""
UNSURE_S: Final = 60.0
"""For so long after a call that has failed, but may have created the batch all the same."""
BEGIN_WITHIN_S: Final = FENCE_S - CREATE_WITHIN_S - SURE_AFTER_MS / 1000
"""A worker that took a ticket longer ago creates no batch: another one may have done it since."""
SINCE_MS: Final = 60_000
"""The provider's clock may be behind ours by so much."""
UNREAD_MS: Final = 60_000
FAILED_MS: Final = 1_000
LONGEST_FAILED_MS: Final = 60_000
"""So long a ticket waits after an error: the store is away, or a fault of ours."""
KEPT_MS: Final = 2 * 86_400_000
"""For how long the store keeps what it knows of a ticket: a batch lasts a day at most."""
BACK_AT_ONCE: Final = 64
BACK_BYTES: Final = 4 * 1024 * 1024
"""So many requests, or bytes of results, are on their way back to their lanes at a time."""
TOO_LARGE: Final = b'{"result":{"type":"too_large"}}'
"""As `Batches` says it of a result that is too large to be read."""
SPLIT: Final = frozenset({400, 413, 422})
"""So a batch is refused because of what is in it."""
NOT_RUN: Final = frozenset({"expired", "canceled"})
ASKED_AT_ONCE: Final = 500
TURN_WITHIN_S: Final = 20.0
ASKS_FOR_S: Final = 1.0
log = structlog.get_logger()


class _NoTurn(Exception):
    """Another ticket of its provider is being submitted, and takes long."""


@dataclass(slots=True, eq=False)
class _Visit:
    """The work on a ticket that was delivered."""

    delivery: Delivery
    began_s: float
    """By the event loop's clock."""
    owner: str = field(default_factory=partial(secrets.token_hex, 8))
    """Of its lease."""
    lease_s: float | None = None
    """For how long its lease stays when the visit ends; None: as long as it was taken for."""


Returning = tuple[TicketItem, bytes | None]
"""A request that goes back to its lane, with its line of the results; None: to be run live."""


@dataclass(frozen=True, slots=True)
class _Next:
    """What becomes of a ticket: it comes back after a delay, in this form."""

    ticket: Ticket
    delay_ms: int


@dataclass(slots=True, eq=False, repr=False)
class Collector:
    """Consumes `lane.tickets`. `specs`: of each lane. `limits`, `batches`: of the provider with this name; None if it
    has no batches. `count_late`: counts the cost of an answer to a request that had left its batch."""

    deliveries: Deliveries
    _: KW_ONLY
    specs: Mapping[str, BatchSpec]
    limits: Mapping[str, BatchLimits]
    batches: Callable[[str], Batches | None]
    breakers: Breakers
    publisher: Publisher
    settler: Settler
    store: Store
    count_late: Callable[[str, Route, bytes, str], Awaitable[None]]
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """What became of batches (`submitted`, `adopted`, `ended`, `split`, `vanished`, `cancelled`; `queue_full`: one had
    to wait; `unsubmitted`, `unread`: a call about one failed, and is made again; `unread_ticket`: one of another
    version waits), and of requests in them (`succeeded`, `errored`, `expired`, `canceled`, `broken`, `missing`,
    `promoted`; `answered_late`: the result of a request that had left)."""
    waiting: dict[str, tuple[str, int, int]] = field(default_factory=dict, init=False)
    """For each ticket that this process saw last: its lane, how many requests it has, and when it comes back (ms since
    1970)."""
    _submitting: defaultdict[str, asyncio.Lock] = field(default_factory=partial(defaultdict, asyncio.Lock), init=False)
    """By provider: a batch whose creation was not answered yet looks like one that nobody knows."""
    _unpacking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _at_work: dict[str, _Visit] = field(default_factory=dict, init=False)
    """The tickets that are worked on."""

    @property
    def trouble(self) -> str | None:
        if (why := self.deliveries.trouble) is not None:
            return why
        if unknown := sorted({lane for lane, *_ in self._waiting()} - self.specs.keys()):
            return f"it waits for batches of {', '.join(unknown)}, which is no lane of its settings, or a disabled one"
        return None

    @property
    def requests_waiting(self) -> int:
        """How many requests are in tickets, as far as this process knows."""
        return sum(requests for _, requests, _ in self._waiting())

    @property
    def tickets_waiting(self) -> int:
        """How many tickets there are, as far as this process knows."""
        return len(self._waiting())

    def _waiting(self) -> Collection[tuple[str, int, int]]:
        now_ms = self.settler.now_ms()
        self.waiting = {id: each for id, each in self.waiting.items() if each[2] + LONGEST_POLL_MS > now_ms}
        return self.waiting.values()

    async def run(self) -> None:
        await self.deliveries.take_each(self._take, on_fault=self.settler.reject_later)

    async def _take(self, delivery: Delivery) -> None:
        is_done = True
        try:
            await self._handle(delivery)
        except* (BrokerError, StoreUnavailable) as away:
            is_done = False
            log.error(signals.HANDLER_FAILED, where="ticket", error=str(away.exceptions[0]))
        except* Exception:  # it comes back without end: its requests must not be lost by a fault of ours
            is_done = False
            log.exception(signals.HANDLER_FAILED, where="ticket")
        is_done = is_done or await self._put_off(delivery)
        await (self.settler.ack(delivery) if is_done else self.settler.nack_later(delivery))

    async def _put_off(self, delivery: Delivery) -> bool:
        """Bring a ticket back as it is, each time after twice as long: each look at a large one costs a second of CPU.
        False: the broker does not take it; or no worker published it, and after a delay it would look as if one had."""
        message, tries = delivery.message, _tries(delivery.message)
        if not self._is_trusted(message):
            return False
        headers = {name: value for name, value in message.headers.items() if name in n.TRACE_CONTEXT}
        again = replace(message, exchange="", routing_key="", headers={**headers, n.ATTEMPT: tries + 1})
        delay_ms = min(FAILED_MS << min(tries, 16), LONGEST_FAILED_MS)
        try:
            await self.settler.send_around(again, delay_ms, routing_key=self.settler.names.ticket_key)
        except BrokerError as error:
            log.error(signals.HANDLER_FAILED, where="ticket", error=str(error))
            if isinstance(error, MessageTooLarge):  # its requests leave it one by one, at the latest by their deadlines
                await asyncio.sleep(LONGEST_FAILED_MS / 1000)
            return False
        return True

    async def _handle(self, delivery: Delivery) -> None:
        message, settler = delivery.message, self.settler
        try:
            if not self._is_trusted(message):
                raise ValueError
            async with self._unpacking:  # one at a time is several times as large as it is packed
                ticket = await asyncio.to_thread(unpack, message.body)
        except UnreadTicket as error:  # its requests wait for a worker of the version that wrote it, two days at most
            self.counts["unread_ticket"] += 1
            log.error(signals.HANDLER_FAILED, where="ticket", ticket=message.message_id, error=str(error))
            now_s = settler.now_ms() / 1000
            since_s = message.timestamp_s or now_s
            if now_s - since_s > KEPT_MS / 1000:
                await settler.publish_stray(message)
                return
            again = replace(message, exchange="", routing_key="", headers={}, timestamp_s=since_s)
            await settler.send_around(again, UNREAD_MS, routing_key=settler.names.ticket_key)
            return
        except ValueError:
            await self.settler.publish_stray(message)
            return
        operation = "collect" if ticket.stage is TicketStage.SUBMITTED else "submit"
        requests = [item.message for item in ticket.items]
        with settler.tracing.batch(operation, requests, model=ticket.model, provider=ticket.provider) as span:
            found: _Next | None = _Next(ticket, SURE_AFTER_MS)
            try:
                if ticket.id not in self._at_work:  # else it was published again, because of a confirm that was lost
                    is_repeated = delivery.redelivered or _tries(message) > 0
                    found = await self._work_on(ticket, delivery, is_repeated=is_repeated)
            except* (BrokerError, StoreUnavailable):
                raise
            except* Exception:  # by a fault of ours no request may stay in it beyond its deadline
                log.exception(signals.HANDLER_FAILED, where="ticket")
                found = self._later(ticket)
            if found is not None:
                found = await self._without_urgent(found)
        if found is None:
            self.waiting.pop(ticket.id, None)
            return
        packed = items_in(message.body) if len(found.ticket.items) == len(ticket.items) else None
        body = await asyncio.to_thread(pack, found.ticket, packed)
        again = ticket_message(found.ticket, body, headers_with({}, span.get_span_context()))
        await settler.send_around(again, found.delay_ms, routing_key=settler.names.ticket_key)
        self.waiting[ticket.id] = ticket.lane, len(found.ticket.items), settler.now_ms() + found.delay_ms
        settler.failpoints.reach("after_submitted")

    async def _work_on(self, ticket: Ticket, delivery: Delivery, *, is_repeated: bool) -> _Next | None:
        visit = self._at_work[ticket.id] = _Visit(delivery, asyncio.get_running_loop().time())
        try:
            match ticket.stage:
                case TicketStage.GATHERED:
                    return await self._submit(ticket)
                case TicketStage.ADOPTING:
                    return await self._adopt(ticket, is_repeated=is_repeated)
                case TicketStage.SUBMITTED:
                    return await self._collect(ticket)
                case never:
                    assert_never(never)
        finally:
            del self._at_work[ticket.id]
            if visit.lease_s is not None:
                with suppress(StoreUnavailable):
                    await self.store.hold(_fence(ticket), visit.owner, for_s=visit.lease_s)

    def _is_trusted(self, message: Message) -> bool:
        """Whether a worker has published it: nobody else may write to these exchanges."""
        names, exchange = self.settler.names, message.exchange
        return exchange in ("", names.due_exchange) or exchange.startswith(names.delay_prefix)

    # ---- submitting --------------------------------------------------------------------------------------------------

    async def _submit(self, ticket: Ticket) -> _Next | None:
        if (found := self._waits(ticket)) is not None:
            return found
        limits, until_ms = self.limits.get(ticket.provider, BatchLimits()), self.settler.now_ms() + KEPT_MS
        if not await self.store.enqueue(
            ticket.id,
            ticket.account,
            requests=len(ticket.items),
            tokens=sum(item.tokens for item in ticket.items),
            most_requests=limits.requests,
            most_tokens=limits.tokens,
            until_ms=until_ms,
        ):
            self.counts["queue_full"] += 1
            return self._later(ticket)
        held = await self.store.submit(ticket.id, [item.identity for item in ticket.items], until_ms=until_ms)
        self.settler.failpoints.reach("after_submit_mark")
        # the others are in another ticket: their messages were delivered again when they were gathered
        ours = tuple(item for item in ticket.items if item.identity in held)
        if not ours:
            return await self._finish(ticket)
        if any(held.values()) or len(ours) < len(ticket.items):
            return _Next(replace(ticket, stage=TicketStage.ADOPTING, items=ours, requests=len(ours)), SURE_AFTER_MS)
        return await self._begin(replace(ticket, requests=len(ours)))

    async def _begin(self, ticket: Ticket) -> _Next | None:
        """Create its batch, without requests that would leave it at the first look. A batch is found again by how many
        requests it has, so the broker must have a ticket that says so first."""
        ready = await self._without_urgent(self._submitted(ticket, ""))
        if ready is None:
            return None
        left = ready.ticket.items
        if len(left) != ticket.requests:
            return _Next(replace(ticket, stage=TicketStage.ADOPTING, items=left, requests=len(left)), 0)
        return await self._create(ticket)

    async def _create(self, ticket: Ticket) -> _Next | None:
        if (batches := self.batches(ticket.provider)) is None or batches.is_missing:
            return await self._all_live(ticket)
        calls, visit = [(ticket.custom_id(item), item.params) for item in ticket.items], self._at_work[ticket.id]
        try:
            async with self._turn(ticket):
                if not await self._may_create(ticket):
                    return self._later(replace(ticket, stage=TicketStage.ADOPTING, requests=len(ticket.items)))
                visit.lease_s = None  # also if this is cancelled: the provider may go on
                info = await batches.create(
                    calls, dialect=ticket.dialect, ticket=ticket.id, headers=json.loads(ticket.headers or "{}")
                )
                self.settler.failpoints.reach("after_create")
                with suppress(StoreUnavailable):  # the ticket says it, too
                    await self._note(info.id, ticket)
        except _NoTurn:
            return self._later(replace(ticket, stage=TicketStage.ADOPTING, requests=len(ticket.items)))
        except ProviderError as error:
            visit.lease_s = 0 if isinstance(error, NONE_MADE) else UNSURE_S
            return await self._refused(ticket, await self.breakers.pauses.judge(_route(ticket), error))
        self._tell(ticket, "submitted", batch=info.id)
        return self._submitted(ticket, info.id)

    @asynccontextmanager
    async def _turn(self, ticket: Ticket) -> AsyncIterator[None]:
        """One ticket of a provider at a time. Raises _NoTurn if others take long: then it comes back later, and tickets
        of other providers are worked on meanwhile."""
        turn = self._submitting[ticket.provider]
        try:
            async with asyncio.timeout(TURN_WITHIN_S):
                await turn.acquire()
        except TimeoutError:
            raise _NoTurn from None
        try:
            yield
        finally:
            turn.release()

    async def _may_create(self, ticket: Ticket) -> bool:
        """Whether no other delivery of the ticket creates its batch now, or may have just created it, or will while
        this one does."""
        visit = self._at_work[ticket.id]
        if not await self.store.hold(_fence(ticket), visit.owner, for_s=FENCE_S):
            return False
        visit.lease_s = 0
        # asked last, because the store may have taken long
        return asyncio.get_running_loop().time() - visit.began_s <= BEGIN_WITHIN_S

    def _submitted(self, ticket: Ticket, batch_id: str) -> _Next:
        return self._later(replace(ticket, stage=TicketStage.SUBMITTED, batch_id=batch_id, candidates=(), polls=0))

    async def _refused(self, ticket: Ticket, error: ProviderError) -> _Next | None:
        if isinstance(error, RejectedError):
            if error.status not in SPLIT or len(ticket.items) == 1:  # alone it gets its own error, or its answer
                return await self._all_live(ticket)
            return await self._split(ticket)
        self.counts["unsubmitted"] += 1
        log.warning(signals.BATCH_UNSUBMITTED, ticket=ticket.id, provider=ticket.provider, error=error.brief)
        adopting = replace(ticket, stage=TicketStage.ADOPTING, requests=len(ticket.items))
        return self._later(adopting, least_s=error.retry_after_s)

    async def _split(self, ticket: Ticket) -> _Next | None:
        """Publish two tickets in its place, so that what the provider refuses is found. Their ids are the same if this
        is done again."""
        half = len(ticket.items) // 2
        for number, items in enumerate((ticket.items[:half], ticket.items[half:])):
            part = replace(
                ticket, id=f"{ticket.id}{number}", stage=TicketStage.GATHERED, items=items, requests=0, polls=0
            )
            body = await asyncio.to_thread(pack, part)
            await self.publisher.publish_surely(
                ticket_message(part, body), exchange="", routing_key=self.settler.names.tickets
            )
        await self.store.dequeue(ticket.id, ticket.account)
        self._tell(ticket, "split")
        return None

    # ---- adopting ----------------------------------------------------------------------------------------------------

    async def _adopt(self, ticket: Ticket, *, is_repeated: bool) -> _Next | None:
        """Its batch may exist: find it. If the provider does not say whose it is (`BatchInfo.ticket`), its results do,
        by the ids of their requests."""
        if (batches := self.batches(ticket.provider)) is None:
            return await self._all_live(ticket)
        if is_repeated:  # its worker may have died while it created the batch
            return _Next(replace(ticket, candidates=()), SURE_AFTER_MS)
        may_create = await self._may_create(ticket)  # asked before the look: what is created after it is not seen
        try:
            candidates = ticket.candidates or await self._candidates(ticket, batches)
            left = []
            for id in candidates:
                is_its = await self._is_its_batch(ticket, id, batches)
                if is_its:
                    await self._note(id, ticket)
                    self._tell(ticket, "adopted", batch=id)
                    return self._submitted(ticket, id)
                if is_its is None:
                    left.append(id)
        except _NoTurn:
            return self._later(ticket)
        except ProviderError as error:
            self.counts["unsubmitted"] += 1
            log.warning(signals.BATCH_UNSUBMITTED, ticket=ticket.id, provider=ticket.provider, error=error.brief)
            return self._later(ticket, least_s=error.retry_after_s)
        if left:
            return self._later(replace(ticket, candidates=tuple(left)))
        if not may_create:
            return self._later(replace(ticket, candidates=()))
        return self._waits(ticket) or await self._begin(replace(ticket, candidates=()))

    async def _candidates(self, ticket: Ticket, batches: Batches) -> list[str]:
        """Its own, or those of as many requests of which it is not known that they are another ticket's."""

        def may_be_its(info: BatchInfo) -> bool:
            return info.requests == ticket.requests if info.ticket is None else info.ticket == ticket.id

        async with self._turn(ticket):
            found = batches.list_since(ticket.gathered_ms - SINCE_MS)
            listed = [info.id async for info in found if info.refusal is None and may_be_its(info)]
            return [id for id in listed if await self._is_its_own(id, ticket) is not False]

    async def _is_its_batch(self, ticket: Ticket, id: str, batches: Batches) -> bool | None:
        """None: not known yet."""
        if (is_noted := await self._is_its_own(id, ticket)) is not None:
            return is_noted
        try:
            info = await batches.retrieve(id)
            if info.ticket is not None:
                return info.ticket == ticket.id
            if not info.is_ended:
                return None
            async with aclosing(batches.results(id)) as lines:
                async for line in lines:
                    if line.custom_id:
                        return line.custom_id.startswith(f"{ticket.id}-")
        except RejectedError as error:
            if error.status != 404:
                raise
        return False

    async def _note(self, batch_id: str, ticket: Ticket) -> None:
        """Remember whose batch it is, so that no other ticket waits for it."""
        if not await self.store.hold(_lease(batch_id), ticket.id, for_s=KEPT_MS / 1000):
            await asyncio.sleep(ASKS_FOR_S)  # just now another worker asked whose it is
            await self.store.hold(_lease(batch_id), ticket.id, for_s=KEPT_MS / 1000)

    async def _is_its_own(self, batch_id: str, ticket: Ticket) -> bool | None:
        """Whether it was noted as this ticket's batch; None if it was not noted."""
        lease = _lease(batch_id)
        if await self.store.hold(lease, "nobody", for_s=ASKS_FOR_S):
            await self.store.let_go(lease, "nobody")
            return None
        return await self.store.hold(lease, ticket.id, for_s=KEPT_MS / 1000)

    # ---- collecting --------------------------------------------------------------------------------------------------

    async def _collect(self, ticket: Ticket) -> _Next | None:
        if (batches := self.batches(ticket.provider)) is None:  # its settings have changed: nobody can ask
            return await self._all_live(ticket)
        returned: list[TicketItem] = []
        try:
            info = await batches.retrieve(ticket.batch_id)
            if info.refusal is not None:
                await batches.delete_input(info)
                error = await self.breakers.pauses.judge(_route(ticket), info.refusal)
                return await self._refused(replace(ticket, batch_id=""), error)
            if not info.is_ended:
                return self._later(ticket)
            await self._results(ticket, batches, returned)
        except ProviderError as error:
            if isinstance(error, RejectedError) and error.status == 404:
                self._tell(ticket, "vanished")
                return await self._all_live(ticket)
            self.counts["unread"] += 1
            log.warning(signals.BATCH_UNREAD, batch=ticket.batch_id, provider=ticket.provider, error=error.brief)
            if not ticket.items or len(returned) < len(ticket.items):
                left = await self._without(ticket, returned)
                return self._later(left, least_s=error.retry_after_s)
        except Exception as error:
            is_away = ExceptionGroup("", [error]).subgroup((BrokerError, StoreUnavailable)) is not None
            if is_away or not returned:
                raise
            log.exception(signals.HANDLER_FAILED, where="ticket")
            return self._later(await self._without(ticket, returned))
        await batches.delete_input(info)
        self._tell(ticket, "ended")
        return await self._finish(ticket)

    async def _without(self, ticket: Ticket, returned: Sequence[TicketItem]) -> Ticket:
        await self.store.clear(ticket.id, [item.identity for item in returned])
        gone = dict.fromkeys(item.number for item in returned)
        left = tuple(item for item in ticket.items if item.number not in gone)
        return replace(ticket, items=left, returned=(*ticket.returned, *gone))

    async def _results(self, ticket: Ticket, batches: Batches, returned: list[TicketItem]) -> None:
        """`returned`: gets what went back, also if reading the rest fails."""
        missing, size = {ticket.custom_id(item): item for item in ticket.items}, 0
        known = {f"{ticket.id}-{number}" for number in ticket.returned}
        ended = await self._ended(ticket.items)
        # others may have been answered by this batch, before its results had to be read again
        cancelled = {number for number, is_cancelled in ended.items() if is_cancelled}
        await self._at_work[ticket.id].delivery.room(BACK_BYTES)
        returning: list[Returning] = []

        async def send() -> None:
            await self._back(ticket, returning)
            returned.extend(item for item, _ in returning)
            returning.clear()
            self.settler.failpoints.reach("after_result")

        async with aclosing(batches.results(ticket.batch_id)) as lines:
            async for line in lines:
                if line.custom_id in known:
                    continue
                item = missing.pop(line.custom_id, None)
                if item is None or item.number in cancelled:
                    if line.kind not in NOT_RUN:
                        self.counts["answered_late"] += 1
                        await self.count_late(ticket.lane, _route(ticket), line.line, ticket.dialect)
                    returning += [(item, None)] if item is not None else []
                    continue
                self.counts[line.kind] += 1
                returning.append((item, None if line.kind in NOT_RUN else line.line))
                size += len(line.line)
                if len(returning) >= BACK_AT_ONCE or size >= BACK_BYTES:
                    size = 0
                    await send()
        await send()
        self.counts["missing"] += len(missing)
        await self._back(ticket, [(item, None) for item in missing.values()])
        self.settler.failpoints.reach("after_results")

    # ---- requests that leave their batch -----------------------------------------------------------------------------

    async def _without_urgent(self, found: _Next) -> _Next | None:
        """Send back whose deadline comes near before the ticket does, and what has ended, or its pipeline; before its
        batch is created, also what another message of the same request runs live, which would be paid twice. Without
        the store, only the first: what the ticket knows must be published."""
        ticket, until_ms = found.ticket, self.settler.now_ms() + found.delay_ms
        if not ticket.items and ticket.gathered_ms + KEPT_MS < until_ms:  # what it cost will not be known
            return await self._finish(ticket)
        promote_ms = 1000 * self._spec(ticket).promote_s
        urgent = [item for item in ticket.items if item.deadline_ms - promote_ms <= until_ms]
        numbers = {item.number for item in urgent}
        others = [item for item in ticket.items if item.number not in numbers]
        over: Collection[int] = ()
        with suppress(StoreUnavailable):
            over = await self._ended(others, in_batch=bool(ticket.batch_id))
        ended = [item for item in others if item.number in over]
        if not urgent and not ended:
            return found
        leaving = (*urgent, *ended)
        await self._back(ticket, [(item, None) for item in leaving])
        self.counts["promoted"] += len(urgent)
        with suppress(StoreUnavailable):  # then they are marked for longer
            await self.store.clear(ticket.id, [item.identity for item in leaving])
        gone = {item.number for item in leaving}
        left = tuple(item for item in ticket.items if item.number not in gone)
        if not left:
            if not ticket.batch_id or (batches := self.batches(ticket.provider)) is None:
                return await self._finish(ticket)
            try:
                await batches.cancel(ticket.batch_id)
                self._tell(ticket, "cancelled")
            except ProviderError as error:  # then it ends for nobody
                log.warning(signals.BATCH_UNREAD, batch=ticket.batch_id, provider=ticket.provider, error=error.brief)
        # if nothing is left, the ticket waits for what the batch has answered already: it is paid for
        return replace(found, ticket=replace(ticket, items=left))

    async def _ended(self, items: Sequence[TicketItem], *, in_batch: bool = True) -> dict[int, bool]:
        """Which of them have ended, or their pipelines, by their numbers; and whether each was cancelled by that. Not
        yet `in_batch`: also those that run."""
        pipelines = {
            item.number: Identity(item.identity.tenant, id) for item in items if (id := item_of(item.message.headers))
        }
        asked, over = (
            list(dict.fromkeys((*(item.identity for item in items), *pipelines.values()))),
            dict[Identity, bool](),
        )
        may_not_run = set() if in_batch else {item.identity for item in items}
        for at in range(0, len(asked), ASKED_AT_ONCE):
            some = asked[at : at + ASKED_AT_ONCE]
            for identity, ending in zip(some, await self.store.endings(some), strict=True):
                if ending is not None and (ending.is_over or (ending.is_running and identity in may_not_run)):
                    over[identity] = ending.is_cancelled or ending.code == "cancelled"
        found = {item.number: over[item.identity] for item in items if item.identity in over}
        return found | {number: True for number, pipeline in pipelines.items() if pipeline in over}

    def _spec(self, ticket: Ticket) -> BatchSpec:
        return self.specs.get(ticket.lane, BatchSpec())

    async def _all_live(self, ticket: Ticket) -> _Next | None:
        await self._back(ticket, [(item, None) for item in ticket.items])
        return await self._finish(ticket)

    async def _finish(self, ticket: Ticket) -> _Next | None:
        await self.store.clear(ticket.id, [item.identity for item in ticket.items])
        await self.store.dequeue(ticket.id, ticket.account)
        if ticket.batch_id:
            await self.store.let_go(_lease(ticket.batch_id), ticket.id)
        return None

    async def _back(self, ticket: Ticket, returning: Sequence[Returning]) -> None:
        """Publish requests back to their lanes. Raises BrokerError, in a group."""
        for at in range(0, len(returning), BACK_AT_ONCE):
            async with asyncio.TaskGroup() as publishing:
                for item, line in returning[at : at + BACK_AT_ONCE]:
                    publishing.create_task(self._publish(ticket, item, line), name=f"back {item.identity.id}")

    async def _publish(self, ticket: Ticket, item: TicketItem, line: bytes | None) -> None:
        names, before, result = self.settler.names, item.message.headers, line or b""
        batch = replace(
            read_batch(before) or BatchHop(),
            ticket=ticket.id,
            batch=ticket.batch_id,
            live=line is None,
            params_bytes=0,
            result_bytes=len(result),
        )
        first_hop = hop(0, names)
        headers = {**with_batch(before, batch, of=names), n.BACK_MS: self.settler.now_ms(), **first_hop.headers}
        message = replace(
            item.message,
            body=item.message.body + result,
            routing_key="",
            headers=headers,
            message_id=item.identity.id,
        )
        try:
            await self.publisher.publish_surely(message, exchange=first_hop.exchange, routing_key=item.routing_key)
        except MessageTooLarge as error:
            if line in (None, TOO_LARGE):
                await self.settler.end_too_large(message, error, routing_key=item.routing_key)
            else:
                await self._publish(ticket, item, TOO_LARGE)

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def _waits(self, ticket: Ticket) -> _Next | None:
        """While the provider may not be called, or its lane is paused, the ticket waits."""
        wait_s = self.breakers.wait_s(_route(ticket), asyncio.get_running_loop().time())
        if wait_s <= 0 and self.breakers.brake.of("lane", ticket.lane) is None:
            return None
        return self._later(ticket, least_s=wait_s)

    def _later(self, ticket: Ticket, *, least_s: float | None = None) -> _Next:
        level = (max(1, round(1000 * self._spec(ticket).first_poll_s) // UNIT_MS)).bit_length() - 1 + ticket.polls
        while wait_ms(level) > LONGEST_POLL_MS:
            level -= 1
        while wait_ms(level) < min(1000 * (least_s or 0), LONGEST_POLL_MS):
            level += 1
        return _Next(replace(ticket, polls=ticket.polls + 1), wait_ms(level))

    def _tell(self, ticket: Ticket, state: str, **fields: str) -> None:
        self.counts[state] += 1
        told = {"state": state, "requests": len(ticket.items), "provider": ticket.provider, "model": ticket.model}
        log.info(signals.BATCH_CHANGED, ticket=ticket.id, **told, **fields)
        id = fields.get("batch") or ticket.batch_id or ticket.id
        self.settler.lifecycle.publish_batch(id, ticket.lane, **told)


def _tries(message: Message) -> int:
    """How often in a row a ticket has come to an error. Others may have written the header of a forged one."""
    tries = message.headers.get(n.ATTEMPT)
    return tries if isinstance(tries, int) and tries > 0 else 0


def _route(ticket: Ticket) -> Route:
    return Route(provider=ticket.provider, model=ticket.model, name=ticket.model, account=ticket.account)


def _fence(ticket: Ticket) -> str:
    return f"create {ticket.id}"


def _lease(batch_id: str) -> str:
    return f"batch {batch_id}"
