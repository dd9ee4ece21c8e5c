"""What a client does with a body that is too large for a message: it is kept beside the broker."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import BinaryIO

from lanekeeper.bodies import OVER_BYTES, PIECE_BYTES, BodiesUnavailable, BodyStore
from lanekeeper.transport import Asked

DROP_WITHIN_S = 10.0


class LargeBodies:
    """`store`: where they are kept, or its URL; None: nowhere, and the worker refuses what is too large."""

    def __init__(self, store: BodyStore | str | None, *, over_bytes: int = OVER_BYTES) -> None:
        self._store = BodyStore(store) if isinstance(store, str) else store
        self._over_bytes = over_bytes

    async def take_out(self, asked: Asked) -> None:
        """Keep the body of a request, if it is large, and leave its address in the message. Raises
        BodiesUnavailable."""
        message = asked.message
        if asked.content is None and len(message.body) <= self._over_bytes:
            return
        if self._store is None:
            if asked.content is not None:
                message.body, asked.content = await asyncio.to_thread(asked.content.read), None
            return
        kept = await self._store.keep([message.body] if asked.content is None else _pieces(asked.content))
        message.body, asked.content = b"", None
        message.headers = {**message.headers, **kept.headers}
        asked.kept = kept

    async def put_back(self, asked: Asked) -> None:
        """Remove the body of a request that was not published."""
        if asked.kept is not None and self._store is not None:
            with suppress(BodiesUnavailable, TimeoutError):
                async with asyncio.timeout(DROP_WITHIN_S):
                    await self._store.drop(asked.kept)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _pieces(content: BinaryIO) -> Iterable[bytes]:
    return iter(lambda: content.read(PIECE_BYTES), b"")
