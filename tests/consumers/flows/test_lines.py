"""Who posts next: each endpoint of each tenant waits in its own line, and no tenant takes the places of another."""

import asyncio

from consumers.flows.lines import (
    AT_ONCE,
    SLOW_PLACES,
    WAITING,
    WAITING_BYTES,
    WAITS_S,
    Line,
    PostLines,
    PostPlace,
)
from tests.support.virtual_time import virtually

A, B = Line("a", "https://a.example"), Line("b", "https://b.example")
Answer = PostPlace | float | None


def clocked() -> PostLines:
    return PostLines(clock=asyncio.get_running_loop().time)


def leave(lines: PostLines, place: PostPlace, *, took_s: float, is_answered: bool, not_for_s: float = 0) -> None:
    lines.learn(place.line, took_s=took_s, is_answered=is_answered, not_for_s=not_for_s)
    lines.leave(place)
    lines.leave(place)  # changes nothing


def many(tenant: str, count: int) -> list[Line]:
    return [Line(tenant, f"https://{number}.example") for number in range(count)]


async def entering(lines: PostLines, *each: Line, size: int = 100) -> list["asyncio.Task[Answer]"]:
    """They enter one after the other, and go as far as they come."""
    tasks = [asyncio.create_task(lines.enter(line, size)) for line in each]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def ended(tasks: list["asyncio.Task[Answer]"]) -> list[Answer]:
    return [task.result() for task in tasks if task.done() and not task.cancelled()]


def places(tasks: list["asyncio.Task[Answer]"]) -> list[PostPlace]:
    return [found for found in ended(tasks) if isinstance(found, PostPlace)]


def backs(tasks: list["asyncio.Task[Answer]"]) -> list[float]:
    return [found for found in ended(tasks) if isinstance(found, float)]


async def end(tasks: list["asyncio.Task[Answer]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_tenant_with_thousands_of_slow_endpoints_leaves_room_for_each_other_tenant() -> None:
    async def story() -> None:
        lines = clocked()
        flood = await entering(lines, *many("a", 2500))
        assert len(places(flood)) == SLOW_PLACES // 2
        assert sum(not task.done() for task in flood) == WAITING // 2
        others = [await entering(lines, Line(f"t-{number}", "https://new.example")) for number in range(20)]
        assert all(places(each) for each in others)
        await end(flood)

    virtually(story())


def test_the_bytes_that_wait_in_memory_are_bounded() -> None:
    async def story() -> None:
        lines = clocked()
        tasks = await entering(lines, *many("a", 200), size=WAITING_BYTES // 8)
        assert sum(not task.done() for task in tasks) == 4
        await end(tasks)
        assert lines._memory_bytes.used.total() == lines._memory.used.total() == 0

    virtually(story())


def test_nobody_waits_in_memory_for_long() -> None:
    async def story() -> None:
        lines = clocked()
        tasks = await entering(lines, *[A] * (AT_ONCE + 1))
        await asyncio.sleep(WAITS_S + 0.1)
        assert len(backs(tasks)) == 1

    virtually(story())


def test_a_turn_that_comes_when_the_wait_ends_is_not_lost() -> None:
    async def story() -> None:
        lines = clocked()
        tasks = await entering(lines, *[A] * (AT_ONCE + 1))
        await asyncio.sleep(WAITS_S - 0.001)
        leaving = places(tasks)[0]
        asyncio.get_running_loop().call_later(0.001, lines.leave, leaving)
        await asyncio.sleep(0.1)
        for each in places(tasks):
            lines.leave(each)
        assert not lines.running
        assert lines._places.total == lines._slow_places.total == lines._memory.total == 0

    virtually(story())


def test_whoever_is_cancelled_takes_no_place_with_it() -> None:
    async def story() -> None:
        lines = clocked()
        tasks = await entering(lines, *[A] * (AT_ONCE + 2))
        place = places(tasks)[0]
        waiting = next(task for task in tasks if not task.done())
        leave(lines, place, took_s=10, is_answered=True)  # the next one has its turn
        waiting.cancel()  # before it notices
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert tasks[-1].done(), "the place went on to the next one"
        for each in places(tasks)[1:]:
            leave(lines, each, took_s=10, is_answered=True)
        assert not lines.running
        assert lines._places.used.total() == lines._slow_places.used.total() == 0

    virtually(story())


def test_when_the_process_stops_nobody_waits() -> None:
    async def story() -> None:
        lines = clocked()
        tasks = await entering(lines, *[A] * (AT_ONCE + 2))
        lines.close()
        assert [await task for task in tasks[-2:]] == [None, None]
        assert await lines.enter(B, 1) is None

    virtually(story())
