"""Fetches the body of a request from the address that the request's message gives, if that address is allowed, and
checks the body."""

from collections.abc import Sequence
from contextlib import suppress

from consumers.background import Background
from consumers.bodies.web import WebBodies
from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyStore
from lanekeeper.contract.messages import BodyAddress, Message, body_address_in


class Fetching:
    """Fetches bodies of requests that are not in the message, from stores (folders or buckets) and by HTTP. `own`: a
    store from which a body is also removed when its request has ended; None: there is no such store. `others`: stores
    and URLs from which bodies are only read. `most_bytes`: the maximum size of a body; a larger one is refused."""

    def __init__(self, own: BodyStore | None, *, others: Sequence[BodyStore | WebBodies] = (), most_bytes: int) -> None:
        self._own = own
        self._places = (*([] if own is None else [own]), *others)
        self._most_bytes = most_bytes
        self._background = Background()

    async def fetch(self, kept: BodyAddress) -> bytes:
        """Return the body that is stored at the address in `kept`, if that address is allowed. Raises BodyError,
        BodyTooLarge, BodiesUnavailable."""
        for place in self._places:
            if place.holds(kept.address):
                return await place.fetch(kept, most_bytes=self._most_bytes)
        raise BodyError("this address is not allowed (LANEKEEPER_BODIES__ALLOW)")

    def forget(self, message: Message) -> None:
        """Begin to remove the body of a request that has ended from the store `own`, if the body is there. If the
        process dies before the body is removed, it is removed when it expires."""
        if self._own is not None and (kept := body_address_in(message.headers)) is not None:
            self._background.begin(self._drop(self._own, kept), name=f"drop the body of {message.message_id}")

    async def aclose(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)
        for place in self._places:
            if isinstance(place, BodyStore):
                place.close()

    async def _drop(self, store: BodyStore, kept: BodyAddress) -> None:
        with suppress(BodiesUnavailable):
            await store.drop(kept)
