"""Puts request bodies that are too large for a message into a store, and fetches large answers from it."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO

from lanekeeper.bodies import MIB, OVER_BYTES, PIECE_BYTES, BodiesUnavailable, BodyStore
from lanekeeper.replies import Final
from lanekeeper.telemetry import logs, signals
from lanekeeper.transport import OutgoingRequest

DROP_WITHIN_S = 10.0
"""The time limit, in seconds, for removing the stored body of a request that was not published."""
FETCH_WITHIN_S = 60.0
"""The time limit, in seconds, for fetching a large answer from the store of bodies."""
LARGEST_ANSWER_BYTES = 512 * MIB
"""The largest answer, in bytes, that a client fetches from the store. It is also the highest value of the setting
`LANEKEEPER_RESULTS__ANSWER_BYTES`."""
log = logs.logger()


class LargeBodies:
    """Puts large bodies of a client's requests into a store, and fetches large answers from it.

    `store`: the store, or its URL. If it is None, large bodies are sent in the message, and the worker refuses them.
    `fetches`: whether large answers are fetched; if not, `Final.kept` has the answer's address.
    """

    def __init__(self, store: BodyStore | str | None, *, fetches: bool) -> None:
        self._store = BodyStore(store) if isinstance(store, str) else store
        self._fetches = fetches

    async def store_body(self, outgoing: OutgoingRequest) -> None:
        """Move the body of a request into the store if it is large; the message then has the body's address and digest.
        Raises BodiesUnavailable."""
        message = outgoing.message
        if outgoing.content is None and len(message.body) <= OVER_BYTES:
            return
        if self._store is None:
            if outgoing.content is not None:
                message.body, outgoing.content = await asyncio.to_thread(outgoing.content.read), None
            return
        try:
            kept = await self._store.keep([message.body] if outgoing.content is None else _pieces(outgoing.content))
        except BodiesUnavailable as error:
            log.warning(signals.BODY_UNAVAILABLE, error=error.cause)
            raise
        message.body, outgoing.content = b"", None
        message.headers = {**message.headers, **kept.headers}
        outgoing.kept = kept

    async def remove_body(self, outgoing: OutgoingRequest) -> None:
        """Remove the body of a request from the store, because the request was not published."""
        if outgoing.kept is not None and self._store is not None:
            with suppress(BodiesUnavailable, TimeoutError):
                async with asyncio.timeout(DROP_WITHIN_S):
                    await self._store.drop(outgoing.kept)

    async def whole(self, final: Final, *, end: float | None) -> Final:
        """Return the final reply with the answer's body. If the reply has only the address of the body, because it was
        too large for a message, the body is fetched from the store.

        Raises BodyError, BodiesUnavailable, and TimeoutError at `end` (by the event loop's clock).
        """
        if (kept := final.kept) is None or not self._fetches:
            return final
        if self._store is None or not self._store.holds(kept.address):
            raise BodiesUnavailable(
                f"the answer is too large for a message; it lies at {kept.address}: give the client `bodies`, "
                "its store (commands: LANEKEEPER_BODIES__URL)"
            )
        try:
            async with asyncio.timeout_at(end):
                try:
                    async with asyncio.timeout(FETCH_WITHIN_S):
                        body = await self._store.fetch(kept, most_bytes=LARGEST_ANSWER_BYTES)
                except TimeoutError:
                    raise BodiesUnavailable(f"the answer could not be fetched within {FETCH_WITHIN_S:g} s") from None
        except BodiesUnavailable as error:
            log.warning(signals.BODY_UNAVAILABLE, error=error.cause)
            raise
        return replace(final, body=body)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _pieces(content: BinaryIO) -> Iterable[bytes]:
    return iter(lambda: content.read(PIECE_BYTES), b"")
