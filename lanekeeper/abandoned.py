"""Cancels requests whose caller has stopped waiting, so that no unwanted answer is paid for.

The cancellations are sent in the background, because a cancelled caller must not wait for the broker. Closing the
client waits until they are sent, for at most 3 s.
"""

import asyncio

from lanekeeper.contract.problems import AccessRefused, BrokerError
from lanekeeper.errors import ControlRefused
from lanekeeper.telemetry import logs, signals
from lanekeeper.transport import Transport

WITHIN_S = 3.0
"""How many seconds a client waits for the broker's confirm of a cancellation. After that it gives up, and the request
may run to its end."""
log = logs.logger()


class Abandoned:
    """Cancels abandoned requests: those whose caller stopped waiting before the answer came. If `is_on` is false, it
    cancels none, and the requests continue."""

    def __init__(self, transport: Transport, *, is_on: bool) -> None:
        self._transport = transport
        self._is_on = is_on
        self._sending: set[asyncio.Task[None]] = set()

    def cancel(self, id: str, *, tenant: str | None) -> None:
        """Begin to cancel a request in the background. Returns at once."""
        if self._is_on:
            task = asyncio.create_task(self._cancel(id, tenant), name=f"cancel {id}")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def finish(self) -> None:
        """Wait until all cancellations that `cancel` has begun are sent, but not longer than `WITHIN_S` (3 s)."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=WITHIN_S)

    async def _cancel(self, id: str, tenant: str | None) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                await self._transport.send_cancellation(id, tenant=tenant, within_s=WITHIN_S)
        except AccessRefused as error:
            # a refusal closes the channel that other control messages share, so send no further cancellations
            self._is_on = False
            log.warning(
                signals.CANCELLATION_UNSENT, request=id, error=str(error), hint="its user needs the role client"
            )
        except (BrokerError, ControlRefused, TimeoutError) as error:
            log.warning(signals.CANCELLATION_UNSENT, request=id, error=str(error) or f"not within {WITHIN_S:g} s")
