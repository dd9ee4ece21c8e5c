"""Checks the IP addresses of hosts that requesters have named, before a worker calls them."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult

THREADS: Final = 128
"""No fewer than posts to webhooks that run at a time."""
_SPECIAL_V4: Final = tuple(
    IPv4Network(each)
    for each in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15",
        "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
"""IANA's registry of special addresses, multicast, and Azure's metadata service (168.63.129.16). The lists are our own
because those of `ipaddress` change between patch levels of Python."""
_UNICAST_V6: Final = IPv6Network("2000::/3")
"""The only IPv6 addresses that are given out to be public."""
_SPECIAL_V6: Final = tuple(IPv6Network(each) for each in ("2001::/23", "2001:db8::/32", "3fff::/20"))
"""What of it is not public. Teredo (2001::/32) is refused whatever IPv4 address it contains: nobody offers it now."""
_6TO4: Final = IPv6Network("2002::/16")
_ENDS_IN_V4: Final = tuple(IPv6Network(each) for each in ("::/96", "::ffff:0:0/96", "64:ff9b::/96"))


class PrivateAddress(OSError):
    """A host name resolves to an address that is not public."""


class Resolver(AbstractResolver):
    """Unless `private` addresses are allowed, raises PrivateAddress for a name if one of its addresses is not public.

    It has threads of its own: requesters choose the names, and a name server that does not answer holds a thread for
    long. In asyncio's few threads, other work of the worker would wait for them."""

    def __init__(self, *, private: bool = False) -> None:
        self._private = private
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        ask = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        if not self._private and any(is_private(str(address[0])) for *_, address in found):
            raise PrivateAddress(f"{host} has a private address")
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=of, proto=proto, flags=flags)
            for of, _, proto, _, address in found
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_private(host: str) -> bool:
    """True if `host` is an IP address that is not public, or an IPv6 address that contains one."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        # A name is checked when it is resolved. aiohttp dials what has a colon, or numbers such as `127.1`, unresolved.
        return ":" in host or host.replace(".", "").isdigit()
    if isinstance(address, IPv6Address):
        if (inner := _v4_in(address)) is None:
            return address not in _UNICAST_V6 or any(address in network for network in _SPECIAL_V6)
        address = inner
    return any(address in network for network in _SPECIAL_V4)


def _v4_in(address: IPv6Address) -> IPv4Address | None:
    if address in _6TO4:
        return IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    if any(address in network for network in _ENDS_IN_V4):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None
