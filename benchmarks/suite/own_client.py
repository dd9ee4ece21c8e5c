"""A requester that uses `lanekeeper.Client`."""

import os
import time
from contextlib import aclosing
from typing import Self

from lanekeeper import Client
from lanekeeper.contract.names import Names
from suite.plain import PRIORITIES


class Requester:
    """Sends requests with `lanekeeper.Client`."""

    async def __aenter__(self) -> Self:
        names = Names(os.environ["BENCH_NAMESPACE"])
        self._client = await Client(os.environ["BENCH_AMQP_URL"], names=names).__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def publish(self, body: bytes, *, number: int, lane: str, tenant: int) -> None:
        await self._client.publish(body, key=f"{lane}.bench.load", priority=PRIORITIES[lane])

    async def ask(self, body: bytes, *, number: int, lane: str, tenant: int) -> None:
        await self._client.request(body, key=f"{lane}.bench.load", priority=PRIORITIES[lane])

    async def first_part(self, body: bytes, *, number: int, lane: str, tenant: int) -> float:
        first_s = 0.0
        async with aclosing(self._client.stream(body, key=f"{lane}.bench.load")) as replies:
            async for _ in replies:  # read to the end: leaving the stream early would cancel the request
                first_s = first_s or time.monotonic()
        return first_s
