"""Requests whose caller has stopped waiting: they are cancelled, so that no call runs on, and is paid, for nobody.

It happens in the background, because whoever is cancelled must not wait for a broker; leaving the client waits for it.
"""

import asyncio

from lanekeeper.contract.problems import AccessRefused, BrokerError
from lanekeeper.control import Control
from lanekeeper.telemetry import logs, signals

WITHIN_S = 3.0
"""How long the broker may take to keep a cancellation: after that the request runs on."""
log = logs.logger()


class Abandoned:
    """Sends their cancellations. `is_on` false: they are left to run."""

    def __init__(self, control: Control, *, is_on: bool) -> None:
        self._control = control
        self._is_on = is_on
        self._sending: set[asyncio.Task[None]] = set()

    def cancel(self, id: str, *, tenant: str | None) -> None:
        """Have a request cancelled; returns at once."""
        if self._is_on:
            task = asyncio.create_task(self._cancel(id, tenant), name=f"cancel {id}")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def finish(self) -> None:
        """Wait for what is being sent."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=WITHIN_S)

    async def _cancel(self, id: str, tenant: str | None) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                await self._control.cancel_unheard(id, tenant=tenant, within_s=WITHIN_S)
        except AccessRefused as error:
            # each try costs the channel on which others publish: once is enough to know
            self._is_on = False
            log.warning(
                signals.CANCELLATION_UNSENT, request=id, error=str(error), hint="its user needs the role client"
            )
        except (BrokerError, TimeoutError) as error:
            log.warning(signals.CANCELLATION_UNSENT, request=id, error=str(error) or f"not within {WITHIN_S:g} s")
