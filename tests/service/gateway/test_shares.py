"""What tenants compete for is shared, and comes back whole, whoever is cancelled."""

import asyncio
import gc
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from service.gateway import shares
from service.gateway.problems import ApiError
from service.gateway.shares import BodyParsing, SharedLimit
from tests.support.waiting import until

PACKED = math.inf


@pytest.fixture
def parsing() -> Iterator[BodyParsing]:
    made = BodyParsing()
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


async def test_a_body_whose_turn_does_not_come_is_refused(
    parsing: BodyParsing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "PARSED_WITHIN_S", 0.05)
    may_end = threading.Event()
    first = asyncio.create_task(parsing.run(PACKED, lambda: may_end.wait(30)))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="to be parsed"):
        await parsing.run(PACKED, lambda: None)
    may_end.set()
    with suppress(ApiError):  # it began in time, and its thread has ended
        await first


async def test_who_is_cancelled_while_its_body_is_parsed_ends_when_the_thread_does(parsing: BodyParsing) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(30)
        ended.set()

    parsed = asyncio.create_task(parsing.run(PACKED, work))
    await until(begun.is_set)
    parsed.cancel()
    await asyncio.sleep(0)
    assert not parsed.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await parsed
    assert ended.is_set()


async def test_what_is_refused_keeps_no_body_until_the_next_collection(parsing: BodyParsing) -> None:
    class Body:
        pass

    def refuse() -> None:
        body = Body()
        held.append(weakref.ref(body))
        raise ApiError(413, "too large")

    held: list[weakref.ref[Body]] = []
    gc.collect()
    gc.disable()
    try:
        with suppress(ApiError):
            await parsing.run(PACKED, refuse)
        await until(lambda: held[0]() is None)
    finally:
        gc.enable()
