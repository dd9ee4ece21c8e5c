"""Which ticket has a request, and how much is in the batches of an account, for every engine."""

import asyncio
from collections.abc import Sequence

import pytest

from consumers.state.base import Identity
from consumers.state.store import Store
from tests.consumers.state.conftest import Opened, in_ms
from tests.support.waiting import until

DAY_MS = 86_400_000
ONE, TWO, THREE = (Identity("crm:'ü' 1", each) for each in ("one", "two", "three"))


async def gathered(store: Store, ticket: str, *requests: Identity, until_ms: int = 0) -> set[Identity]:
    return set(await store.gather(ticket, requests, until_ms=until_ms or in_ms(DAY_MS)))


async def submitted(store: Store, ticket: str, *requests: Identity) -> dict[Identity, bool]:
    return dict(await store.submit(ticket, requests, until_ms=in_ms(DAY_MS)))


async def enqueued(
    store: Store, ticket: str, requests: int, tokens: int = 0, *, most_tokens: int | None = None, until_ms: int = 0
) -> bool:
    return await store.enqueue(
        ticket,
        "anthropic/haiku",
        requests=requests,
        tokens=tokens,
        most_requests=100,
        most_tokens=most_tokens,
        until_ms=until_ms or in_ms(DAY_MS),
    )


async def test_a_request_belongs_to_the_last_ticket_until_one_is_submitted(opened: Opened) -> None:
    here, there = await opened(), await opened()
    assert await gathered(here, "a1", ONE, TWO) == {ONE, TWO}
    assert await gathered(there, "b1", TWO, THREE) == {TWO, THREE}

    assert await submitted(here, "a1", ONE, TWO) == {ONE: False}
    assert await gathered(there, "c1", ONE, TWO) == {TWO}


async def test_a_ticket_that_is_submitted_again_is_told_so(store: Store) -> None:
    await gathered(store, "a1", ONE, TWO)
    assert await submitted(store, "a1", ONE) == {ONE: False}
    assert await submitted(store, "a1", ONE, TWO) == {ONE: True, TWO: False}


async def test_what_left_a_ticket_is_not_gathered_for_a_while_unless_it_came_from_there(store: Store) -> None:
    """A repeated message must not be in another batch before the outcome of the first one is stored."""
    await gathered(store, "a1", ONE, TWO, THREE)
    await submitted(store, "a1", ONE, TWO, THREE)
    await store.clear("a1", [ONE, TWO])
    await store.clear("b1", [THREE])

    assert await gathered(store, "c1", ONE, TWO, THREE) == set()
    assert set(await store.gather("c1", [ONE, TWO], until_ms=in_ms(DAY_MS), former={ONE: "a1", TWO: "b1"})) == {ONE}
    assert await submitted(store, "c1", ONE) == {ONE: False}
    assert await submitted(store, "a1", ONE, TWO) == {TWO: True}


async def test_the_parts_of_a_ticket_take_its_requests_and_it_cannot_have_them_back(store: Store) -> None:
    await gathered(store, "a1", ONE, TWO)
    await submitted(store, "a1", ONE, TWO)

    assert await submitted(store, "a10", ONE) == {ONE: False}
    assert await submitted(store, "a10", ONE) == {ONE: True}
    assert await submitted(store, "a1", ONE, TWO) == {TWO: True}
    assert await submitted(store, "b1", TWO) == {}


async def test_if_the_store_was_lost_a_ticket_gets_its_requests_as_if_it_had_submitted_them(store: Store) -> None:
    assert await submitted(store, "a1", ONE) == {ONE: True}
    assert await gathered(store, "b1", ONE) == set()


async def test_a_mark_that_has_ended_is_none_also_before_it_is_removed(store: Store) -> None:
    await gathered(store, "a1", ONE, TWO, until_ms=in_ms(20))
    await store.submit("a1", [TWO], until_ms=in_ms(20))
    await asyncio.sleep(0.05)  # until then they are known
    assert await submitted(store, "b1", ONE, TWO) == {ONE: True, TWO: True}
    assert await submitted(store, "a1", ONE, TWO) == {}


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1000])
async def test_any_number_of_requests_is_marked_at_once(store: Store, count: int) -> None:
    requests: Sequence[Identity] = [Identity("crm", f"r-{at}") for at in range(count)]
    assert await gathered(store, "a1", *requests) == set(requests)
    assert await submitted(store, "a1", *requests) == dict.fromkeys(requests, False)
    await store.clear("a1", requests)
    assert await gathered(store, "b1", *requests) == set()


async def test_of_concurrent_tickets_exactly_one_submits_a_request(opened: Opened) -> None:
    stores = [await opened() for _ in range(2)]

    async def one(ticket: str, store: Store) -> bool:
        await gathered(store, ticket, ONE)
        return ONE in await submitted(store, ticket, ONE)

    found = await asyncio.gather(*(one(f"{at:02x}", stores[at % 2]) for at in range(20)))
    assert sum(found) == 1


async def test_the_batches_of_an_account_have_room_for_so_many_requests(opened: Opened) -> None:
    here, there = await opened(), await opened()
    assert await enqueued(here, "a", 60)
    assert not await enqueued(there, "b", 41)
    assert await enqueued(there, "c", 40)
    await here.dequeue("a", "anthropic/haiku")
    assert await enqueued(there, "b", 41)


async def test_a_ticket_counts_once_and_as_it_was_last(store: Store) -> None:
    assert await enqueued(store, "a", 60)
    assert await enqueued(store, "a", 70)
    assert not await enqueued(store, "b", 31)
    assert await enqueued(store, "b", 30)


async def test_tokens_have_a_limit_of_their_own(store: Store) -> None:
    assert await enqueued(store, "a", 1, 500, most_tokens=1000)
    assert not await enqueued(store, "b", 1, 501, most_tokens=1000)
    assert await enqueued(store, "b", 1, 500, most_tokens=1000)
    assert await enqueued(store, "b", 1, 501)


async def test_a_ticket_that_is_larger_than_the_limit_gets_room_when_it_is_alone(store: Store) -> None:
    assert await enqueued(store, "a", 1)
    assert not await enqueued(store, "large", 500)
    await store.dequeue("a", "anthropic/haiku")
    assert await enqueued(store, "large", 500)


@pytest.mark.slow
async def test_what_was_not_given_back_counts_until_its_time(store: Store) -> None:
    assert await enqueued(store, "lost", 100, until_ms=in_ms(3000))
    assert not await enqueued(store, "b", 1)
    await until(lambda: enqueued(store, "b", 1))
