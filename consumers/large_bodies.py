"""Fetches the body of a request from the address in its message: a store (a folder or bucket), or a URL; and stores
answers that are too large for a message.

The publisher of a request chooses the address that a worker calls, and could choose an internal one. So only allowed
addresses are used, redirects are not followed, and a host name that resolves to a private address is refused (unless
the operator allows private addresses). The connection uses the IP address that was checked, not the result of a second
DNS look-up.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import aiohttp
import structlog

from consumers.addresses import PrivateAddress, Resolver, is_private
from consumers.background import Background
from consumers.outcomes import Answered, DeadLettered, Outcome
from lanekeeper.amqp.publisher import SMALL_BYTES, Publisher
from lanekeeper.bodies import (
    KEEP_S,
    OVER_BYTES,
    PIECE_BYTES,
    BodiesUnavailable,
    BodyError,
    BodyStore,
    BodyTooLarge,
    verified_body,
)
from lanekeeper.contract.messages import BodyAddress, Message, body_address_in
from lanekeeper.contract.problems import answer_too_large
from lanekeeper.telemetry import signals
from topology.codec.bounds import ANSWER_BYTES

SIZE_WITHIN_S = 5.0
_PORTS: Final = {"https": 443, "http": 80}
_TEMPORARY: Final = frozenset({408, 425, 429})
SOON_S: Final = 5.0
"""For how many seconds a worker at first tries to store a large answer outside the broker. If that fails, and the
broker accepts a message of this size, the answer is sent in a message."""
KEEP_WITHIN_S: Final = 60.0
"""If an answer could not be stored outside the broker within `SOON_S`, and the broker does not accept a message of its
size, a worker tries again for this many seconds to store it, because the call to the provider was paid for."""
MARGIN_S: Final = 3600.0
"""A large answer that is stored outside the broker is kept for this many seconds longer than the result that contains
its address."""
PAUSE_S: Final = 0.5
Room = Callable[[int], Awaitable[None]]
"""Awaited with the size of a body before it is fetched (`Delivery.room`)."""
log = structlog.get_logger()


class WebBodies:
    """Fetches bodies by HTTP from the `allowed` URLs and those below them. `private`: whether their hosts may have
    private IP addresses."""

    def __init__(self, allowed: Sequence[str], *, private: bool = False) -> None:
        self._allowed = [urlsplit(url.rstrip("/")) for url in allowed]
        self._private = private

    def holds(self, address: str) -> bool:
        try:
            asked = urlsplit(address)
            return any(_is_below(asked, allowed) for allowed in self._allowed)
        except ValueError:
            return False

    async def fetch(self, kept: BodyAddress, *, most_bytes: int, room: Room) -> bytes:
        if not self._private and is_private(urlsplit(kept.address).hostname or ""):
            raise BodyError("its host has a private address")
        connector = aiohttp.TCPConnector(resolver=Resolver(private=self._private))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False) as session,
                session.get(kept.address, allow_redirects=False, headers={"Accept-Encoding": "identity"}) as response,
            ):
                _check(response, most_bytes)
                await room(most_bytes if response.content_length is None else response.content_length)
                body = bytearray()
                async for piece in response.content.iter_chunked(PIECE_BYTES):
                    body += piece
                    if len(body) > most_bytes:
                        raise BodyTooLarge(f"more than {most_bytes} bytes are there")
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, PrivateAddress):
                raise BodyError("its host has a private address") from None
            raise BodiesUnavailable(f"its host: {error}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The error's text is left out: it may contain the URL, and the URL a signature.
            raise BodiesUnavailable(f"its host: {type(error).__name__}") from None
        return await asyncio.to_thread(lambda: verified_body(bytes(body), kept, most_bytes=most_bytes))


def _check(response: aiohttp.ClientResponse, most_bytes: int) -> None:
    if 300 <= response.status < 500 and response.status not in _TEMPORARY:
        hint = "; redirects are not followed" if response.status < 400 else ""
        raise BodyError(f"its host answered {response.status}{hint}")
    if response.status != 200:
        raise BodiesUnavailable(f"its host answered {response.status}")
    if response.content_length is not None and response.content_length > most_bytes:
        raise BodyTooLarge(f"{response.content_length} bytes are there, allowed are {most_bytes}")


def _is_below(asked: SplitResult, allowed: SplitResult) -> bool:
    where = (asked.scheme, asked.hostname, asked.port or _PORTS.get(asked.scheme))
    if where != (allowed.scheme, allowed.hostname, allowed.port or _PORTS.get(allowed.scheme)):
        return False
    if "@" in asked.netloc or asked.fragment or "\\" in asked.path:
        return False
    path = asked.path.lower()
    if "%2f" in path or "%5c" in path:  # some hosts decode these to `/` and `\`
        return False
    steps = [step.split(";")[0] for step in path.replace("%2e", ".").split("/")]
    return ".." not in steps and "." not in steps and f"{asked.path}/".startswith(f"{allowed.path}/")


class Fetching:
    """Fetches bodies of requests that are not in the message. `own`: a store from which a body is also removed when its
    request has ended. `others`: stores and URLs from which bodies are only read."""

    def __init__(self, own: BodyStore | None, *, others: Sequence[BodyStore | WebBodies] = (), most_bytes: int) -> None:
        self.own = own
        self._places = (*([] if own is None else [own]), *others)
        self._most_bytes = most_bytes
        self._background = Background()

    async def fetch(self, kept: BodyAddress, *, room: Room) -> bytes:
        for place in self._places:
            if place.holds(kept.address):
                if isinstance(place, WebBodies):
                    return await place.fetch(kept, most_bytes=self._most_bytes, room=room)
                await room(min(await place.size(kept), self._most_bytes))
                return await place.fetch(kept, most_bytes=self._most_bytes)
        raise BodyError("this address is not allowed (LANEKEEPER_BODIES__ALLOW)")

    async def size_of(self, message: Message) -> int:
        """How many bytes the body of this request takes in the message or in a store. A body at a URL takes none of our
        space. If the store does not say how large a body is, it counts as the largest."""
        if (kept := body_address_in(message.headers)) is None:
            return len(message.body)
        for place in self._places:
            if isinstance(place, BodyStore) and place.holds(kept.address):
                try:
                    async with asyncio.timeout(SIZE_WITHIN_S):
                        return await place.size(kept)
                except BodyError:  # fetching it fails as well
                    return 0
                except (BodiesUnavailable, TimeoutError):
                    return self._most_bytes
        return 0

    def forget(self, message: Message) -> None:
        """Begin to remove the body of a request that has ended from the store `own`, if the body is there."""
        if self.own is not None and (kept := body_address_in(message.headers)) is not None:
            self._background.begin(_ignoring(self.own.drop(kept)), name=f"drop the body of {message.message_id}")

    async def aclose(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)
        for place in self._places:
            if isinstance(place, BodyStore):
                place.close()


async def _ignoring(dropping: Coroutine[Any, Any, None]) -> None:
    with suppress(BodiesUnavailable):
        await dropping


@dataclass(slots=True, eq=False)
class LargeAnswers:
    """Brings outcomes into a form that can be sent."""

    publisher: Publisher
    _: KW_ONLY
    answer_bytes: int = ANSWER_BYTES
    bodies: BodyStore | None = None
    over_bytes: int = OVER_BYTES
    keep_s: float = KEEP_S
    _background: Background = field(default_factory=Background, init=False)

    def is_slow(self, outcome: Outcome) -> bool:
        at_once = SMALL_BYTES if self.bodies is None else self.over_bytes
        return isinstance(outcome, Answered) and at_once < len(outcome.body) <= self.answer_bytes

    async def sendable(self, outcome: Outcome, *, tenant: str = "") -> Outcome:
        if not isinstance(outcome, Answered):
            return outcome
        if (size := len(outcome.body)) > self.answer_bytes:
            return DeadLettered(answer_too_large(size, self.answer_bytes, setting="LANEKEEPER_RESULTS__ANSWER_BYTES"))
        bodies = self.bodies
        if bodies is not None and size <= self.over_bytes:
            return outcome
        if bodies is None:
            limit = await self.publisher.exceeded_limit(size)
            return (
                outcome
                if limit is None
                else DeadLettered(answer_too_large(size, limit, setting="LANEKEEPER_BODIES__URL"))
            )
        kept = await self._keep(bodies, outcome.body, tenant=tenant, within_s=SOON_S)
        if kept is None:
            # the broker is asked only now, because it is asked by sending it a message of that size
            if (limit := await self.publisher.exceeded_limit(size)) is None:
                return outcome
            if (kept := await self._keep(bodies, outcome.body, tenant=tenant, within_s=KEEP_WITHIN_S)) is None:
                return DeadLettered(answer_too_large(size, limit, is_away=True))
        return replace(outcome, body=place_of(kept, size), kept=kept)

    def forget(self, outcome: Outcome) -> None:
        if self.bodies is not None and isinstance(outcome, Answered) and outcome.kept is not None:
            self._background.begin(_ignoring(self.bodies.drop_answer(outcome.kept)), name="drop an answer")

    async def aclose(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)

    async def _keep(self, bodies: BodyStore, body: bytes, *, tenant: str, within_s: float) -> BodyAddress | None:
        cause = "no answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return await bodies.keep_answer(body, for_s=self.keep_s + MARGIN_S, tenant=tenant)
                    except BodiesUnavailable as error:
                        cause = error.cause
                    await asyncio.sleep(PAUSE_S)
        log.warning(signals.ANSWER_UNKEPT, error=cause, within_s=within_s)
        return None


def place_of(kept: BodyAddress, size: int) -> bytes:
    """The body of the reply if the answer, of `size` bytes, is stored outside the broker: a JSON object with the
    answer's address (`kept`), as docs/contract.md describes it."""
    place = {"type": "urn:lanekeeper:body", "address": kept.address, "sha256": kept.sha256, "bytes": size}
    return json.dumps(place).encode()
