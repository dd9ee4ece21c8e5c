"""The bound for the bytes of messages that a process holds, and who gets its room."""

import asyncio
from functools import partial

from tests.support.virtual_time import virtually
from topology.broker.memory import EXPECTED_FOR_S, GIVEN_BACK_AFTER_S, LATE_S, HeldBytes, size_of


def fill(held: HeldBytes, holder: str, size: int = 1) -> int:
    """Take until there is no room; returns how often."""
    count = 0
    while held.take(holder, holder, size, redelivered=False):
        count += 1
    return count


def test_what_is_released_goes_to_what_waits_in_order_and_its_room_is_kept_for_its_return() -> None:
    async def story() -> None:
        held, back = HeldBytes(100), list[str]()
        fill(held, "batch", 10)
        for name in ("first", "second"):
            held.wait("batch", 10, lambda name=name: back.append(name))  # type: ignore[misc]
        assert not held.take("batch", "batch", 1, redelivered=False), "it would overtake"
        held.release("batch", 10)
        assert back == ["first"]
        held.expect("batch", "batch", 10)
        assert not held.take("batch", "batch", 10, redelivered=False), "this is another message"
        assert held.take("batch", "batch", 10, redelivered=True)
        held.release("batch", 10)
        assert back == ["first", "second"]
        held.expect("batch", "batch", 10)
        await asyncio.sleep(EXPECTED_FOR_S + 1)
        assert held.in_all == 40, "another process got it"

    virtually(story())


def test_while_others_are_busy_the_only_message_of_a_holder_waits_ten_seconds_and_others_until_there_is_room() -> None:
    async def story() -> None:
        held, back = HeldBytes(100), list[str]()
        fill(held, "normal")
        held.wait("tickets", 60, lambda: back.append("ticket"))
        held.wait("normal", 10, lambda: back.append("request"))
        await asyncio.sleep(LATE_S - 1)
        assert not back
        await asyncio.sleep(2)
        assert back == ["ticket"]
        await asyncio.sleep(GIVEN_BACK_AFTER_S)
        assert back == ["ticket"]
        assert held.waiting == 1

    virtually(story())


def test_what_waits_for_ten_minutes_is_given_back_without_room_however_much_it_is() -> None:
    async def story() -> None:
        held, room, back = HeldBytes(100), list[int](), list[int]()
        fill(held, "batch", 10)
        for number in range(60):
            held.wait("batch", 10, partial(room.append, number), after_long=partial(back.append, number))
        held.release("batch", 10)
        await asyncio.sleep(GIVEN_BACK_AFTER_S + LATE_S + 1)
        assert (room, sorted(back)) == ([0], [*range(1, 60)])
        assert held.in_all == 50, "more than the bound would be in memory when they are delivered again"
        assert held.waiting == 0

    virtually(story())


def test_large_headers_count() -> None:
    assert size_of({"x": "y" * 1000}) > 1000
    assert size_of({"x": ["y" * 1000]}) > 1000
    assert size_of({"x": 7, "z": None}) < 100
    assert size_of({"x-delivery-count": 3, "x-acquired-count": 4}) == 0
