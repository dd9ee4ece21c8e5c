"""Fetches bodies by HTTP, only from hosts that are allowed.

Whoever publishes a request chooses the address that a worker calls. So only listed URLs are called, redirects are not
followed, and a name that resolves to a private address is refused; the address that was checked is the one dialled.
"""

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from lanekeeper.bodies import PIECE_BYTES, BodiesUnavailable, BodyError, BodyTooLarge, checked
from lanekeeper.contract.messages import Kept

_PORTS: Final = {"https": 443, "http": 80}
_GONE: Final = range(400, 500)
_PASSING: Final = frozenset({408, 425, 429})


class PrivateAddress(OSError):
    """A host has an address that is not public."""


class WebBodies:
    """`allowed`: URLs; each allows what is below it. `private`: hosts may have private addresses."""

    def __init__(self, allowed: Sequence[str], *, private: bool = False) -> None:
        self._allowed = [urlsplit(each.rstrip("/")) for each in allowed]
        self._private = private

    def holds(self, address: str) -> bool:
        """Whether this address may be called."""
        try:
            asked = urlsplit(address)
            return any(_is_below(asked, each) for each in self._allowed)
        except ValueError:
            return False

    async def fetch(self, kept: Kept, *, most_bytes: int) -> bytes:
        """Raises BodyError, BodyTooLarge, BodiesUnavailable."""
        if not self._private and _is_private(urlsplit(kept.address).hostname or ""):
            raise BodyError("its host has a private address")
        connector = aiohttp.TCPConnector(resolver=None if self._private else _Public())
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
            raise BodiesUnavailable(f"its host: {type(error).__name__}: {error}") from error
        return await asyncio.to_thread(lambda: checked(bytes(body), kept, most_bytes=most_bytes))


class _Public(AbstractResolver):
    """Resolves names, and refuses those with a private address."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await aiohttp.ThreadedResolver().resolve(host, port, family)
        if any(_is_private(each["host"]) for each in found):
            raise PrivateAddress(f"{host} has a private address")
        return found

    async def close(self) -> None: ...


def _check(response: aiohttp.ClientResponse, most_bytes: int) -> None:
    if response.status in _GONE and response.status not in _PASSING:
        raise BodyError(f"its host answered {response.status}")
    if 300 <= response.status < 400:
        raise BodyError(f"its host answered {response.status}, and redirects are not followed")
    if response.status != 200:
        raise BodiesUnavailable(f"its host answered {response.status}")
    if (response.content_length or 0) > most_bytes:
        raise BodyTooLarge(f"{response.content_length} bytes are there, allowed are {most_bytes}")


def _is_private(host: str) -> bool:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name: it is checked when it is resolved
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    return not address.is_global or address.is_multicast or (mapped is not None and not mapped.is_global)


def _is_below(asked: SplitResult, allowed: SplitResult) -> bool:
    where = (asked.scheme, asked.hostname, asked.port or _PORTS.get(asked.scheme))
    if where != (allowed.scheme, allowed.hostname, allowed.port or _PORTS.get(allowed.scheme)):
        return False
    if "@" in asked.netloc or asked.fragment or "\\" in asked.path:
        return False
    steps = asked.path.replace("%2e", ".").replace("%2E", ".").split("/")
    return ".." not in steps and "." not in steps and f"{asked.path}/".startswith(f"{allowed.path}/")
