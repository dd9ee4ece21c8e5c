"""Asks for a request's result repeatedly, until there is one."""

import asyncio
from collections.abc import Awaitable, Callable

from lanekeeper.contract.problems import AccessRefused, BrokerError, TopologyMismatch
from lanekeeper.errors import ControlRefused, NoReply, NotEnded
from lanekeeper.replies import Final

FIRST_S = 0.1
"""The first pause, in seconds, between two questions for the same result."""
CAP_S = 5.0
"""The longest pause, in seconds, between two questions for the same result."""


async def until_ended(ask: Callable[[float | None], Awaitable[Final]], *, end: float | None) -> Final:
    """Call `ask`, which fetches a request's final reply, repeatedly until the request has ended. The argument of `ask`
    is the number of seconds left until `end`, a time of the event loop's clock, at which it is called for the last
    time.

    If `end` is None, there is no time limit, but the first BrokerError ends the wait. Raises the last error of `ask`.
    """
    loop = asyncio.get_running_loop()
    pause_s = FIRST_S
    while True:
        asked_at = loop.time()
        try:
            return await ask(None if end is None else max(0.0, end - asked_at))
        except (AccessRefused, TopologyMismatch):
            raise
        except (NotEnded, NoReply, BrokerError, ControlRefused) as error:
            if isinstance(error, ControlRefused) and not error.is_passing:
                raise
            over = isinstance(error, BrokerError) if end is None else loop.time() >= end
            if over:
                raise
        again_at = asked_at + pause_s
        await asyncio.sleep(max(0.0, (again_at if end is None else min(again_at, end)) - loop.time()))
        pause_s = min(CAP_S, pause_s * 1.5)
