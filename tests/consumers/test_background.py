"""Tasks that outlive their waiter are owned until they end, and not a moment longer."""

import asyncio
import gc
import weakref

import pytest
from structlog.testing import capture_logs

from consumers.background import Background, background_task, restarted
from consumers.clock import every


class Kept:
    """Something that a task returns."""


async def made() -> Kept:
    return Kept()


async def fails() -> None:
    raise RuntimeError("broken")


@pytest.mark.slow
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


async def test_a_task_that_fails_ends_the_block_that_it_runs_beside_with_its_error() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        async with background_task(fails(), name="beside"):
            await asyncio.sleep(60)


async def test_the_error_of_the_block_and_a_timeout_of_its_own_are_kept() -> None:
    for error in (KeyError("own"), TimeoutError("own")):
        with pytest.raises(type(error), match="own"):
            async with background_task(asyncio.sleep(60), name="beside"):
                raise error


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


async def test_a_task_that_is_restarted_logs_each_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumers.background.RESTART_S", 0.0)
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise KeyError("in_hand")

    with capture_logs() as logs:
        await restarted(run, name="live page")

    assert [(log["event"], log["where"], log["log_level"]) for log in logs] == [
        ("handler.failed", "live page", "error")
    ] * 2


async def test_the_failure_of_a_detached_task_is_logged() -> None:
    background = Background()
    with capture_logs() as logs:
        task = background.detached(fails(), name="probe")
        await asyncio.wait([task])
        await asyncio.sleep(0)

    assert [(log["event"], log["where"], log["error"]) for log in logs] == [("handler.failed", "probe", "RuntimeError")]
