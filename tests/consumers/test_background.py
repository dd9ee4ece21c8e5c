"""A task that runs beside a block of code."""

import asyncio

import pytest

from consumers.background import background_task


async def fails() -> None:
    raise RuntimeError("broken")


async def test_a_task_that_fails_ends_the_block_that_it_runs_beside_with_its_error() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        async with background_task(fails(), name="beside"):
            await asyncio.sleep(60)
