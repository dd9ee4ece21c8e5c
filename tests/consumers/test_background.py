"""Tasks that outlive their waiter are owned until they end, and not a moment longer."""

import asyncio
import gc
import weakref

import pytest

from consumers.background import Background
from consumers.clock import every


class Kept:
    """Something that a task returns."""


async def made() -> Kept:
    return Kept()


async def fails() -> None:
    raise RuntimeError("broken")


async def test_a_task_that_has_ended_is_not_kept() -> None:
    background = Background()
    task = background.begin(made(), name="make")
    kept = weakref.ref(await task)
    del task
    await asyncio.sleep(0)
    gc.collect()

    assert kept() is None


async def test_a_failure_without_a_waiter_is_not_logged_by_asyncio() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    background = Background()
    background.begin(fails(), name="fail")
    await background.finish(within_s=5)
    await asyncio.sleep(0)
    gc.collect()

    assert told == []


async def test_a_task_goes_on_when_its_waiter_is_cancelled_and_its_end_is_told() -> None:
    background, may_end = Background(), asyncio.Event()
    told: list[asyncio.Task[bool]] = []
    waiter = asyncio.create_task(background.sheltered(may_end.wait(), name="wait", if_left=told.append))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])
    assert (waiter.cancelled(), told) == (True, [])
    may_end.set()
    await background.finish(within_s=5)

    assert [task.result() for task in told] == [True]


async def test_to_finish_waits_for_what_ends_in_time_and_cancels_the_rest() -> None:
    background, never = Background(), asyncio.Event()
    quick = background.begin(asyncio.sleep(0.01, "done"), name="quick")
    endless = background.begin(never.wait(), name="endless")
    await background.finish(within_s=0.1)

    assert quick.result() == "done"
    with pytest.raises(asyncio.CancelledError):
        await endless


async def test_rounds_begin_at_once_and_end_with_the_event() -> None:
    until, rounds = asyncio.Event(), 0
    async for _ in every(0.001, until=until):
        rounds += 1
        if rounds == 3:
            until.set()

    assert rounds == 3


async def test_what_a_background_task_begins_is_waited_for_too() -> None:
    background, ended = Background(), list[str]()

    async def second() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        ended.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        background.begin(second(), name="second")

    background.begin(first(), name="first")
    await background.finish(within_s=30)

    assert ended == ["second"]
