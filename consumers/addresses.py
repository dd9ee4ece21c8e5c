"""Checks the IP addresses of hosts that requesters have named, before a worker calls them."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult

THREADS: Final = 64
_NAT64: Final = ip_network("64:ff9b::/96")
_COMPATIBLE: Final = ip_network("::/96")
"""IPv6 addresses that contain an IPv4 address, in a form that is no longer used."""
_UNLISTED: Final = tuple(map(ip_network, ("64:ff9b:1::/48", "::ffff:0:0:0/96", "fec0::/10", "168.63.129.16/32")))
"""What Python takes for public: local translations to IPv4, site-local addresses, Azure's metadata service."""


class PrivateAddress(OSError):
    """A host name resolves to an address that is not public."""


class PublicResolver(AbstractResolver):
    """Raises PrivateAddress for a name if one of its addresses is not public.

    It has threads of its own: requesters choose the names, and a name server that does not answer holds a thread for
    long. In asyncio's few threads, other work of the worker would wait for them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        ask = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        if any(is_private(str(address[0])) for *_, address in found):
            raise PrivateAddress(f"{host} has a private address")
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=of, proto=proto, flags=flags)
            for of, _, proto, _, address in found
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False)


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
