"""The environment of the runs. Broker and provider run all the time; workers and requesters are started for each
run."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import aio_pika
from redis.asyncio import Redis

from benchmarks.harness.contestants import PEERS_PYTHON, REPLIES, Contestant, Place
from benchmarks.harness.load import Sent, Spec
from benchmarks.harness.processes import ROOT, START_WITHIN_S, broker, process, redis
from benchmarks.harness.provider import LOOK_EVERY_S, CallLog, provider
from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.contract.messages import Depth
from lanekeeper.contract.problems import TopologyMismatch
from topology.broker.admin import apply

MOST = 260_000
"""All numbers of requests are smaller than this."""


class Spoiled(Exception):
    """A run lost or repeated a request, or did not end, so it yields no figure."""


@dataclass(frozen=True)
class Stage:
    """Broker, provider and its log of calls. Only one run at a time may use them."""

    connection: Connection
    amqp_url: str
    base_url: str
    redis_url: str | None
    call_log: CallLog
    folder: Path
    """For files that last as long as the stage."""

    @property
    def version(self) -> str:
        return self.connection.version

    async def reset(self, who: Contestant) -> None:
        """Prepare a run of `who`: declare and empty its queues, empty Redis, clear the log of calls."""
        topology = who.topology(self.version)
        await apply(topology, await self.connection.underlying())
        channel = await self.connection.channel(confirms=False)
        for queue in topology.queues:
            await channel.queue_purge(queue.name)
        if who.queue not in {queue.name for queue in topology.queues}:
            await channel.queue_delete(who.queue)
        await channel.close()
        if self.redis_url:
            async with Redis.from_url(self.redis_url) as redis:
                await redis.flushdb()
        self.call_log.clear()

    def environment(self, who: Contestant) -> dict[str, str]:
        """The environment of a contestant's requesters. They run in this checkout, whichever the worker's is."""
        return {**who.environment(self._place(self.folder, 1)), "PYTHONPATH": str(ROOT)}

    def _place(self, folder: Path, slots: int, base_url: str | None = None, port: int = 0) -> Place:
        return Place(self.amqp_url, base_url or self.base_url, self.redis_url, folder, slots=slots, port=port)

    @asynccontextmanager
    async def workers(
        self,
        who: Contestant,
        *,
        slots: int = 50,
        processes: int = 1,
        ready: bool = True,
        base_url: str | None = None,
        port: int | None = None,
    ) -> AsyncIterator[list[int]]:
        """Start workers; yields their process ids. `ready`: wait until all of them consume. `base_url`: another
        provider."""
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.folder)))
            place = self._place(folder, slots, base_url, port or 0)
            environ, command, pids = who.environment(place), who.worker(place), []
            for number in range(processes):
                log = folder / f"{number}.log"
                pids.append(await stack.enter_async_context(process(command, environ=environ, log=log, port=port)))
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

    async def intake(self, who: Contestant) -> Depth:
        """The queue in which requests wait: how many messages and consumers it has."""
        return (await depths(self.connection, [who.queue]))[who.queue]

    async def _consumers(self, who: Contestant) -> int:
        try:
            return (await self.intake(who)).consumers
        except TopologyMismatch:  # its worker has not declared the queue yet
            return 0

    async def send(self, who: Contestant, spec: Spec, *, client: bool = False) -> Sent:
        """Send requests from a separate process. `client`: with the contestant's own client."""
        python = who.python if who.python == PEERS_PYTHON else sys.executable
        made = await asyncio.create_subprocess_exec(
            *(str(python), "-m", "benchmarks.harness.load", who.asks if client else who.fills),
            json.dumps(asdict(spec)),
            env=self.environment(who),
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
        return sum(each.ready for each in (await depths(self.connection, queues or [who.queue])).values())

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
        while (await depths(self.connection, [REPLIES]))[REPLIES].ready < count:
            await asyncio.sleep(LOOK_EVERY_S)
        async with await aio_pika.connect(self.amqp_url) as connection:
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
async def stage(amqp_url: str | None = None) -> AsyncIterator[Stage]:
    """`amqp_url`: another broker than that of `broker()`."""
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bench-") as name:
        folder = Path(name)
        async with (
            nullcontext(amqp_url) if amqp_url else broker() as url,
            redis(folder) as redis_url,
            Connection(url, name="benchmark") as connection,
            provider(folder, most=MOST) as (base_url, call_log),
        ):
            yield Stage(connection, url, base_url, redis_url, call_log, folder)
