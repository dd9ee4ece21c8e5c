"""Registered functions are imported at start, and called with JSON; each way to fail has its error."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from consumers.failures import HandlerError, RejectedError
from consumers.flows import handlers as module
from consumers.flows import process_pool
from consumers.flows.handlers import Caller, Handlers, HandlerSpec
from lanekeeper.telemetry.tracing import Tracing
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # processes of their own
FUNCTIONS = "tests.support.functions"


def spec(name: str, kind: Literal["async", "cpu"], run: str | None = None) -> HandlerSpec:
    return HandlerSpec(name=name, run=run or f"{FUNCTIONS}:{name}", kind=kind)


@asynccontextmanager
async def registered(
    *specs: HandlerSpec,
    cores: int = 2,
    most_bytes: int = 100_000,
    tracing: Tracing | None = None,
    urgent_rank: int | None = None,
) -> AsyncIterator[Handlers]:
    handlers = Handlers(specs, cores=cores, most_bytes=most_bytes, tracing=tracing, urgent_rank=urgent_rank)
    assert await handlers.load() == []
    try:
        yield handlers
    finally:
        await handlers.aclose(within_s=2)


async def call(handlers: Handlers, name: str, given: Any = None, *, timeout_s: float = 30.0) -> Any:
    async with handlers.turn(name) as turn:
        return json.loads(await turn(json.dumps(given).encode(), timeout_s))


async def test_why_the_process_cannot_import_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_at_import.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "never_imported.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ends, never = (Handlers([spec("a", "cpu", f"{name}:f")], cores=1) for name in ("ends_at_import", "never_imported"))
    lines = await ends.load()
    monkeypatch.setattr(process_pool, "IMPORT_WITHIN_S", 0.01)
    lines += await never.load()
    for handlers in (ends, never):
        await handlers.aclose(within_s=1)

    assert "exit code 3" in lines[0]
    assert "not within 0.01 s" in lines[1]


async def test_a_process_whose_function_refuses_or_fails_takes_the_next_call() -> None:
    async with registered(spec("rejects_and_tells", "cpu"), spec("fails_oddly", "cpu"), cores=1) as handlers:
        process = await call(handlers, "rejects_and_tells")
        for _ in range(3):
            with pytest.raises(RejectedError, match=str(process)):
                await call(handlers, "rejects_and_tells", 1)
            with pytest.raises(HandlerError, match=r"Unpicklable at functions.py:\d+: no good"):
                await call(handlers, "fails_oddly")
        assert await call(handlers, "rejects_and_tells") == process


async def test_a_process_has_no_key_no_broker_url_and_no_descriptor_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANTHROPIC_API_KEY", "LANEKEEPER_AMQP_URL", "lanekeeper_store", "LANEKEEPER_PROVIDERS__X__API_KEY"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("DOCUMENTS_KEY", "for the handler")
    kept = os.open(tmp_path / "kept to itself", os.O_CREAT)
    os.set_inheritable(kept, True)
    async with registered(spec("surroundings", "cpu")) as handlers:
        environment, descriptors = await call(handlers, "surroundings")
    os.close(kept)
    assert "DOCUMENTS_KEY=for the handler" in environment
    assert not [each for each in environment if "canary" in each]
    assert not [each for each in descriptors if "kept to itself" in each]


async def test_one_tenant_s_calls_do_not_go_before_another_s() -> None:
    began = list[str]()
    async with registered(spec("sleeps", "cpu"), cores=1) as handlers:

        async def one(tenant: str, seconds: float) -> None:
            async with handlers.turn("sleeps", Caller(tenant=tenant)) as turn:
                began.append(tenant)
                await turn(json.dumps(seconds).encode(), 30.0)

        async with asyncio.TaskGroup() as group:
            for tenant, seconds in [("greedy", 0.2)] * 6 + [("modest", 0.01)] * 3:
                group.create_task(one(tenant, seconds))
    assert began[:4] == ["greedy", *["modest"] * 3], "what counts is the time that its calls took"


async def test_a_turn_that_is_cancelled_is_given_on() -> None:
    async with registered(spec("sleeps", "cpu"), cores=1) as handlers:
        calls = [asyncio.create_task(call(handlers, "sleeps", 0.1)) for _ in range(8)]
        await until(lambda: handlers._pool._running.total() == 1)
        for each in calls[1:7]:
            each.cancel()
        assert await asyncio.gather(calls[0], calls[7])
        assert not handlers._pool._running
        assert not handlers._pool._took_s


async def test_a_function_that_ignores_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANCELLED_WITHIN_S", 0.01)
    stuck: list[str] = []
    monkeypatch.setattr(module.log, "error", lambda event, **fields: stuck.append(fields["handler"]))
    async with registered(spec("hangs", "async")) as handlers:
        with pytest.raises(HandlerError):
            await call(handlers, "hangs", "stubborn", timeout_s=0.01)
        await until(lambda: stuck == ["hangs"])


async def test_a_cancelled_call_kills_its_process() -> None:
    async with registered(spec("computes", "cpu"), spec("doubled", "cpu"), cores=1) as handlers:
        *_, process = await call(handlers, "doubled", 1)
        computing = asyncio.create_task(call(handlers, "computes"))
        await asyncio.sleep(0)
        computing.cancel()
        await asyncio.wait({computing})
        await until(lambda: not _runs(process))


async def test_the_processes_end_with_the_worker() -> None:
    async with registered(spec("sleeps", "cpu")) as handlers:
        process = await call(handlers, "sleeps", 0)
        assert _runs(process)
    await until(lambda: not _runs(process))


WORKER = """
import asyncio, json, sys
from consumers.flows.handlers import Caller, Handlers, HandlerSpec

