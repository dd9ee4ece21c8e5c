"""Stores answers that are too large for a message outside the broker, as long as their results are kept."""

import asyncio
from contextlib import suppress
from typing import Final

from consumers.background import Background
from lanekeeper.bodies import BodiesUnavailable, BodyStore
from lanekeeper.contract.messages import BodyAddress
from lanekeeper.telemetry import logs, signals

MARGIN_S: Final = 3600.0
"""A large answer is kept for this many seconds longer than the stored result that has its address: a client may read
the answer some time after the result."""
PAUSE_S: Final = 0.5
"""The pause, in seconds, between two attempts to write an answer to the store."""
log = logs.logger()


class AnswerBodies:
    """Stores answers of more than `over_bytes`, which are too large for a message, in a body store (a folder or a
    bucket). `keep_s`: how long results are kept."""

    def __init__(self, store: BodyStore, *, over_bytes: int, keep_s: float) -> None:
        self._store = store
        self.over_bytes = over_bytes
        self._keep_s = keep_s
        self._background = Background()

    async def keep(self, body: bytes, *, within_s: float) -> BodyAddress | None:
        """Write an answer durably. If the store is unavailable, full or hangs, try again for up to `within_s`. Returns
        the answer's address; None if it could not be written."""
        cause = "no answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return await self._store.keep_answer(body, for_s=self._keep_s + MARGIN_S)
                    except BodiesUnavailable as error:
                        cause = error.cause
                    await asyncio.sleep(PAUSE_S)
        log.warning(signals.ANSWER_UNKEPT, error=cause, within_s=within_s)
        return None

    def forget(self, kept: BodyAddress) -> None:
        """Begin to remove a stored answer that is not used, because another answer to the request was stored first. If
        the process dies before it is removed, the answer expires."""
        self._background.begin(self._drop(kept), name="drop an answer")

    async def aclose(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)

    async def _drop(self, kept: BodyAddress) -> None:
        with suppress(BodiesUnavailable):
            await self._store.drop_answer(kept)
