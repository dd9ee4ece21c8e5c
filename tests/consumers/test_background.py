"""Tasks that outlive their waiter are owned until they end, and not a moment longer."""

import asyncio

import pytest

from consumers.background import Background, background_task


async def fails() -> None:
    raise RuntimeError("broken")


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


async def test_a_task_that_fails_ends_the_block_that_it_runs_beside_with_its_error() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        async with background_task(fails(), name="beside"):
            await asyncio.sleep(60)


async def test_a_cancellation_from_outside_ends_the_block_and_its_task() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def works() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def block() -> None:
        async with background_task(works(), name="beside"):
            await asyncio.sleep(60)

    task = asyncio.create_task(block())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
