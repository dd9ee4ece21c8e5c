"""Templates are filled in beside the worker: none takes more than its share of time or memory, or harms another."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from consumers.flows.process_pool import ProcessDied, ProcessPool
from consumers.flows.rendering import Order, Rendering
from lanekeeper.contract.problems import RequestProblem
from tests.support.malicious import Stalls
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # processes, and seconds of CPU time
SLOW = Order(prompt="{% for a in input %}{% for b in input %}{% endfor %}{% endfor %}")
NUMBERS = json.dumps({"input": list(range(90_000)), "outputs": {}}).encode()


@asynccontextmanager
async def rendering(*, urgent_rank: int | None = None) -> AsyncIterator[Rendering]:
    found = Rendering(urgent_rank=urgent_rank)
    try:
        yield found
    finally:
        await found.aclose()


def state(given: Any) -> bytes:
    if isinstance(given, bytes):
        return given
    return json.dumps({"input": given, "outputs": {}}).encode()


async def fill_in(on: Rendering, order: Order, given: Any, *, rank: int = 0, tenant: str = "") -> str:
    (text,) = (await on.fill_in(order, state(given), rank=rank, tenant=tenant)).texts
    return text.decode()


async def refused(on: Rendering, order: Order, given: Any, *, tenant: str = "") -> RequestProblem:
    with pytest.raises(RequestProblem) as raised:
        await on.fill_in(order, state(given), rank=0, tenant=tenant)
    return raised.value


async def test_a_template_is_filled_in_and_what_is_wrong_with_it_is_a_problem_of_its_request() -> None:
    async with rendering() as on:
        assert await fill_in(on, Order(prompt="hi {{ input.name }}"), {"name": "Ü"}) == "hi Ü"
        assert await fill_in(on, Order(value="input"), {"a": [1]}) == '{"a":[1]}'
        missing = await refused(on, Order(prompt="{{ input.name }}"), {})
        assert (missing.code, missing.detail) == (
            "invalid_request",
            "its template does not fit the input: the object has no 'name'",
        )
        long = await refused(on, Order(prompt="{% for a in input %}" + 100 * "x" + "{% endfor %}"), NUMBERS)
        assert long.code == "too_large"
        assert len(on._pool._all) == 1, "none of this ends the process"


async def test_slow_templates_hold_neither_the_loop_nor_another_tenant() -> None:
    async with rendering() as on:
        with Stalls() as stalls:
            slow = [asyncio.create_task(refused(on, SLOW, NUMBERS, tenant="slow")) for _ in range(8)]
            await asyncio.sleep(0.2)
            assert await fill_in(on, Order(prompt="hi"), 1, tenant="other") == "hi"
            assert sum(not each.done() for each in slow) > 4, "it did not wait for them"
            for each in slow[:2]:
                assert "takes more than 1 s of CPU time; give it less input" in (await each).detail
            for each in slow:
                each.cancel()
            await asyncio.wait(slow)
    assert stalls.longest_s < 0.05


async def test_what_needs_too_much_memory_ends_only_its_own_request() -> None:
    async with rendering() as on:
        grows = Order(prompt="{{ [input|list, input|list, input|list, input|list]|length }}")
        given = "x" * 8_000_000
        assert "takes more than 256 MiB of memory; give it less input" in (await refused(on, grows, given)).detail
        assert await fill_in(on, Order(prompt="hi"), 1) == "hi"


async def test_a_process_that_dies_is_replaced_and_the_call_made_again() -> None:
    async with rendering() as on:
        calling = asyncio.create_task(refused(on, SLOW, NUMBERS))
        await until(lambda: any(not each.is_idle for each in on._pool._all))
        (first,) = on._pool._all
        os.kill(first._process.pid, signal.SIGKILL)
        assert "CPU time" in (await calling).detail, "the second process has said so"
        assert await fill_in(on, Order(prompt="hi"), 1) == "hi"


async def test_what_runs_on_in_c_is_ended_by_the_kernel_and_only_its_own_request_is_refused() -> None:
    pool = ProcessPool(1, cpu_s=1)
    with pytest.raises(ProcessDied) as died:
        async with pool.process("tests.support.functions:computes") as process:
            await process.call("tests.support.functions:computes", b"1", most_bytes=100)
    assert died.value.code == -signal.SIGXCPU
    await pool.aclose()


async def test_a_cancelled_call_leaves_no_process_that_goes_on() -> None:
    async with rendering() as on:
        calling = asyncio.create_task(refused(on, SLOW, NUMBERS))
        await until(lambda: any(not each.is_idle for each in on._pool._all))
        (process,) = on._pool._all
        calling.cancel()
        await asyncio.wait({calling})
        await until(lambda: process.has_ended)
