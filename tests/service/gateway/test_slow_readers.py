"""Clients that stop reading a stream: each holds a bounded part of it for a bounded time, and the others get theirs."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from typing import Unpack

import aiohttp
import pytest
from pydantic import SecretStr
from typing_extensions import override

from lanekeeper import Client, Final, Part
from lanekeeper.client import Body
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import STATUS
from lanekeeper.options import Options
from lanekeeper.replies import final_of
from service.config.gateway_section import GatewaySettings
from service.config.settings import Settings
from service.gateway import writing
from service.gateway.app import Gateway
from service.gateway.server import Server
from tests.support.gate import opened
from tests.support.waiting import until

STREAMS, STALLED = 500, 50
PIECE = "x" * 65_536
MOST_BYTES = 32 * 2**20
"""What the kernel keeps of a stream that nobody reads, and far more: 250 MB would come if nothing stopped it."""
SHORT_S = 3.0


class Told(Client):
    """Every request is answered by two pieces, or without end; nothing is published."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.broker_url)
        self.open = 0
        """Answers under way."""
        self.most_bytes = 0
        """The most that one endless answer has given."""

    @override
    async def stream(
        self,
        body: Body,
        *,
        key: str,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Part | Final, None]:
        is_endless = b"endless" in bytes(body if isinstance(body, bytes) else b"")
        delta = {"type": "text_delta", "text": PIECE}
        piece = json.dumps({"type": "content_block_delta", "index": 0, "delta": delta}, separators=(",", ":")).encode()
        self.open += 1
        try:
            seq = 0
            while is_endless or seq < 2:
                yield Part(kind="event", seq=seq, body=piece)
                seq += 1
                if is_endless:
                    self.most_bytes = max(self.most_bytes, seq * len(piece))
            yield Part(kind="event", seq=seq, body=b'{"type":"message_stop"}')
            yield final_of(Message(body=b"{}", routing_key="", headers={STATUS: "ok"}))
        finally:
            self.open -= 1


def said(prompt: str) -> bytes:
    return json.dumps({"max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": prompt}]}).encode()


async def stalled(port: int) -> socket.socket:
    """A client that asks for an endless stream and reads nothing."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(made, ("127.0.0.1", port))
    body = said("endless")
    head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    await loop.sock_sendall(made, head + body)
    return made


@pytest.mark.slow
async def test_five_hundred_streams_of_which_fifty_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"), gateway=GatewaySettings(port=0))
    monkeypatch.setattr(writing, "WRITE_WITHIN_S", SHORT_S)
    told = Told(settings)
    routes = Gateway(settings, told, opened(settings))
    async with (
        Server(routes.reasons, host="127.0.0.1", port=0, routes=routes) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def read() -> int:
            async with session.post(f"{server.url}/v1/messages", data=said("short")) as got:
                return len(await got.read())

        sockets = [await stalled(server.port) for _ in range(STALLED)]
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(read()) for _ in range(STREAMS - STALLED)]
        await until(lambda: (told.open, routes.calls) == (0, 0))

        assert all(reader.result() > 2 * len(PIECE) for reader in readers)
        assert 0 < told.most_bytes < MOST_BYTES
        for each in sockets:
            each.close()
