"""Checks the IP addresses of hosts that requesters have named, before a worker calls them."""

import socket
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

_NAT64: Final = ip_network("64:ff9b::/96")
_COMPATIBLE: Final = ip_network("::/96")
"""IPv6 addresses that contain an IPv4 address, in a form that is no longer used."""
_UNLISTED: Final = tuple(map(ip_network, ("64:ff9b:1::/48", "::ffff:0:0:0/96", "fec0::/10", "168.63.129.16/32")))
"""What Python takes for public: local translations to IPv4, site-local addresses, Azure's metadata service."""


class PrivateAddress(OSError):
    """A host name resolves to an address that is not public."""


class PublicResolver(AbstractResolver):
    """Raises PrivateAddress for a name if one of its addresses is not public."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await aiohttp.ThreadedResolver().resolve(host, port, family)
        if any(is_private(result["host"]) for result in found):
            raise PrivateAddress(f"{host} has a private address")
        return found

    async def close(self) -> None: ...


def is_private(host: str) -> bool:
    """True if `host` is an IP address that is not public, or an IPv6 address that contains one."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        # A name is checked when it is resolved. Numbers such as `127.1` are no name to aiohttp, which would dial them.
        return host.replace(".", "").isdigit()
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    if address in _NAT64 or address in _COMPATIBLE:
        mapped = IPv4Address(int(address) & 0xFFFFFFFF)
    is_inside = any(address in network for network in _UNLISTED)
    return (
        is_inside or not address.is_global or address.is_multicast or (mapped is not None and is_private(str(mapped)))
    )
