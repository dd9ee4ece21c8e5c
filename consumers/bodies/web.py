"""Fetches bodies of requests by HTTP, only from URLs that the operator allows.

The publisher of a request chooses the address that a worker calls, and could choose an internal one. So only allowed
URLs are called, redirects are not followed, and a host name that resolves to a private address is refused (unless the
operator allows private addresses). The connection uses the IP address that was checked, not the result of a second DNS
look-up.
"""

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from lanekeeper.bodies import PIECE_BYTES, BodiesUnavailable, BodyError, BodyTooLarge, checked
from lanekeeper.contract.messages import BodyAddress

_PORTS: Final = {"https": 443, "http": 80}
_NAT64: Final = ip_network("64:ff9b::/96")
_GONE: Final = range(400, 500)
"""If a server answers with one of these HTTP statuses, it will not send the body later either, except after those in
`_TEMPORARY`."""
_TEMPORARY: Final = frozenset({408, 425, 429})
"""The HTTP statuses among 400 to 499 after which another try to fetch the body may succeed."""


class PrivateAddress(OSError):
    """The host name of a body's URL resolves to an address that is not public."""


class WebBodies:
    """Fetches bodies of requests by HTTP, from URLs that the operator allows. `allowed`: the allowed URLs, each of
    which also allows all URLs whose paths are below its path. `private`: whether the URLs' hosts may have private IP
    addresses."""

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
        """Fetch a request's body from the address in `kept` by HTTP, and check it. Raises BodyError, BodyTooLarge,
        BodiesUnavailable."""
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
    """Resolves host names. Raises PrivateAddress for a name if one of its addresses is not public."""

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
    """True if `host` is an IP address that is not public, or an IPv6 address that contains an IPv4 address that is not
    public. False for a host name, which is checked when it is resolved."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name is checked when it is resolved
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    if address in _NAT64:
        mapped = IPv4Address(int(address) & 0xFFFFFFFF)
    return not address.is_global or address.is_multicast or (mapped is not None and not mapped.is_global)


def _is_below(asked: SplitResult, allowed: SplitResult) -> bool:
    """Whether the URL `asked` has the scheme, host and port of the URL `allowed`, and its path is that of `allowed` or
    below it."""
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
