"""Makes one post over HTTP/1.1 to an address that a requester has named: nothing that the other side sends costs more
than a few kilobytes and milliseconds.

A common client would follow the protocol further than is good here: it reads any number of informational answers (1xx)
before the final one, and keeps the process busy with them.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import h11
from yarl import URL

from consumers.addresses import PrivateAddress, Resolver

READ_BYTES: Final = 4096
HEAD_BYTES: Final = 64 * 1024
"""The final answer's status and headers. Its body is not read."""
INFORMATIONAL: Final = 3
"""So many informational answers may come before the final one."""


class NotReached(OSError):
    """No connection."""


class BadAnswer(ValueError):
    """What came is no answer of HTTP, or is too much of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostAnswer:
    """The head of the final answer."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case."""


@dataclass(slots=True, eq=False)
class Poster:
    """Each post has a connection of its own: an endpoint may close one that waits, and the next post would fail."""

    resolver: Resolver
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    async def post(self, url: URL, *, headers: Mapping[str, str], body: bytes, within_s: float) -> PostAnswer:
        """Raises TimeoutError, PrivateAddress, NotReached, BadAnswer, ssl.SSLError, OSError.

        A name server that does not answer holds a thread. So no time limit ends the wait for it: as long as the thread
        is held, so is the place of its post, of which each tenant has a share."""
        end_s = asyncio.get_running_loop().time() + within_s
        addresses = await self._addresses(url)
        async with asyncio.timeout_at(end_s):
            reader, writer = await self._connected(url, addresses, each_s=within_s / len(addresses))
            try:
                connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
                for event in _request(url, headers, body):
                    writer.write(connection.send(event) or b"")
                return await _answer(connection, reader)
            except h11.ProtocolError as error:
                raise BadAnswer("no answer of HTTP") from error
            finally:
                writer.transport.abort()

    async def _addresses(self, url: URL) -> Sequence[str]:
        try:
            return [each["host"] for each in await self.resolver.resolve(_host(url), url.port or 443)]
        except UnicodeError as error:  # a label of over 63 characters
            raise NotReached("no name of a host") from error
        except PrivateAddress:
            raise
        except OSError as error:
            raise NotReached("its name is not found") from error

    async def _connected(
        self, url: URL, addresses: Sequence[str], *, each_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls, name = (self.tls, _host(url)) if url.scheme == "https" else (None, None)
        failed: OSError = NotReached("no address")
        for address in addresses:
            try:
                async with asyncio.timeout(each_s):
                    return await asyncio.open_connection(address, url.port or 443, ssl=tls, server_hostname=name)
            except ssl.SSLError:
                raise
            except OSError as error:  # TimeoutError is one
                failed = error
        if isinstance(failed, TimeoutError):
            raise failed
        raise NotReached(type(failed).__name__) from failed


def _host(url: URL) -> str:
    return (url.raw_host or "").rstrip(".")


def _request(url: URL, headers: Mapping[str, str], body: bytes) -> Sequence[h11.Event]:
    first = {"host": url.host_port_subcomponent or "", "connection": "close", "content-length": str(len(body))}
    return (
        h11.Request(method="POST", target=url.raw_path_qs, headers=list({**first, **headers}.items())),
        h11.Data(data=body),
        h11.EndOfMessage(),
    )


async def _answer(connection: h11.Connection, reader: asyncio.StreamReader) -> PostAnswer:
    informational = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.InformationalResponse) and informational < INFORMATIONAL:
            informational += 1
        elif isinstance(event, h11.Response):
            headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            return PostAnswer(status=event.status_code, headers=headers)
        else:
            raise BadAnswer("no final answer")
