"""How many requests a lane's queue holds, asked of the broker at most once a second for each lane."""

import asyncio

from lanekeeper import Client

AGE_S = 1.0
WITHIN_S = 0.5


class Positions:
    """An upper bound of a request's place in its lane: behind it may be some of those counted."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, tuple[float, int | None]] = {}

    async def of(self, lane: str) -> int | None:
        """At most this many are before a request that waits in the lane; None: unknown."""
        now_s = asyncio.get_running_loop().time()
        at_s, position = self._known.get(lane, (-AGE_S, None))
        if now_s - at_s >= AGE_S:
            self._known[lane] = now_s, position  # others do not ask meanwhile
            position = await self._asked(lane)
            self._known[lane] = now_s, position
        return position

    async def _asked(self, lane: str) -> int | None:
        try:
            async with asyncio.timeout(WITHIN_S):
                depth = await self._client.depth(lane)
        except TimeoutError:
            return None
        return None if depth is None else max(0, depth.ready - 1)
