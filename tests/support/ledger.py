"""Counts confirmed requests and their outcomes by request id, across any number of crashes.

ledger = Ledger(url)
async with ledger.writing():            publishes with confirms; replies go to a durable queue
    await ledger.ask("batch", "prompt", id="a-1")
…                                       the broker dies and is started again
async with ledger.reading():
    await until(lambda: not ledger.lost)
ledger.check()
"""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiormq
from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.commands import Basic

from tests.support.requester import Got

REPLY_QUEUE = "lane.reply.ledger"


class Ledger:
    """The confirmed requests, and the final replies to each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel: AbstractChannel | None = None
        self.confirmed: dict[str, str] = {}
        """Prompts by id."""
        self.finals: dict[str, list[Got]] = defaultdict(list)
        """In order of arrival. Delivery is at-least-once, so an id may have several."""

    @property
    def lost(self) -> set[str]:
        """Ids of confirmed requests without any outcome so far."""
        return self.confirmed.keys() - self.finals.keys()

    @property
    def repeated(self) -> int:
        """How many replies came in addition to the first of each request."""
        return sum(len(each) - 1 for each in self.finals.values())

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Open a connection for publishing, and declare the reply queue."""
        async with self._connection() as connection:
            self._channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            await self._channel.queue_declare(REPLY_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
            yield

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Open a connection that reads the replies."""
        async with self._connection() as connection:
            channel = await connection.channel()
            await channel.basic_consume(REPLY_QUEUE, self._keep, no_ack=True)
            yield

    async def ask(self, lane: str, prompt: str, *, id: str, headers: Mapping[str, Any] | None = None) -> None:
        """Publish one request; it is counted once the broker has confirmed it."""
        assert self._channel is not None
        await self._channel.basic_publish(
            json.dumps({"prompt": prompt}).encode(),
            exchange="lane.requests",
            routing_key=f"{lane}.tests.ledger",
            properties=Basic.Properties(
                message_id=id,
                correlation_id=id,
                reply_to=REPLY_QUEUE,
                delivery_mode=2,
                priority=4,
                headers=dict(headers or {}),
            ),
            mandatory=True,
            timeout=60,
        )
        self.confirmed[id] = prompt

    def check(self, *, errors: Mapping[str, str] | None = None) -> None:
        """Check that each request has exactly one kind of outcome, and that no answer belongs to another request.

        `errors`: the codes of the requests that end in an error; all others must be `ok`.
        """
        assert not self.lost, f"{len(self.lost)} lost: {sorted(self.lost)[:10]}"
        assert not self.finals.keys() - self.confirmed.keys(), "an outcome for a request that was never made"
        for id, finals in self.finals.items():
            kinds = {final.code if final.status == "error" else "ok" for final in finals}
            assert kinds == {(errors or {}).get(id, "ok")}, (id, finals)
            for final in finals:
                assert final.properties.correlation_id == id
                assert final.status == "error" or self.confirmed[id] in final.text

    async def _keep(self, delivered: DeliveredMessage) -> None:
        got = Got.of(delivered)
        if got.status is not None:
            self.finals[str(got.headers["x-lane-request-id"])].append(got)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[aiormq.abc.AbstractConnection]:
        connection = await aiormq.connect(f"{self._url}?heartbeat=30&name=ledger")
        try:
            yield connection
        finally:
            with suppress(Exception):  # the broker may be gone
                await connection.close(timeout=5)
