"""The environment of the runs. Broker and provider run all the time; workers and requesters are started for each
run."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import aio_pika
import ground
from redis.asyncio import Redis

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from lanekeeper.contract.problems import BrokerUnreachable
from suite.call_log import CallLog
from suite.contestants import REPLIES, Contestant, Place
from suite.processes import process, provider
from suite.requester import Sent, Spec
from topology.broker.admin.apply import apply

LOOK_EVERY_S = 0.01
START_WITHIN_S = 120.0
MOST = 260_000
"""All numbers of requests are smaller than this."""


class Spoiled(Exception):
    """A run lost or repeated a request, or did not end, so it yields no figure."""


class Stage:
    """Broker, provider and its log of calls. Only one run at a time may use them."""

    def __init__(
        self,
        *,
        amqp_url: str,
        redis_url: str | None,
        base_url: str,
        call_log: CallLog,
        connection: Connection,
        folder: Path,
    ) -> None:
        self.call_log = call_log
        self.version = connection.version
        self.redis_url = redis_url
        self._amqp_url = amqp_url
        self._base_url = base_url
        self._connection = connection
        self._folder = folder

    async def reset(self, who: Contestant) -> None:
        """Prepare a run of `who`: declare and empty its queues, empty Redis, clear the log of calls."""
        topology = who.topology(self.version)
        await apply(topology, await self._connection.underlying())
        channel = await self._connection.channel(confirms=False)
        for queue in topology.queues:
            await channel.queue_purge(queue.name)
        if who.queue not in {queue.name for queue in topology.queues}:
            await channel.queue_delete(who.queue)
        await channel.close()
        if self.redis_url:
            async with Redis.from_url(self.redis_url) as redis:
                await redis.flushdb()
        self.call_log.clear()

    def place(self, folder: Path, slots: int) -> Place:
        return Place(
            amqp_url=self._amqp_url, base_url=self._base_url, redis_url=self.redis_url, folder=folder, slots=slots
        )

    @asynccontextmanager
    async def workers(
        self, who: Contestant, *, slots: int = 50, processes: int = 1, ready: bool = True
    ) -> AsyncIterator[list[int]]:
        """Start workers; yields their process ids. `ready`: wait until all of them consume."""
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder)))
            place = self.place(folder, slots)
            environ, pids = who.environment(place), []
            for number in range(processes):
                log = folder / f"{number}.log"
                pids.append(await stack.enter_async_context(process(who.worker(place), environ=environ, log=log)))
            if ready:
                await self._consuming(who, processes)
            yield pids

    async def _consuming(self, who: Contestant, processes: int) -> None:
        try:
            async with asyncio.timeout(START_WITHIN_S):
                while await self._consumers(who) < processes:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise Spoiled(f"{who.name}: not at work within {START_WITHIN_S:g} s") from None

    async def _consumers(self, who: Contestant) -> int:
        try:
            return (await depths(self._connection, [who.queue]))[who.queue].consumers
        except BrokerUnreachable:  # its worker has not declared the queue yet
            return 0

    async def send(self, who: Contestant, spec: Spec, *, client: bool = False) -> Sent:
        """Send requests from a separate process. `client`: with the contestant's own client."""
        environ = who.environment(self.place(self._folder, 1))
        # a requester runs in this checkout, whichever the worker's is
        environ["PYTHONPATH"] = f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"
        made = await asyncio.create_subprocess_exec(
            *(str(who.python if who.fills.startswith("peers.") else sys.executable), "-m", "suite.requester"),
            *(who.asks if client else who.fills, json.dumps(asdict(spec))),
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await made.communicate()
        finally:
            if made.returncode is None:
                made.kill()
        found = [line for line in output.decode().splitlines() if line.startswith("RESULT ")]
        if made.returncode or not found:
            raise Spoiled(f"{who.name}: its requester failed: {errors.decode()[-1500:]}")
        return Sent(**json.loads(found[0].removeprefix("RESULT ")))

    async def called(self, count: int, *, within_s: float = 60.0) -> None:
        """Wait until the provider has got `count` calls. Raises Spoiled."""
        try:
            async with asyncio.timeout(within_s):
                while self.call_log.calls < count:
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise Spoiled(f"{self.call_log.calls} of {count} were called within {within_s:g} s") from None

    async def answered(self, who: Contestant, count: int, *, within_s: float = 60.0) -> None:
        """Wait until `count` requests have one answer each. Raises Spoiled."""
        answers: list[str | None] = []
        try:
            async with asyncio.timeout(within_s):
                if who.in_redis:
                    await self._in_redis(count)
                else:
                    await self._in_queue(who, count, answers)
        except TimeoutError:
            raise Spoiled(f"{who.name}: not all of {count} requests were answered within {within_s:g} s") from None
        self.check(who, count)

    async def waiting(self, who: Contestant) -> int:
        """How many requests are in a contestant's queues."""
        queues = [queue.name for queue in who.topology(self.version).queues if queue.name != REPLIES]
        return sum(each.ready for each in (await depths(self._connection, queues or [who.queue])).values())

    async def nothing_lost(self, who: Contestant, count: int) -> None:
        """Check, after the workers have ended, that each of `count` requests was called or is still in a queue. Raises
        Spoiled."""
        try:
            async with asyncio.timeout(5):  # requests that a worker returned appear in the queue a moment later
                while await self.waiting(who) + self.call_log.calls < count:
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            lost = count - self.call_log.calls - await self.waiting(who)
            raise Spoiled(f"{who.name}: {lost} of {count} requests are lost") from None

    def check(self, who: Contestant, count: int) -> None:
        """Check that each of `count` requests was called once. Raises Spoiled."""
        if self.call_log.repeated or self.call_log.calls != count:
            raise Spoiled(
                f"{who.name}: {self.call_log.calls} calls for {count} requests, {self.call_log.repeated} repeated"
            )

    async def _in_redis(self, count: int) -> None:
        async with Redis.from_url(self.redis_url or "") as redis:
            while await redis.dbsize() < count:
                await asyncio.sleep(LOOK_EVERY_S)

    async def _in_queue(self, who: Contestant, count: int, answers: list[str | None]) -> None:
        while (await depths(self._connection, [REPLIES]))[REPLIES].ready < count:
            await asyncio.sleep(LOOK_EVERY_S)
        async with await aio_pika.connect(self._amqp_url) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=1000)
            queue = await channel.get_queue(REPLIES)
            async with queue.iterator(no_ack=True) as replies:
                async for reply in replies:
                    if reply.headers.get("x-lane-status", "ok") != "ok":
                        raise Spoiled(f"{who.name}: a request ended as {reply.body[:500]!r}")
                    answers.append(reply.correlation_id)
                    if len(answers) >= count:
                        break
            left = (await queue.channel.declare_queue(REPLIES, passive=True)).declaration_result.message_count
        if left or len(set(answers)) != count:
            raise Spoiled(
                f"{who.name}: {count - len(set(answers))} requests without an answer, {left} answers too many"
            )


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as name:
        folder = Path(name)
        async with (
            ground.broker() as url,
            ground.redis() as redis_url,
            Connection(url, name="benchmark") as connection,
            provider(folder, most=MOST) as (base_url, call_log),
        ):
            yield Stage(
                amqp_url=url,
                redis_url=redis_url,
                base_url=base_url,
                call_log=call_log,
                connection=connection,
                folder=folder,
            )
