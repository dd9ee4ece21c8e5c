"""What becomes of the requests in `lane.batches`: which batch each is in, and what goes back to its lane. The broker is
a list of what was published."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from consumers.batches import gather as gather_module
from consumers.batches.gather import Gatherer, _Request, prefetch_of
from consumers.batches.ticket import Ticket, TicketItem, unpack
from consumers.brake import Brake
from consumers.settle import gathered
from consumers.state.base import Identity, StoreUnavailable
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerUnreachable, MessageTooLarge
from tests.support.jobs import (
    BODY,
    NAMES,
    NOW_MS,
    Bench,
    FakeDeliveries,
    FakeDelivery,
    FakeSession,
    HeldPauses,
    Sent,
    a_pause,
)
from tests.support.waiting import until
from topology.broker.consume import Delivery
from topology.codec.headers import BatchHop, read_hop
from topology.lanes import BATCH, BatchSpec

pytestmark = pytest.mark.usefixtures("returned_at_once")
HOUR_MS = 3_600_000
KEY = "batch.crm.enrich"
SPEC = BatchSpec(enabled=True, count=3, bytes=100_000, window_s=60)
QUICK = replace(SPEC, window_s=0.01)
HOP = BatchHop(
    account="anthropic/haiku",
    provider="anthropic",
    model=BATCH.model,
    deadline_ms=NOW_MS + 24 * HOUR_MS,
    tenant="crm",
    tokens=70,
)


class Gathering:
    """A gatherer with these deliveries in its queue."""

    def __init__(self, *deliveries: FakeDelivery, bench: Bench, spec: BatchSpec = SPEC, **pauses: str) -> None:
        self.bench, self.session = bench, FakeSession(bench.log, deliveries)
        self.brake = Brake(HeldPauses(*(a_pause(*each) for each in pauses.items())), now_ms=lambda: NOW_MS)
        self.queue = queue = FakeDeliveries(self.session)
        queue.queue, queue.prefetch = NAMES.batches, prefetch_of([spec])
        self.gatherer = Gatherer(
            queue,
            specs={"batch": spec},
            publisher=bench.publisher,
            settler=bench.settler,
            store=bench.store,
            pauses=self.brake,
        )

    async def run(self, *, settled: int) -> None:
        """Until so many deliveries are settled; then it is stopped."""
        await self.brake.read()
        running = asyncio.create_task(self.gatherer.run())
        await until(lambda: running.done() or len(self.settled) == settled)
        await self.gatherer.deliveries.stop()
        await running

    @property
    def settled(self) -> list[str]:
        return [each for each in self.bench.log if each in ("ack", "nack", "reject")]

    @property
    def tickets(self) -> list[Ticket]:
        return [unpack(each.message.body) for each in self.bench.publisher.sent if each.routing_key == NAMES.tickets]

    @property
    def items(self) -> list[list[str]]:
        return [[item.identity.id for item in ticket.items] for ticket in self.tickets]

    @property
    def back(self) -> list[Sent]:
        return [each for each in self.bench.publisher.sent if each.exchange.startswith(NAMES.delay_prefix)]


def parked(
    bench: Bench, id: str, *, tag: int = 1, params: bytes = BODY, body: bytes = BODY, **batch: Any
) -> FakeDelivery:
    """A request as `settle.py` has published it."""
    job = bench.job(lane=BATCH, body=body, message_id=id, routing_key="batch.crm.enrich", headers={"x-own": 7})
    job.batch = replace(HOP, **batch)
    message = gathered(job, params, now_ms=NOW_MS, names=NAMES)
    message.exchange, message.routing_key = "", NAMES.batches
    return FakeDelivery(message, bench.log, queue=NAMES.batches, tag=tag)


def several(bench: Bench, count: int, **batch: Any) -> list[FakeDelivery]:
    return [parked(bench, f"r-{number}", tag=number, **batch) for number in range(1, count + 1)]


def delay_ms(sent: Sent) -> int:
    headers = sent.message.headers
    return int(headers[n.BACK_MS]) - int(headers[n.HOP_MS])


def batch_of(sent: Sent) -> BatchHop:
    found = read_hop(sent.message.headers).batch
    assert found is not None
    return found


async def test_so_many_requests_are_one_ticket_which_is_confirmed_before_they_are_acknowledged() -> None:
    bench = Bench()
    gathering = Gathering(*several(bench, 3), bench=bench)
    await gathering.run(settled=3)

    (ticket,) = gathering.tickets
    assert (ticket.account, ticket.provider, ticket.model) == ("anthropic/haiku", "anthropic", BATCH.model)
    assert gathering.items == [["r-1", "r-2", "r-3"]]
    assert bench.log[-4:] == ["confirmed: reply", "ack", "ack", "ack"]
    assert gathering.gatherer.counts == {"gathered": 3}


async def test_an_item_is_the_request_as_its_lane_gets_it_back() -> None:
    bench = Bench()
    gathering = Gathering(parked(bench, "r-1", params=b'{"for": "them"}'), bench=bench, spec=QUICK)
    await gathering.run(settled=1)

    ((item,),) = (ticket.items for ticket in gathering.tickets)
    assert item.params == b'{"for": "them"}'
    assert item.message.body == BODY
    assert (item.identity, item.routing_key) == (Identity("crm", "r-1"), "batch.crm.enrich")
    assert [ticket.lane for ticket in gathering.tickets] == ["batch"]
    assert (item.deadline_ms, item.tokens) == (HOP.deadline_ms, HOP.tokens)
    assert item.message.headers["x-own"] == 7
    assert read_hop(item.message.headers).batch == HOP
    assert n.ROUTING_KEY not in item.message.headers


async def test_the_largest_batch_is_closed_when_all_have_the_bytes_of_two() -> None:
    bench = Bench()
    bodies = [BODY.replace(b"hi", b"h" * size) for size in (100, 300, 200)]
    found = [
        parked(bench, f"r-{tag}", tag=tag, model=f"m-{tag}", body=body, params=body)
        for tag, body in enumerate(bodies, start=1)
    ]
    size = sum(len(each.message.body) for each in found)
    assert size % 2 == 0
    gathering = Gathering(*found, bench=bench, spec=replace(SPEC, bytes=size // 2))
    await gathering.run(settled=1)
    assert gathering.items == [["r-2"]]


@pytest.mark.parametrize(
    "other", [{"account": "b"}, {"provider": "b"}, {"model": "b"}, {"headers": "b"}, {"dialect": "openai.chat"}]
)
async def test_what_a_batch_must_have_in_common_divides_requests(other: dict[str, Any]) -> None:
    bench = Bench()
    found = [parked(bench, f"r-{tag}", tag=tag, **(other if tag % 2 else {})) for tag in range(6)]
    gathering = Gathering(*found, bench=bench)
    await gathering.run(settled=6)
    assert sorted(gathering.items) == [["r-0", "r-2", "r-4"], ["r-1", "r-3", "r-5"]]
    ((name, value),) = other.items()
    assert value in {getattr(ticket, name) for ticket in gathering.tickets}


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 4, 5, None])
async def test_what_causes_a_fault_when_it_is_read_ends_nothing_and_is_parked_in_the_end(
    times: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(delivery: Delivery) -> object:
        if delivery.message.message_id == "r-1":
            raise ZeroDivisionError
        return read(delivery)

    read = gather_module._read
    monkeypatch.setattr(gather_module, "_read", fails)
    bench = Bench()
    bad, good = parked(bench, "r-1", tag=1), parked(bench, "r-2", tag=2)
    bad.times_delivered = times
    gathering = Gathering(bad, good, bench=bench, spec=QUICK)
    await gathering.run(settled=2)
    assert gathering.items == [["r-2"]]
    is_parked = times in (5, None)
    assert sorted(gathering.settled) == (["ack", "ack"] if is_parked else ["ack", "reject"])
    assert [each.routing_key for each in bench.publisher.sent if each.message.message_id == "r-1"] == (
        [NAMES.strays] if is_parked else []
    )


async def test_what_was_gathered_by_a_worker_that_died_is_gathered_again() -> None:
    bench = Bench()
    await bench.store.gather("other", [Identity("crm", "r-1")], until_ms=2**45)
    gathering = Gathering(parked(bench, "r-1"), bench=bench, spec=QUICK)
    await gathering.run(settled=1)

    (ticket,) = gathering.tickets
    assert await bench.store.submit("other", [Identity("crm", "r-1")], until_ms=2**45) == {}
    assert await bench.store.submit(ticket.id, [Identity("crm", "r-1")], until_ms=2**45) == {
        Identity("crm", "r-1"): False
    }


async def test_what_comes_back_from_a_batch_to_be_tried_again_is_in_the_next_one() -> None:
    bench = Bench()
    one, two = Identity("crm", "r-1"), Identity("crm", "r-2")
    await bench.store.gather("former", [one, two], until_ms=2**45)
    await bench.store.submit("former", [one, two], until_ms=2**45)
    await bench.store.clear("former", [one, two])
    found = [parked(bench, "r-1", tag=1, ticket="former"), parked(bench, "r-2", tag=2)]
    gathering = Gathering(*found, bench=bench, spec=QUICK)
    await gathering.run(settled=2)
    assert gathering.items == [["r-1"]]
    assert gathering.gatherer.counts == {"gathered": 1, "repeated": 1}


async def test_a_dead_letter_of_a_batch_that_is_published_again_runs_live_if_its_mark_is_still_kept() -> None:
    bench = Bench()
    await bench.store.gather("former", [Identity("crm", "r-1")], until_ms=2**45)
    await bench.store.submit("former", [Identity("crm", "r-1")], until_ms=2**45)
    found = several(bench, 2)
    for each in found:
        each.message.headers = {**each.message.headers, n.DEAD_AT: "2026-11-26T10:00:00.000Z"}
    gathering = Gathering(*found, bench=bench, spec=QUICK)
    await gathering.run(settled=2)
    assert gathering.items == [["r-2"]]
    (back,) = gathering.back
    assert (batch_of(back).live, delay_ms(back)) == (True, 0)


@pytest.mark.parametrize("away", ["store", "broker"])
async def test_without_the_store_or_if_the_ticket_cannot_be_published_the_requests_are_returned(away: str) -> None:
    bench = Bench()
    found = several(bench, 3)
    if away == "store":
        bench.store.failing = StoreUnavailable("away")
    else:
        bench.publisher.failing[""] = BrokerUnreachable("gone")
    gathering = Gathering(*found, bench=bench)
    await gathering.run(settled=3)
    assert gathering.settled == ["nack"] * 3
    assert bench.publisher.sent == []


async def test_if_the_broker_takes_no_message_of_that_size_the_requests_run_live() -> None:
    bench = Bench()
    found = several(bench, 3)
    bench.publisher.failing[""] = MessageTooLarge(10, 1)
    gathering = Gathering(*found, bench=bench)
    await gathering.run(settled=3)
    assert gathering.settled == ["ack"] * 3
    assert [batch_of(each).live for each in gathering.back] == [True] * 3


async def test_a_batch_that_does_not_fit_into_one_ticket_is_several(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(items: list[TicketItem]) -> Any:
        return ((item,) for item in items)

    monkeypatch.setattr("consumers.batches.gather.parts", one_by_one)
    bench = Bench()
    gathering = Gathering(*several(bench, 3), bench=bench)
    await gathering.run(settled=3)

    assert gathering.items == [["r-1"], ["r-2"], ["r-3"]]
    assert len({ticket.id for ticket in gathering.tickets}) == 3
    for ticket in gathering.tickets:
        (item,) = ticket.items
        assert await bench.store.submit(ticket.id, [item.identity], until_ms=2**45) == {item.identity: False}


@pytest.mark.slow
async def test_a_request_that_causes_faults_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    found = several(bench, 3)
    message_of = _Request.message

    def fails(request: _Request, *args: Any) -> Message:
        if request.delivery.message.message_id == "r-2":
            raise ZeroDivisionError
        return message_of(request, *args)

    monkeypatch.setattr(_Request, "message", fails)
    first = Gathering(*found, bench=bench)
    await first.run(settled=3)
    assert first.settled == ["reject"] * 3
    assert bench.publisher.sent == []

    bench.log.clear()
    for each in found:
        each.times_delivered = 4
    fourth = Gathering(*found, bench=bench)
    await fourth.run(settled=3)
    assert (fourth.settled, bench.publisher.sent) == (["reject"] * 3, [])

    bench.log.clear()
    found[1].times_delivered = 5
    bench.publisher.failing[NAMES.delay(0)] = bench.publisher.failing[""] = BrokerUnreachable("gone")
    away = Gathering(*found, bench=bench)
    await away.run(settled=3)
    assert sorted(away.settled) == ["nack", "nack", "reject"], "what was not sent back is not acknowledged"

    bench.log.clear()
    bench.publisher.failing.clear()
    last = Gathering(*found, bench=bench)
    await last.run(settled=3)
    assert last.settled == ["ack"] * 3
    assert [batch_of(each).live for each in last.back] == [True] * 2
    assert [each.message.message_id for each in bench.publisher.sent if each.routing_key == NAMES.strays] == ["r-2"]


async def test_a_request_that_is_too_large_to_go_back_ends() -> None:
    bench = Bench()
    bench.publisher.too_large = {BODY}
    gathering = Gathering(parked(bench, "r-1", deadline_ms=NOW_MS), bench=bench, spec=QUICK)
    await gathering.run(settled=1)
    (sent,) = bench.publisher.sent
    assert (sent.routing_key, sent.message.body) == (NAMES.strays, b"")
    assert (sent.message.headers[n.DEAD_CODE], sent.message.headers[n.ROUTING_KEY]) == ("too_large", "batch.crm.enrich")
    assert gathering.settled == ["ack"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {n.BATCH: "{}"},
        {n.BATCH: "no JSON", n.ROUTING_KEY: KEY},
        {n.BATCH: '{"params_bytes": "28"}', n.ROUTING_KEY: KEY},
        {n.BATCH: '{"params_bytes": -1}', n.ROUTING_KEY: KEY},
        {n.BATCH: "[" * 10_000, n.ROUTING_KEY: KEY},
        {n.BATCH: 7, n.ROUTING_KEY: KEY},
    ],
)
async def test_what_no_worker_has_published_falls(headers: dict[str, Any]) -> None:
    bench = Bench()
    message = Message(body=b"x", headers=headers, routing_key=NAMES.batches, message_id="m", user_id="app")
    gathering = Gathering(FakeDelivery(message, bench.log, queue=NAMES.batches), bench=bench)
    await gathering.run(settled=1)
    (fallen,) = bench.publisher.sent
    assert (fallen.exchange, fallen.routing_key, fallen.message.body) == ("", NAMES.strays, b"x")
    assert (fallen.message.user_id, fallen.message.headers[n.USER_ID]) == (None, "app")
    assert gathering.settled == ["ack"]
