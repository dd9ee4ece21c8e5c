"""What a collector does with a ticket in each of its states: the provider's batches are made up, and the broker is a
list of what was published."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from typing_extensions import override

from consumers.batches import collect
from consumers.batches.collect import FENCE_S, TOO_LARGE, Collector
from consumers.batches.ticket import Ticket, TicketItem, TicketStage, pack, unpack
from consumers.dialects.answers import Answer
from consumers.failures import AccountError, ProviderError, RateLimitedError, RejectedError, TransientError
from consumers.job import Job, Route, Source
from consumers.limits.base import BatchLimits
from consumers.providers.batches import Batches, BatchInfo, Kind, ResultLine
from consumers.providers.breakers import Breakers
from consumers.state.base import Cancelling, Completion, Fingerprint, Granted, Held, Identity, StoreUnavailable
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Encoded, Message
from lanekeeper.contract.problems import BrokerUnreachable
from tests.support.jobs import NAMES, NOW_MS, Bench, FakeDelivery, Sent
from tests.support.waiting import until
from topology.broker.consume import Deliveries
from topology.codec.headers import BatchHop, HopHeaders, hop_headers
from topology.lanes import BATCH, BatchSpec

pytestmark = pytest.mark.usefixtures("returned_at_once")
HOUR_MS = 3_600_000
KEPT_MS = 48 * HOUR_MS
"""For so long what is known of a ticket is kept: a batch lasts a day at most."""
SPEC = BatchSpec(enabled=True, promote_s=1800, first_poll_s=30)


@dataclass
class Batch:
    info: BatchInfo
    custom_ids: list[str]
    lines: list[ResultLine]


class MadeUpBatches(Batches):
    is_missing = False

    def __init__(self) -> None:
        self.made: dict[str, Batch] = {}
        self.refusals: list[ProviderError] = []
        """What the next calls of `create` raise, in order."""
        self.is_created_though = False
        """Whether the batch exists although `create` raises."""
        self.refuses_params: bytes | None = None
        """A batch with a request like this is refused as a whole."""
        self.failing: ProviderError | None = None
        self.cancelled: list[str] = []
        self.deleted: list[str] = []
        """The batches whose input was deleted."""
        self.cut_after: int | None = None
        """After so many results no more can be read."""
        self.cut_by: Exception = TransientError("cut off", type="connection")
        self.asked_for_list, self.may_list = asyncio.Event(), asyncio.Event()
        self.may_list.set()
        self.held: asyncio.Event | None = None
        """The next call of `create` waits for it."""
        self.asked_to_create = asyncio.Event()
        self.keeps_ticket = False

    @override
    async def create(
        self, requests: Sequence[tuple[str, bytes]], *, dialect: str, ticket: str, headers: Mapping[str, str]
    ) -> BatchInfo:
        if (held := self.held) is not None:
            self.held = None
            self.asked_to_create.set()
            await held.wait()
        if any(params == self.refuses_params for _, params in requests):
            raise RejectedError("invalid", status=400)
        if self.refusals and not self.is_created_though:
            raise self.refusals.pop(0)
        info = self.add([custom_id for custom_id, _ in requests], ticket=ticket)
        if self.refusals:
            raise self.refusals.pop(0)
        return info

    def add(self, custom_ids: list[str], *, created_ms: int = NOW_MS, ticket: str = "") -> BatchInfo:
        id = f"msgbatch_{len(self.made) + 1}"
        info = BatchInfo(
            id=id,
            status="in_progress",
            requests=len(custom_ids),
            created_ms=created_ms,
            ticket=ticket if self.keeps_ticket else None,
        )
        self.made[id] = Batch(info, custom_ids, [])
        return info

    def end(self, id: str, *kinds: Kind) -> None:
        """All its requests succeed, unless `kinds` says how each ends."""
        batch = self.made[id]
        batch.info = replace(batch.info, status="ended")
        batch.lines = [
            line(custom_id, kind)
            for custom_id, kind in zip(batch.custom_ids, kinds or ["succeeded"] * len(batch.custom_ids), strict=False)
        ]

    def fail(self, id: str, refusal: ProviderError) -> None:
        """The provider finds out that it cannot run the batch."""
        self.made[id].info = replace(self.made[id].info, status="ended", refusal=refusal)

    @override
    async def retrieve(self, id: str) -> BatchInfo:
        if self.failing is not None:
            raise self.failing
        if id not in self.made:
            raise RejectedError("no such batch", status=404)
        return self.made[id].info

    @override
    async def list_since(self, ms: int) -> AsyncIterator[BatchInfo]:
        if self.failing is not None:
            raise self.failing
        self.asked_for_list.set()
        await self.may_list.wait()
        for batch in reversed(self.made.values()):
            if batch.info.created_ms >= ms:
                yield batch.info

    @override
    async def results(self, id: str) -> AsyncGenerator[ResultLine, None]:
        for each in self.made[id].lines[: self.cut_after]:
            yield each
        if self.cut_after is not None:
            raise self.cut_by

    @override
    async def cancel(self, id: str) -> BatchInfo:
        self.cancelled.append(id)
        return self.made[id].info

    @override
    async def delete_input(self, batch: BatchInfo) -> None:
        self.deleted.append(batch.id)

    @override
    async def answer(self, line: bytes, *, dialect: str) -> Answer:
        raise AssertionError("results are read in their lane")


def line(custom_id: str, kind: str = "succeeded") -> ResultLine:
    return ResultLine(custom_id=custom_id, kind=cast(Kind, kind), line=json.dumps([custom_id, kind]).encode())


class Collecting:
    def __init__(self) -> None:
        self.bench = Bench()
        self.provider = MadeUpBatches()
        self.is_with_batches = True
        self.now_ms = NOW_MS
        self.bench.settler.now_ms = lambda: self.now_ms
        self.breakers = Breakers()
        self.collector = Collector(
            Deliveries(None, queue=NAMES.tickets, prefetch=8),  # type: ignore[arg-type]
            specs={"batch": SPEC},
            limits={"anthropic": BatchLimits(requests=1000)},
            batches=lambda _: self.provider if self.is_with_batches else None,
            breakers=self.breakers,
            publisher=self.bench.publisher,
            settler=self.bench.settler,
            store=self.bench.store,
            count_late=self.count_late,
        )
        self.late: list[tuple[str, bytes]] = []
        """What was paid for nothing: the lane and the line of the results."""

    async def count_late(self, lane: str, _route: Route, line: bytes, _dialect: str) -> None:
        self.late.append((lane, line))

    async def gathered(self, *items: TicketItem, id: str = "a" * 24, **fields: Any) -> Ticket:
        """A ticket as the gatherer publishes it."""
        await self.bench.store.gather(id, [item.identity for item in items], until_ms=NOW_MS + KEPT_MS)
        given: dict[str, Any] = {
            "lane": "batch", "account": "anthropic/small", "provider": "anthropic", "model": "claude-haiku-5-5",
            "gathered_ms": NOW_MS,
        }  # fmt: skip
        return Ticket(id=id, items=items, **given | fields)

    async def take(self, ticket: Ticket | bytes | Message, *, redelivered: bool = False) -> list[Sent]:
        """What is published for a ticket."""
        body = pack(ticket) if isinstance(ticket, Ticket) else ticket
        message = body if isinstance(body, Message) else Message(body=body)
        delivery = FakeDelivery(message, self.bench.log, queue=NAMES.tickets, redelivered=redelivered)
        before = len(self.bench.publisher.sent)
        await self.collector._take(delivery)
        return self.bench.publisher.sent[before:]

    async def again(self, ticket: Ticket, **how: Any) -> Ticket:
        """The ticket as it is published again; nothing else is."""
        (sent,) = await self.take(ticket, **how)
        return self.read(sent)

    def read(self, sent: Sent) -> Ticket:
        assert sent.routing_key in (NAMES.ticket_key, NAMES.tickets)
        return unpack(sent.message.body)

    def submitted(self) -> list[str]:
        return list(self.provider.made)


@pytest.fixture
def collecting() -> Collecting:
    return Collecting()


def items(count: int, *, deadline_ms: int = NOW_MS + 24 * HOUR_MS, tokens: int = 10) -> list[TicketItem]:
    batch = BatchHop(provider="anthropic", account="anthropic/small", model="claude-haiku-5-5")
    headers = {"mine": "kept", n.TRACEPARENT: f"00-{'1' * 32}-{'2' * 16}-01"}
    return [
        TicketItem(
            number=number,
            message=Message(
                body=b"body %d" % number,
                headers={**headers, **hop_headers(HopHeaders(attempts=2, batch=batch, user_id="tenant"))},
                message_id=f"id-{number}",
                reply_to="lane.reply.tenant",
            ),
            routing_key="batch.shop.sum",
            identity=Identity("tenant", f"id-{number}"),
            deadline_ms=deadline_ms,
            params=b"params %d" % number,
            tokens=tokens,
        )
        for number in range(count)
    ]


def delay_ms(sent: Sent) -> int:
    return sum(100 << level for level in range(29) if sent.message.headers.get(NAMES.delay_bit(level)) is True)


def job_of(sent: Sent) -> Job:
    """What its lane gets."""
    assert sent.exchange == NAMES.delay(0)
    assert sent.message.headers[NAMES.delay_bit(0)] is False
    message = replace(sent.message, exchange=NAMES.due_exchange, routing_key=sent.routing_key)
    return Job(FakeDelivery(message, []), lane=BATCH, source=Source.DELAY, taken_ms=NOW_MS)


def results(sent: Sequence[Sent]) -> dict[str, bytes | None]:
    """For each request that went back to its lane: its result; None if it is to be run live."""
    found: dict[str, bytes | None] = {}
    for each in sent:
        job = job_of(each)
        assert job.id not in found
        assert job.batch is not None
        assert job.batch.live == (job.batch_result is None)
        found[job.id] = job.batch_result
    return found


# ---- submitting -----------------------------------------------------------------------------------------------------


async def test_a_gathered_ticket_becomes_one_batch_and_waits_for_it(collecting: Collecting) -> None:
    ticket = await collecting.gathered(*items(3))
    (sent,) = await collecting.take(ticket)
    again = collecting.read(sent)
    assert (again.stage, again.batch_id, len(again.items)) == (TicketStage.SUBMITTED, "msgbatch_1", 3)
    assert collecting.provider.made["msgbatch_1"].custom_ids == [f"{ticket.id}-{number}" for number in range(3)]
    assert sent.exchange == NAMES.delay(8)
    assert delay_ms(sent) == 25_600
    assert collecting.bench.log[-3:] == ["event: batch", "confirmed: lane.delay.08", "ack"]
    assert collecting.collector.requests_waiting == 3


async def test_a_provider_that_takes_long_to_create_a_batch_holds_up_no_other_provider(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "TURN_WITHIN_S", 0.01)
    collecting.provider.held = held = asyncio.Event()
    slow = asyncio.create_task(collecting.take(await collecting.gathered(*items(2)[:1])))
    await collecting.provider.asked_to_create.wait()
    behind = await collecting.gathered(*items(2)[1:], id="b" * 24)
    other = await collecting.gathered(*items(3)[2:], id="c" * 24, provider="openai", account="openai/small")

    assert (await collecting.again(other)).batch_id == "msgbatch_1"
    assert (await collecting.again(behind)).stage is TicketStage.ADOPTING, "and it takes no place from others"
    held.set()
    await slow


async def test_a_request_that_another_of_its_messages_runs_live_is_in_no_batch(collecting: Collecting) -> None:
    ticket = await collecting.gathered(*items(3))
    fingerprint = Fingerprint(body_hash=b"h" * 16, mark=b"m" * 16, redelivered=False, nonce=b"n" * 8)
    assert isinstance(await collecting.bench.store.claim(Identity("tenant", "id-1"), fingerprint), Granted)
    *back, left = await collecting.take(ticket)
    assert results(back) == {"id-1": None}, "it waits there until the other has ended"
    assert not collecting.submitted()
    again = await collecting.again(collecting.read(left))
    assert collecting.provider.made[again.batch_id].custom_ids == [f"{ticket.id}-0", f"{ticket.id}-2"]


async def test_a_ticket_without_any_request_of_its_own_is_gone(collecting: Collecting) -> None:
    ticket = await collecting.gathered(*items(2))
    await collecting.gathered(*items(2), id="b" * 24)
    assert await collecting.take(ticket) == []
    assert collecting.bench.log[-1] == "ack"
    assert not collecting.submitted()


async def test_that_a_lane_with_requests_in_batches_is_not_declared_any_more_is_told(collecting: Collecting) -> None:
    collecting.collector.deliveries._trouble = None
    former = [replace(item, routing_key="former.shop.sum") for item in items(2)]
    await collecting.again(await collecting.gathered(*former, lane="former"))
    collecting.now_ms += 25_600 + 600_000 - 1  # it came back, and another worker may have it since
    assert "batches of former" in (collecting.collector.trouble or "")
    collecting.now_ms += 1
    assert collecting.collector.trouble is None


@pytest.mark.parametrize(
    "error",
    [RateLimitedError("later", status=429, retry_after_s=102.4), AccountError("no key", reason="its key is refused")],
)
async def test_a_provider_that_takes_no_batch_is_waited_for(collecting: Collecting, error: ProviderError) -> None:
    collecting.provider.refusals = [error]
    (sent,) = await collecting.take(await collecting.gathered(*items(3)))
    assert delay_ms(sent) == (102_400 if error.retry_after_s else 25_600)
    again = collecting.read(sent)
    assert (await collecting.again(again)).stage is TicketStage.SUBMITTED
    assert len(collecting.submitted()) == 1


async def test_a_provider_that_cannot_be_asked_for_a_ticket_s_batch_is_waited_for(collecting: Collecting) -> None:
    collecting.provider.failing = TransientError("down", status=500, retry_after_s=204.8)
    ticket = replace(await collecting.gathered(*items(2)), stage=TicketStage.ADOPTING, requests=2)
    (sent,) = await collecting.take(ticket)
    assert (delay_ms(sent), collecting.read(sent).stage) == (204_800, TicketStage.ADOPTING)
    assert collecting.collector.counts["unsubmitted"] == 1
    assert not collecting.submitted()


@pytest.mark.parametrize(
    ("status", "is_split"), [(400, True), (413, True), (422, True), (401, False), (404, False), (429, False)]
)
async def test_only_what_is_refused_because_of_what_is_in_it_is_split(
    collecting: Collecting, status: int, is_split: bool
) -> None:
    collecting.provider.refusals = [RejectedError("no", status=status)]
    ticket = replace(await collecting.gathered(*items(2)), polls=3)
    sent = await collecting.take(ticket)
    if not is_split:
        assert results(sent) == {"id-0": None, "id-1": None}
        return
    found = [collecting.read(each) for each in sent]
    assert [(each.id, each.requests, each.polls) for each in found] == [(f"{ticket.id}{k}", 0, 0) for k in (0, 1)]


async def test_a_split_that_is_done_twice_makes_the_same_tickets(collecting: Collecting) -> None:
    collecting.provider.refuses_params = b"params 1"
    ticket = await collecting.gathered(*items(4))
    first, second = await collecting.take(ticket)
    good = collecting.read(second)
    submitted = await collecting.again(good)
    collecting.provider.refuses_params = None
    # its worker died before it acknowledged, and before it took the ticket of the first half
    collecting.now_ms += 5_000
    adopting = await collecting.again(good, redelivered=True)
    assert adopting.stage is TicketStage.ADOPTING
    assert (await collecting.again(adopting)).batch_id == submitted.batch_id
    assert collecting.read(first).id == ticket.id + "0"
    assert len(collecting.submitted()) == 1


# ---- adopting -------------------------------------------------------------------------------------------------------


async def test_a_ticket_whose_worker_died_looks_for_its_batch_before_it_makes_one(collecting: Collecting) -> None:
    ticket = await collecting.gathered(*items(3))
    submitted = await collecting.again(ticket)
    (sent,) = await collecting.take(ticket, redelivered=True)
    assert delay_ms(sent) == 5_000, "a call to create it that was cut off has taken effect by then"
    adopted = await collecting.again(collecting.read(sent))
    assert (adopted.stage, adopted.batch_id) == (TicketStage.SUBMITTED, submitted.batch_id)
    assert len(collecting.submitted()) == 1


async def test_a_batch_whose_creation_was_not_answered_is_found_when_it_has_ended(collecting: Collecting) -> None:
    provider = collecting.provider
    provider.refusals, provider.is_created_though = [TransientError("cut off", type="connection")], True
    adopting = await collecting.again(await collecting.gathered(*items(2)))
    assert adopting.stage is TicketStage.ADOPTING
    provider.add(["of-another-client-0", "of-another-client-1"])
    adopting = await collecting.again(adopting)
    assert set(adopting.candidates) == {"msgbatch_1", "msgbatch_2"}
    provider.end("msgbatch_2")
    adopting = await collecting.again(adopting)
    assert adopting.candidates == ("msgbatch_1",)
    provider.end("msgbatch_1")
    adopted = await collecting.again(adopting)
    assert (adopted.stage, adopted.batch_id) == (TicketStage.SUBMITTED, "msgbatch_1")
    assert len(results(await collecting.take(adopted))) == 2


async def test_a_lost_store_loses_no_request_and_makes_no_second_batch(collecting: Collecting) -> None:
    ticket = await collecting.gathered(*items(2))
    await collecting.again(ticket)
    await collecting.bench.store.clear(ticket.id, [item.identity for item in ticket.items])
    await collecting.bench.store.let_go("batch msgbatch_1", ticket.id)
    adopting = await collecting.again(await collecting.again(ticket, redelivered=True))
    assert adopting.candidates == ("msgbatch_1",)
    collecting.provider.end("msgbatch_1")
    assert (await collecting.again(adopting)).batch_id == "msgbatch_1"
    assert len(collecting.submitted()) == 1


async def test_a_provider_that_keeps_whose_a_batch_is_is_not_asked_for_its_results(collecting: Collecting) -> None:
    provider = collecting.provider
    provider.keeps_ticket = True
    provider.refusals, provider.is_created_though = [TransientError("cut off", type="connection")], True
    adopting = await collecting.again(await collecting.gathered(*items(2)))
    provider.add(["of-another-client-0", "of-another-client-1"])
    adopted = await collecting.again(adopting)
    assert (adopted.stage, adopted.batch_id) == (TicketStage.SUBMITTED, "msgbatch_1")
    assert len(collecting.submitted()) == 2


async def test_a_batch_that_has_failed_as_a_whole_is_split(collecting: Collecting) -> None:
    """The provider says so only after it was created."""
    collecting.provider.keeps_ticket = True
    submitted = await collecting.again(await collecting.gathered(*items(3)))
    collecting.provider.fail("msgbatch_1", RejectedError("invalid", status=400))
    parts = [collecting.read(sent) for sent in await collecting.take(submitted)]
    assert [(part.stage, part.batch_id, len(part.items)) for part in parts] == [
        (TicketStage.GATHERED, "", 1),
        (TicketStage.GATHERED, "", 2),
    ]
    adopting = await collecting.again(parts[1])
    adopted = await collecting.again(adopting)
    assert (adopted.stage, adopted.batch_id) == (TicketStage.SUBMITTED, "msgbatch_2")


async def test_a_batch_that_has_failed_because_too_many_wait_is_created_again_later(collecting: Collecting) -> None:
    collecting.provider.keeps_ticket = True
    submitted = await collecting.again(await collecting.gathered(*items(3)))
    collecting.provider.fail("msgbatch_1", RateLimitedError("full", status=429, retry_after_s=300))
    (sent,) = await collecting.take(submitted)
    assert delay_ms(sent) >= 300_000
    collecting.bench.store.now_ms += round(1000 * FENCE_S)
    again = await collecting.again(collecting.read(sent))
    assert (again.stage, again.batch_id, len(again.items)) == (TicketStage.SUBMITTED, "msgbatch_2", 3)


async def forget(collecting: Collecting, *batch_ids: str) -> None:
    """As if their worker had died before it noted whose they are."""
    for id in batch_ids:
        await collecting.bench.store.let_go(f"batch {id}", "a" * 24)


async def test_no_second_batch_is_made_if_the_worker_dies_when_it_has_looked_at_the_last_candidate(
    collecting: Collecting,
) -> None:
    provider = collecting.provider
    provider.end(provider.add(["of-another-client-0", "of-another-client-1"]).id)
    ticket = replace(
        await collecting.gathered(*items(2)), stage=TicketStage.ADOPTING, requests=2, candidates=("msgbatch_1",)
    )
    await collecting.again(ticket)
    await forget(collecting, "msgbatch_2")
    again = await collecting.again(await collecting.again(ticket, redelivered=True))
    assert again.candidates == ("msgbatch_2",)
    assert len(collecting.submitted()) == 2


async def test_of_two_copies_of_a_ticket_one_at_a_time_is_worked_on(collecting: Collecting) -> None:
    ticket = replace(await collecting.gathered(*items(2)), stage=TicketStage.ADOPTING, requests=2)
    collecting.provider.may_list.clear()
    first = asyncio.create_task(collecting.take(ticket))
    await collecting.provider.asked_for_list.wait()
    copy = await collecting.again(ticket)
    assert copy.stage is TicketStage.ADOPTING
    collecting.provider.may_list.set()
    await first
    assert (await collecting.again(copy)).batch_id == "msgbatch_1"
    assert len(collecting.submitted()) == 1


async def test_no_second_batch_is_made_although_another_ticket_had_some_of_the_requests(collecting: Collecting) -> None:
    ticket = await collecting.gathered(*items(3))
    await collecting.gathered(*items(1), id="b" * 24)
    smaller = await collecting.again(ticket)
    assert (smaller.requests, len(smaller.items)) == (2, 2)
    await collecting.again(smaller)
    await forget(collecting, "msgbatch_1")
    await collecting.bench.store.clear("b" * 24, [items(1)[0].identity])  # that ticket has ended
    assert (await collecting.again(await collecting.again(smaller, redelivered=True))).candidates == ("msgbatch_1",)
    assert len(collecting.submitted()) == 1


async def test_a_candidate_that_another_ticket_found_to_be_its_own_is_none_any_more(collecting: Collecting) -> None:
    collecting.provider.add(["b-0", "b-1"])
    ticket = replace(await collecting.gathered(*items(2)), stage=TicketStage.ADOPTING, requests=2)
    ticket = await collecting.again(ticket)
    assert ticket.candidates == ("msgbatch_1",)
    await collecting.bench.store.hold("batch msgbatch_1", "b" * 24, for_s=60)
    assert (await collecting.again(ticket)).batch_id == "msgbatch_2"


async def test_while_a_worker_that_was_cut_off_may_create_the_batch_its_successor_makes_none(
    collecting: Collecting,
) -> None:
    ticket = await collecting.gathered(*items(2))
    collecting.provider.held = held = asyncio.Event()
    cut_off = asyncio.create_task(collecting.take(ticket))
    await collecting.provider.asked_to_create.wait()
    collecting.collector = replace(collecting.collector)
    adopting = await collecting.again(await collecting.again(ticket, redelivered=True))
    assert (adopting.stage, collecting.submitted()) == (TicketStage.ADOPTING, [])
    held.set()
    await cut_off
    assert (await collecting.again(adopting)).batch_id == "msgbatch_1"
    assert len(collecting.submitted()) == 1


async def test_while_a_call_that_lost_its_channel_may_create_the_batch_the_same_process_makes_none(
    collecting: Collecting,
) -> None:
    ticket = await collecting.gathered(*items(2))
    collecting.provider.held = asyncio.Event()
    cut_off = asyncio.create_task(collecting.take(ticket))
    await collecting.provider.asked_to_create.wait()
    cut_off.cancel()
    await asyncio.wait({cut_off})
    adopting = await collecting.again(await collecting.again(ticket, redelivered=True))
    assert (adopting.stage, collecting.submitted()) == (TicketStage.ADOPTING, [])
    info = collecting.provider.add([ticket.custom_id(item) for item in ticket.items])  # it was created all the same
    adopting = await collecting.again(adopting)
    assert adopting.candidates == (info.id,)
    collecting.provider.end(info.id)
    assert (await collecting.again(adopting)).batch_id == info.id
    assert len(collecting.submitted()) == 1


async def test_if_the_store_is_lost_while_a_batch_is_created_its_ticket_knows_it(collecting: Collecting) -> None:
    ticket = await collecting.gathered(*items(2))
    collecting.provider.held = held = asyncio.Event()
    taking = asyncio.create_task(collecting.take(ticket))
    await collecting.provider.asked_to_create.wait()
    collecting.bench.store.failing = StoreUnavailable("away")
    held.set()
    (sent,) = await taking
    assert collecting.read(sent).batch_id == "msgbatch_1"
    assert collecting.bench.log[-1] == "ack"


async def test_whose_batch_it_is_is_noted_although_another_worker_asks_just_then(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.batches.collect.ASKS_FOR_S", 0)
    hold, asked = collecting.bench.store.hold, list[str]()

    async def busy(name: str, owner: str, *, for_s: float) -> bool:
        if name == "batch msgbatch_1" and name not in asked:
            asked.append(name)
            return False
        return await hold(name, owner, for_s=for_s)

    monkeypatch.setattr(collecting.bench.store, "hold", busy)
    ticket = await submitted(collecting)
    assert await collecting.collector._is_its_own("msgbatch_1", ticket)


async def test_a_worker_that_was_cut_off_makes_no_batch_after_its_successor_did(collecting: Collecting) -> None:
    other = [replace(item, identity=Identity("other", item.identity.id)) for item in items(2)]
    collecting.provider.held = held = asyncio.Event()
    before = asyncio.create_task(collecting.take(await collecting.gathered(*other, id="b" * 24)))
    await collecting.provider.asked_to_create.wait()
    ticket = await collecting.gathered(*items(2))
    cut_off, submitting = asyncio.create_task(collecting.take(ticket)), collecting.collector._submitting["anthropic"]
    await until(lambda: bool(getattr(submitting, "_waiters", None)))  # behind the other batch
    collecting.collector = replace(collecting.collector)
    adopting = await collecting.again(ticket, redelivered=True)
    assert (await collecting.again(adopting)).batch_id == "msgbatch_1"
    await forget(collecting, "msgbatch_1")
    held.set()
    await before
    await cut_off
    assert sorted(collecting.submitted()) == ["msgbatch_1", "msgbatch_2"]


async def test_a_worker_that_took_long_makes_no_batch_because_another_one_may_have(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.batches.collect.BEGIN_WITHIN_S", -1)
    adopting = await collecting.again(await collecting.gathered(*items(2)))
    assert (adopting.stage, adopting.requests, collecting.submitted()) == (TicketStage.ADOPTING, 2, [])
    monkeypatch.undo()
    assert (await collecting.again(adopting)).batch_id == "msgbatch_1"


# ---- collecting -----------------------------------------------------------------------------------------------------


async def submitted(collecting: Collecting, count: int = 3, **fields: Any) -> Ticket:
    return await collecting.again(await collecting.gathered(*items(count, **fields)))


async def test_each_result_goes_back_to_the_lane_with_its_request(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 5)
    collecting.provider.end(ticket.batch_id, "succeeded", "errored", "expired", "canceled", "broken")
    collecting.provider.made[ticket.batch_id].lines.reverse()
    sent = await collecting.take(ticket)
    assert results(sent) == {
        f"id-{number}": line(f"{ticket.id}-{number}", kind).line if kind in ("succeeded", "errored", "broken") else None
        for number, kind in enumerate(("succeeded", "errored", "expired", "canceled", "broken"))
    }
    assert collecting.bench.log[-1] == "ack"
    assert collecting.collector.counts["ended"] == 1
    assert collecting.provider.deleted == [ticket.batch_id]
    job = next(job for job in map(job_of, sent) if job.id == "id-0")
    assert job.message.body == b"body 0"
    assert (job.message.headers["mine"], job.message.reply_to) == (Encoded(b"S\0\0\0\4kept"), "lane.reply.tenant")
    assert job.message.headers[n.TRACEPARENT].startswith(f"00-{'1' * 32}")
    assert (job.attempts, job.identity, job.routing_key) == (2, Identity("tenant", "id-0"), "batch.shop.sum")
    assert job.batch is not None
    assert (job.batch.batch, job.batch.account) == (ticket.batch_id, ticket.account)


async def test_what_the_results_do_not_tell_of_is_run_live(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 3)
    collecting.provider.end(ticket.batch_id, "succeeded")
    found = results(await collecting.take(ticket))
    assert found["id-0"] is not None
    assert (found["id-1"], found["id-2"]) == (None, None)
    assert collecting.collector.counts["missing"] == 2


async def test_a_result_for_nobody_or_a_second_one_is_dropped_and_counted(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 1)
    collecting.provider.end(ticket.batch_id)
    lines = collecting.provider.made[ticket.batch_id].lines
    lines += [lines[0], line(f"{ticket.id}-99"), line("")]
    assert len(results(await collecting.take(ticket))) == 1
    assert collecting.collector.counts["answered_late"] == 3


async def test_after_results_were_cut_off_only_the_others_are_read_again(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.batches.collect.BACK_AT_ONCE", 1)
    ticket = await submitted(collecting, 3)
    collecting.provider.end(ticket.batch_id)
    collecting.provider.cut_after = 2
    *back, sent = await collecting.take(ticket)
    assert results(back).keys() == {"id-0", "id-1"}
    assert collecting.collector.counts["unread"] == 1
    assert collecting.provider.deleted == []
    collecting.provider.cut_after = None
    assert results(await collecting.take(collecting.read(sent))).keys() == {"id-2"}
    assert collecting.collector.counts["answered_late"] == 0


async def test_a_provider_that_does_not_answer_is_asked_again(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 2)
    for error, least_ms in (
        (TransientError("down", status=500, retry_after_s=300), 300_000),
        (RejectedError("not like this", status=400), 51_200),
        (TransientError("not found by a proxy", status=404), 51_200),
        (TransientError("down", status=500, retry_after_s=86_400), 600_000),
    ):
        collecting.provider.failing = error
        (sent,) = await collecting.take(ticket)
        assert least_ms <= delay_ms(sent) < 2 * least_ms
        assert collecting.read(sent).batch_id == ticket.batch_id
    assert (collecting.collector.counts["unread"], collecting.collector.counts["vanished"]) == (4, 0)


async def test_by_a_fault_of_ours_no_result_goes_back_twice(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.batches.collect.BACK_AT_ONCE", 1)
    ticket = await submitted(collecting, 3)
    collecting.provider.end(ticket.batch_id)
    collecting.provider.cut_after, collecting.provider.cut_by = 2, KeyError("a fault")
    *back, sent = await collecting.take(ticket)
    assert results(back).keys() == {"id-0", "id-1"}
    assert await collecting.again(collecting.read(sent)), "only the ticket"


async def test_when_a_ticket_ends_its_batch_is_forgotten_and_its_requests_may_be_gathered(
    collecting: Collecting,
) -> None:
    ticket = await submitted(collecting, 2)
    collecting.provider.end(ticket.batch_id)
    await collecting.take(ticket)
    store, identities = collecting.bench.store, [item.identity for item in ticket.items]
    assert not await store.gather("c" * 24, identities, until_ms=NOW_MS + 1000)  # a repeated message
    left = dict.fromkeys(identities, ticket.id)
    assert len(await store.gather("c" * 24, identities, until_ms=NOW_MS + 1000, former=left)) == 2
    assert await store.hold(f"batch {ticket.batch_id}", "another", for_s=1)
    assert collecting.collector.requests_waiting == 0


async def test_a_result_that_the_broker_does_not_take_is_told_to_be_too_large(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 1)
    collecting.provider.end(ticket.batch_id)
    collecting.bench.publisher.too_large = {b"body 0" + line(f"{ticket.id}-0").line}
    assert results(await collecting.take(ticket)) == {"id-0": TOO_LARGE}


async def test_a_request_that_is_too_large_to_go_back_ends_and_the_others_go_back(collecting: Collecting) -> None:
    ticket = await collecting.gathered(*items(2, deadline_ms=NOW_MS))
    collecting.bench.publisher.too_large = {b"body 0"}
    ended, back = sorted(await collecting.take(ticket), key=lambda each: each.routing_key != NAMES.strays)
    assert (ended.message.headers[n.DEAD_CODE], ended.message.body) == ("too_large", b"")
    assert results([back]) == {"id-1": None}


@pytest.mark.slow
@pytest.mark.parametrize("error", [StoreUnavailable("away"), ZeroDivisionError("ours")])
async def test_after_an_error_a_ticket_comes_back_each_time_after_twice_as_long(
    collecting: Collecting, error: Exception
) -> None:
    ticket = await submitted(collecting, 2)
    collecting.provider.end(ticket.batch_id)
    collecting.bench.store.failing = error  # type: ignore[assignment]
    message, delays_ms = Message(body=pack(ticket), message_id=ticket.id, timestamp_s=7), []
    for _ in range(8):
        (sent,) = await collecting.take(message)
        assert collecting.bench.log[-1] == "ack"
        assert (sent.message.body, sent.message.message_id, sent.message.timestamp_s) == (pack(ticket), ticket.id, 7)
        message = replace(sent.message, exchange=NAMES.due_exchange, routing_key=sent.routing_key)
        delays_ms.append(delay_ms(sent))
    assert delays_ms == [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]
    collecting.bench.store.failing = None
    assert len(results(await collecting.take(message))) == 2


async def test_a_ticket_returns_to_its_queue_if_the_broker_takes_nothing(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 2)
    collecting.provider.end(ticket.batch_id)
    away = BrokerUnreachable("away")
    collecting.bench.publisher.failing = {NAMES.delay(level): away for level in range(8)}
    await collecting.take(ticket)
    assert collecting.bench.log[-1] == "nack"
    collecting.bench.publisher.failing = {}
    assert len(results(await collecting.take(ticket, redelivered=True))) == 2


async def test_a_ticket_whose_batch_was_created_as_the_broker_failed_comes_back_and_creates_no_other(
    collecting: Collecting,
) -> None:
    ticket = await collecting.gathered(*items(2))
    collecting.bench.publisher.failing = {NAMES.delay(8): BrokerUnreachable("away")}  # as it is published again
    (sent,) = await collecting.take(ticket)
    collecting.bench.publisher.failing = {}
    assert len(collecting.submitted()) == 1
    for _ in range(4):
        message = replace(sent.message, exchange=NAMES.due_exchange, routing_key=sent.routing_key)
        (sent,) = await collecting.take(message)
    assert len(collecting.submitted()) == 1


async def test_a_forged_ticket_does_not_come_back_as_if_a_worker_had_published_it(collecting: Collecting) -> None:
    forged = Message(body=pack(await submitted(collecting, 2)), exchange=NAMES.requests, headers={n.ATTEMPT: 3})
    collecting.bench.publisher.failing = {"": BrokerUnreachable("away")}
    assert await collecting.take(forged) == []
    assert collecting.bench.log[-1] == "nack"


# ---- requests that leave their batch --------------------------------------------------------------------------------


async def test_what_would_leave_a_batch_at_once_is_not_put_into_it(collecting: Collecting) -> None:
    near, far = items(1, deadline_ms=NOW_MS + 1800_000 + 1000), items(3)[1:]
    ticket = await collecting.gathered(*near, *far)
    await cancel(collecting, 2)
    *back, sent = await collecting.take(ticket)
    assert results(back) == {"id-0": None, "id-2": None}
    ticket = collecting.read(sent)
    assert (await collecting.again(ticket)).stage is TicketStage.SUBMITTED
    assert [batch.custom_ids for batch in collecting.provider.made.values()] == [[f"{ticket.id}-1"]]


async def test_by_a_fault_of_ours_no_request_stays_beyond_its_deadline(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 1, deadline_ms=NOW_MS + HOUR_MS)
    collecting.provider.failing = KeyError("a fault")  # type: ignore[assignment]
    assert (await collecting.again(ticket)).batch_id == ticket.batch_id
    collecting.now_ms = NOW_MS + HOUR_MS - 1800_000
    *back, left = await collecting.take(ticket)
    assert results(back) == {"id-0": None}
    collecting.now_ms = NOW_MS + KEPT_MS
    assert not await collecting.take(collecting.read(left))  # nor does what is left of it, without end


async def test_what_was_submitted_is_collected_although_no_more_batches_can_be_made(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 1)
    collecting.provider.is_missing = True
    collecting.provider.end(ticket.batch_id)
    assert results(await collecting.take(ticket))["id-0"] is not None
    other = replace(items(1)[0], identity=Identity("other", "id-0"))
    assert results(await collecting.take(await collecting.gathered(other, id="b" * 24))) == {"id-0": None}


async def cancel(collecting: Collecting, *numbers: int) -> None:
    gone = Completion(status="error", code="cancelled", body=b"{}", ended_ms=NOW_MS)
    for number in numbers:
        identity = Identity("tenant", f"id-{number}")
        fingerprint = Fingerprint(body_hash=b"h" * 16, mark=b"m" * 16, redelivered=False, nonce=b"n" * 8)
        granted = await collecting.bench.store.claim(identity, fingerprint)
        assert isinstance(granted, Granted)
        await collecting.bench.store.release(Held(identity, granted.token))
        assert await collecting.bench.store.cancel(identity, gone) is Cancelling.RECORDED


async def test_what_a_batch_answered_before_all_its_requests_left_is_counted(collecting: Collecting) -> None:
    ticket = await submitted(collecting, 2)
    await cancel(collecting, 0, 1)
    left = collecting.read((await collecting.take(ticket))[-1])
    left = await collecting.again(left)
    assert not left.items
    assert collecting.collector.requests_waiting == 0
    assert collecting.provider.cancelled == [ticket.batch_id]
    collecting.provider.end(ticket.batch_id, "succeeded", "canceled")
    assert not await collecting.take(left)
    assert collecting.late == [("batch", line(f"{ticket.id}-0").line)]
    assert collecting.bench.log[-1] == "ack"


async def test_a_request_that_was_cancelled_when_its_batch_had_ended_is_paid_for_nothing(
    collecting: Collecting,
) -> None:
    ticket = await submitted(collecting, 2)
    await cancel(collecting, 1)
    collecting.provider.end(ticket.batch_id)
    assert results(await collecting.take(ticket)) == {"id-0": line(f"{ticket.id}-0").line, "id-1": None}
    assert collecting.late == [("batch", line(f"{ticket.id}-1").line)]
    assert (collecting.collector.counts["succeeded"], collecting.collector.counts["answered_late"]) == (1, 1)


# ---- what is no ticket ----------------------------------------------------------------------------------------------


async def test_a_ticket_of_another_version_waits_for_a_worker_that_can_read_it(collecting: Collecting) -> None:
    packed = pack(await collecting.gathered(*items(2)))
    newer = packed.replace(b'"stage": "gathered"', b'"stage": "foreseen"')
    (sent,) = await collecting.take(newer)
    assert (sent.exchange, sent.routing_key, sent.message.body) == (NAMES.delay(9), NAMES.ticket_key, newer)
    assert delay_ms(sent) == 60_000
    assert collecting.bench.log[-1] == "ack"
    assert collecting.collector.counts["unread_ticket"] == 1

    collecting.now_ms += KEPT_MS
    (sent,) = await collecting.take(sent.message)
    assert sent.exchange == NAMES.delay(9)
    collecting.now_ms += 1001  # a timestamp has whole seconds
    (sent,) = await collecting.take(sent.message)
    assert (sent.routing_key, sent.message.body) == (NAMES.strays, newer)  # to be seen in lane.dead


async def test_what_is_no_ticket_falls(collecting: Collecting) -> None:
    (sent,) = await collecting.take(b"nonsense")
    assert (sent.routing_key, sent.message.body) == (NAMES.strays, b"nonsense")
    (sent,) = await collecting.take(Message(body=pack(await collecting.gathered(*items(1))), exchange="someone.elses"))
    assert sent.routing_key == NAMES.strays
