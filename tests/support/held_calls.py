"""A simulated API whose calls last exactly as long as a test needs them.

async with HeldCalls() as api:
    …                               calls whose prompt contains `[[held]]` wait
    api.let_go()                    they are answered, and so are later ones
"""

import asyncio

from aiohttp import web

from service.simulated.app import SimulatedAPI
from service.simulated.calls import Calls
from service.simulated.faults import Fault
from service.simulated.messages import Asked
from service.simulated.options import SimulatedOptions
from service.simulated.routes import Routes

HELD = "[[held]]"


class HeldCalls(SimulatedAPI):
    """A held call counts as running, and its client may go away meanwhile."""

    def __init__(self, options: SimulatedOptions | None = None) -> None:
        super().__init__(options)
        self._may_go = asyncio.Event()
        self._routes = _HoldingRoutes(self.options, self._calls, self._may_go)

    def let_go(self) -> None:
        """Answer the held calls, and hold none from now on."""
        self._may_go.set()


class _HoldingRoutes(Routes):
    def __init__(self, options: SimulatedOptions, calls: Calls, may_go: asyncio.Event) -> None:
        super().__init__(options, calls)
        self._may_go = may_go

    async def _answer(
        self, request: web.BaseRequest, asked: Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        if HELD in asked.prompt:
            await self._may_go.wait()
        return await super()._answer(request, asked, fault, request_id)
