"""A simulated API that answers some prompts only when the test says so.

async with serving(url) as worker:
    …                               publish the prompt "slow [[held]]", wait until `worker.api.running == 1`
    worker.api.release("slow")      its answer comes; without words all that are held, and later ones
"""

import asyncio

from aiohttp import web
from typing_extensions import override

from service.simulated import messages
from service.simulated.app import SimulatedAPI, SimulatedOptions
from service.simulated.faults import Fault

HELD = "[[held]]"


class Released:
    """The words of prompts that are held no more."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._added = asyncio.Event()

    def add(self, words: str) -> None:
        self._words.append(words)
        self._added.set()
        self._added = asyncio.Event()

    async def wait_for(self, prompt: str) -> None:
        while not any(words in prompt for words in self._words):
            await self._added.wait()


class HeldCalls(SimulatedAPI):
    """It holds calls whose prompt contains `HELD` until they are released."""

    def __init__(self, options: SimulatedOptions | None = None) -> None:
        super().__init__(options)
        self._released = Released()

    def release(self, words: str = "") -> None:
        """Answer all calls whose prompt contains `words`, present and future."""
        self._released.add(words)

    @override
    async def _answer(
        self, request: web.BaseRequest, asked: messages.Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        if HELD in asked.prompt:
            await self._released.wait_for(asked.prompt)
        return await super()._answer(request, asked, fault, request_id)
