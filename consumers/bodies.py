"""Fetches the body of a request from the address in its message: a store (a folder or bucket), or a URL.

The publisher of a request chooses the address that a worker calls, and could choose an internal one. So only allowed
addresses are used, redirects are not followed, and a host name that resolves to a private address is refused (unless
the operator allows private addresses). The connection uses the IP address that was checked, not the result of a second
DNS look-up.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from consumers.background import Background
from lanekeeper.bodies import PIECE_BYTES, BodiesUnavailable, BodyError, BodyStore, BodyTooLarge, checked
from lanekeeper.contract.messages import BodyAddress, Message, body_address_in

SIZE_WITHIN_S = 5.0
"""The time limit for asking a store how large a body is."""
_PORTS: Final = {"https": 443, "http": 80}
_NAT64: Final = ip_network("64:ff9b::/96")
_GONE: Final = range(400, 500)
_TEMPORARY: Final = frozenset({408, 425, 429})
"""The statuses among `_GONE` after which another try may succeed."""


class PrivateAddress(OSError):
    """A host name resolves to an address that is not public."""


class WebBodies:
    """Fetches bodies by HTTP from the `allowed` URLs and those below them. `private`: whether their hosts may have
    private IP addresses."""

    def __init__(self, allowed: Sequence[str], *, private: bool = False) -> None:
        self._allowed = [urlsplit(url.rstrip("/")) for url in allowed]
        self._private = private

    def holds(self, address: str) -> bool:
        """Whether this address is below one of the allowed URLs."""
        try:
            asked = urlsplit(address)
            return any(_is_below(asked, allowed) for allowed in self._allowed)
        except ValueError:
            return False

    async def fetch(self, kept: BodyAddress, *, most_bytes: int) -> bytes:
        """Raises BodyError, BodyTooLarge, BodiesUnavailable."""
        if not self._private and _is_private(urlsplit(kept.address).hostname or ""):
            raise BodyError("its host has a private address")
        connector = aiohttp.TCPConnector(resolver=None if self._private else _PublicResolver())
        try:
            async with (
                aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False) as session,
                session.get(kept.address, allow_redirects=False, headers={"Accept-Encoding": "identity"}) as response,
            ):
                _check(response, most_bytes)
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
        return await asyncio.to_thread(lambda: checked(bytes(body), kept, most_bytes=most_bytes))


class _PublicResolver(AbstractResolver):
    """Raises PrivateAddress for a name if one of its addresses is not public."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await aiohttp.ThreadedResolver().resolve(host, port, family)
        if any(_is_private(result["host"]) for result in found):
            raise PrivateAddress(f"{host} has a private address")
        return found

    async def close(self) -> None: ...


def _check(response: aiohttp.ClientResponse, most_bytes: int) -> None:
    if response.status in _GONE and response.status not in _TEMPORARY:
        raise BodyError(f"its host answered {response.status}")
    if 300 <= response.status < 400:
        raise BodyError(f"its host answered {response.status}, and redirects are not followed")
    if response.status != 200:
        raise BodiesUnavailable(f"its host answered {response.status}")
    if (response.content_length or 0) > most_bytes:
        raise BodyTooLarge(f"{response.content_length} bytes are there, allowed are {most_bytes}")


def _is_private(host: str) -> bool:
    """True if `host` is an IP address that is not public, or an IPv6 address that contains one."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name is checked when it is resolved
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    if address in _NAT64:
        mapped = IPv4Address(int(address) & 0xFFFFFFFF)
    return not address.is_global or address.is_multicast or (mapped is not None and not mapped.is_global)


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

    async def fetch(self, kept: BodyAddress) -> bytes:
        """Raises BodyError, BodyTooLarge, BodiesUnavailable."""
        for place in self._places:
            if place.holds(kept.address):
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
        """Begin to remove the body of a request that has ended from the store `own`, if the body is there. If the
        process dies before the body is removed, it is removed when it expires."""
        if self.own is not None and (kept := body_address_in(message.headers)) is not None:
            self._background.begin(self._drop(self.own, kept), name=f"drop the body of {message.message_id}")

    async def aclose(self, *, within_s: float) -> None:
        await self._background.finish(within_s=within_s)
        for place in self._places:
            if isinstance(place, BodyStore):
                place.close()

    async def _drop(self, store: BodyStore, kept: BodyAddress) -> None:
        with suppress(BodiesUnavailable):
            await store.drop(kept)