async def main():
    handlers = Handlers([HandlerSpec(name="h", run="tests.support.functions:holds_the_lock", kind="cpu")])
    async with handlers.turn("h") as turn:
        await turn(json.dumps(sys.argv[1]).encode(), 60)

asyncio.run(main())
"""


async def test_a_function_that_lets_no_other_thread_run_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, str(told))
    try:
        await until(lambda: told.exists() and told.read_text() != "")
    finally:
        worker.kill()
        await worker.wait()
    process = int(told.read_text())
    try:
        await until(lambda: not runs(process))
    finally:
        if runs(process):
            os.kill(process, signal.SIGKILL)


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_a_function_whose_own_wait_is_cancelled_or_that_exits_has_failed() -> None:
    names = {
        "waits_for_a_cancelled_task": "cancelled from within",
        "calls_exit": "sys.exit.3",
        "raises_no_exception": "NoException: that few catch",
    }
    async with registered(*(spec(name, "async") for name in names)) as handlers:
        for name, text in names.items():
            with pytest.raises(HandlerError, match=text):
                await call(handlers, name)


async def test_a_process_that_a_function_forks_answers_nothing() -> None:
    async with registered(spec("forks", "cpu"), spec("doubled", "cpu"), cores=1) as handlers:
        assert await call(handlers, "forks", "from the function") == "from the function"
        assert (await call(handlers, "doubled", 1))[0] == 1


async def test_processes_that_a_function_starts_end_with_its_own(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    async with registered(spec("starts_another", "cpu"), cores=1) as handlers:
        hanging = asyncio.create_task(call(handlers, "starts_another", str(told)))
        await until(lambda: told.exists() and told.read_text() != "")
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        other = await call(handlers, "starts_another")
    await until(lambda: not runs(int(told.read_text())) and not runs(other))


def runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


async def test_a_process_that_died_while_it_was_idle_is_replaced() -> None:
    async with registered(spec("doubled", "cpu"), cores=1) as handlers:
        process = (await call(handlers, "doubled", 1))[2]
        os.kill(process, signal.SIGKILL)
        await until(lambda: not runs(process))
        await until(lambda: all(process.has_ended for process in handlers._pool._all))
        assert (await call(handlers, "doubled", 1))[2] != process
