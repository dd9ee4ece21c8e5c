"""Handlers that take many at once: calls are gathered, and each has its own result, error, time limit and end."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from consumers.background import Background
from consumers.failures import HandlerDied, HandlerError, RejectedError
from consumers.flows.handlers import Caller, Handlers, HandlerSpec, Result
from consumers.gathering import Gathering
from lanekeeper.contract.problems import RequestProblem
from tests.support.waiting import until

Kind = Literal["async", "cpu"]
NAMES = {"async": "together", "cpu": "computed_together"}


@asynccontextmanager
async def registered(
    kind: Kind = "async", *, count: int = 5, window_s: float = 60.0, slots: dict[str, int] | None = None
) -> AsyncIterator[Handlers]:
    run = f"tests.support.functions:{NAMES[kind]}"
    spec = HandlerSpec(name="h", run=run, kind=kind, many=True, count=count, window_s=window_s)
    handlers = Handlers([spec], cores=1, most_bytes=1000, slots=slots)
    assert await handlers.load() == []
    try:
        yield handlers
    finally:
        await handlers.aclose(within_s=2)


async def ask(
    handlers: Handlers, given: Any, *, timeout_s: float = 30.0, lane: str = "batch", alone: bool = False
) -> Any:
    async with handlers.turn("h", Caller(lane), alone=alone) as turn:
        return json.loads(await turn(json.dumps(given).encode(), timeout_s))


async def ask_all(handlers: Handlers, *given: Any) -> list[Any]:
    return await asyncio.gather(*(ask(handlers, each) for each in given), return_exceptions=True)


async def test_fewer_are_called_when_the_window_ends_and_those_of_another_lane_apart() -> None:
    async with registered(count=100, window_s=0.01) as handlers:
        found = await asyncio.gather(*(ask(handlers, n, lane=lane) for lane in ("batch", "normal") for n in range(3)))
        assert found == [[0, 3], [1, 3], [2, 3]] * 2
        assert await ask(handlers, "later") == ["later", 1]
        assert await ask_all(handlers, "a", "b") == [["a", 2], ["b", 2]], "the window begins anew"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "cpu"])
async def test_each_can_fail_by_itself(kind: Kind) -> None:
    async with registered(kind) as handlers:
        a, fails, rejected, a_set, b = await ask_all(handlers, "a", "fails", "rejected", "a set", "b")
    assert (a, b) == (["a", 5], ["b", 5])
    assert isinstance(fails, HandlerError)
    assert "this one" in str(fails)
    assert isinstance(rejected, RejectedError)
    assert isinstance(a_set, RequestProblem)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        ("async", "all fail", "no good"),
        ("async", "all rejected", "never any good"),
        ("async", "one too few", "it returned 4 results for 5"),
        ("cpu", "one too few", "it returned 4 results for 5"),
        ("cpu", "dies", "its process died"),
    ],
)
async def test_what_fails_as_a_whole_fails_all_as_an_attempt_and_alone_one_harms_no_other(
    kind: Kind, given: str, text: str
) -> None:
    async with registered(kind) as handlers:
        errors = await ask_all(handlers, "a", "b", given, "c", "d")
        assert all(isinstance(error, HandlerError) and text in str(error) for error in errors)
        if given == "dies":
            assert all(isinstance(error, HandlerDied) for error in errors)
        assert await ask(handlers, "a", alone=True) == ["a", 1]


async def test_one_that_is_cancelled_leaves_the_others_alone() -> None:
    async with registered(count=3) as handlers:
        left = asyncio.create_task(ask(handlers, "left"))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait({left})
        assert await ask_all(handlers, "a", "b", "c") == [["a", 3], ["b", 3], ["c", 3]]


async def test_the_call_goes_on_while_one_waits_for_it_and_is_cancelled_with_the_last() -> None:
    async with registered(count=3) as handlers:
        calls = [asyncio.create_task(ask(handlers, each)) for each in ("hangs", "b", "c")]
        await until(lambda: any("handler h" in task.get_name() for task in asyncio.all_tasks()))
        for call in calls[:2]:
            call.cancel()
        await asyncio.wait(calls[:2])
        assert any("handler h" in task.get_name() for task in asyncio.all_tasks())
        calls[2].cancel()
        await until(lambda: not any("handler h" in task.get_name() for task in asyncio.all_tasks()))


async def test_each_has_its_own_time_limit() -> None:
    async with registered(count=2) as handlers:
        longer = asyncio.create_task(ask(handlers, "hangs"))
        with pytest.raises(HandlerError, match=r"no result within 0\.01 s"):
            await ask(handlers, "b", timeout_s=0.01)
        assert not longer.done()
        longer.cancel()


async def test_if_the_function_s_call_is_cancelled_the_calls_are_out_of_time_and_its_task_is_cancelled() -> None:
    began: asyncio.Future[asyncio.Task[object] | None] = asyncio.get_running_loop().create_future()

    async def run(_: Sequence[bytes], __: float, ___: str) -> Sequence[Result]:
        began.set_result(asyncio.current_task())
        await asyncio.Event().wait()
        return ()

    gathering: Gathering[bytes, Result] = Gathering(run, count=1, window_s=60, background=Background())
    call = asyncio.create_task(gathering.call(b"a", 50))
    task = await began
    assert task is not None
    task.cancel()
    with pytest.raises(TimeoutError):
        await call
    await asyncio.wait({task})
    assert task.cancelled()


async def test_what_waits_for_others_when_the_worker_stops_is_called() -> None:
    async with registered(count=5, window_s=0.05) as handlers:
        waiting = asyncio.create_task(ask(handlers, "a"))
        await asyncio.sleep(0)
    assert await waiting == ["a", 1]
