"""Waits for a condition in place of a fixed sleep."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

LOOK_EVERY_S = 0.01
PATIENCE_S = 60.0
"""What comes true on an idle machine in a moment may take long on a busy one; nothing that passes waits for it."""
STARTED_S = 2 * PATIENCE_S
"""The same for a process, which needs four seconds of CPU to begin."""


async def until(holds: Callable[[], Any] | Callable[[], Awaitable[Any]], *, within_s: float = PATIENCE_S) -> Any:
    """What `holds` gives as soon as it is true. Raises AssertionError with what it gave last."""
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
