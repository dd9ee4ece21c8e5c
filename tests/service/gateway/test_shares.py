"""What tenants compete for is shared, and comes back whole, whoever is cancelled."""

import asyncio
import math
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from service.gateway import shares
from service.gateway.problems import ApiError
from service.gateway.shares import ParsingTime, SharedLimit
from tests.support.waiting import until

PACKED = math.inf


@pytest.fixture
def parsing() -> Iterator[ParsingTime]:
    made = ParsingTime()
    yield made
    made.close()


def most_of(limit: SharedLimit, tenant: str) -> int:
    """Take one by one until nothing fits."""
    count = 0
    while limit.fits(tenant, 1):
        limit.taken(tenant).__enter__()
        count += 1
    return count


def test_one_tenant_can_take_most_and_each_further_one_finds_room() -> None:
    limit = SharedLimit(1000, "calls")

    assert [most_of(limit, tenant) for tenant in "abcd"] == [750, 188, 47, 12]
    with pytest.raises(ApiError, match="calls of this tenant"):
        limit.taken("a").__enter__()


def test_a_tenant_that_holds_more_than_its_share_keeps_it_and_gets_no_more() -> None:
    limit = SharedLimit(100, "bytes")
    with limit.taken("a", 70) as own:
        with limit.taken("b", 20):
            with pytest.raises(ApiError):
                own.change(71)
            assert limit.used == 90
        own.change(75)
    assert limit.used == 0


async def test_the_next_body_is_that_of_the_tenant_that_has_used_least(parsing: ParsingTime) -> None:
    may_end, order = threading.Event(), list[str]()
    parsing._used.add("greedy", 1)
    first = asyncio.create_task(parsing.run("greedy", PACKED, lambda: may_end.wait(30)))
    await asyncio.sleep(0)
    waiting = [
        asyncio.create_task(parsing.run(tenant, PACKED, partial(order.append, tenant)))
        for tenant in [*["greedy"] * 20, "other"]
    ]
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(first, *waiting)

    assert order == ["other", *["greedy"] * 20]


async def test_small_bodies_are_parsed_at_once_until_their_tenant_has_used_its_time(parsing: ParsingTime) -> None:
    async def thread_of(tenant: str, size: float) -> str:
        return await parsing.run(tenant, size, lambda: threading.current_thread().name)

    assert await thread_of("crm", 100) == "MainThread"
    assert (await thread_of("crm", PACKED)).startswith("parsing")
    parsing._used.add("crm", 1)
    assert (await thread_of("crm", 100)).startswith("parsing")
    assert await thread_of("shop", 100) == "MainThread"


async def test_a_body_whose_turn_does_not_come_is_refused(
    parsing: ParsingTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "PARSED_WITHIN_S", 0.05)
    may_end = threading.Event()
    first = asyncio.create_task(parsing.run("a", PACKED, lambda: may_end.wait(30)))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="to be parsed"):
        await parsing.run("b", PACKED, lambda: None)
    may_end.set()
    assert await first
    await until(lambda: not parsing._is_taken)


async def test_who_is_cancelled_while_its_body_is_parsed_ends_when_the_thread_does(parsing: ParsingTime) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(30)
        ended.set()

    parsed = asyncio.create_task(parsing.run("a", PACKED, work))
    await until(begun.is_set)
    parsed.cancel()
    await asyncio.sleep(0)
    assert not parsed.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await parsed
    assert ended.is_set()
