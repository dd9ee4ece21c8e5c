"""Waits for a condition instead of a fixed time."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

LOOK_EVERY_S = 0.01
PATIENCE_S = 60.0
"""Long, because what takes a moment on an idle machine may take long on a busy one. A test that passes does not wait
for all of it."""
STARTED_S = 2 * PATIENCE_S
"""The same for the start of a process, which needs four seconds of CPU."""


async def until(holds: Callable[[], Any] | Callable[[], Awaitable[Any]], *, within_s: float = PATIENCE_S) -> Any:
    """Wait until `holds()` returns a true value, and return it. Raises AssertionError with the last value."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while True:
        found = holds()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert loop.time() < end, f"not within {within_s:g} s; last: {found!r}"
        await asyncio.sleep(LOOK_EVERY_S)
