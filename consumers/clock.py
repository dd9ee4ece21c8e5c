"""The time of the system clock, as a number and as text, and a periodic loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime

NowMs = Callable[[], int]


def now_ms() -> int:
    """The time of the system clock, in ms since 1970."""
    return time.time_ns() // 1_000_000


_FIRST_S = -62_135_596_800
_LAST_S = 253_402_300_799
"""The first and the last second of the calendar (the years 1 and 9999). A time in another zone may lie beyond."""


def moment_text(ms: int) -> str:
    """A time as text (RFC 3339, UTC); of a time beyond the calendar, its nearest second. Never raises."""
    when = datetime.fromtimestamp(min(max(ms / 1000, _FIRST_S), _LAST_S), tz=UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_ms(text: object) -> int | None:
    """The time in ms since 1970 that a text names (`moment_text`); None if it names none, or is no text."""
    if not isinstance(text, str):
        return None
    try:
        return round(1000 * datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


async def every(seconds: float, *, until: asyncio.Event) -> AsyncIterator[None]:
    """An async iterator for a loop that runs periodically: it yields at once, and again after each pause of `seconds`,
    until the event `until` is set."""
    while not until.is_set():
        yield
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await until.wait()
