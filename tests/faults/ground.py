"""Everything that faults can affect: broker, provider, store, three workers, their connections, and a load.

async with ground("single", folder=…, seed=1, rate=25) as g:
    async with g.load.asking(): …
    g.verdict()"""

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import urlsplit, urlunsplit

from aiohttp import web

from service.simulated.app import SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.faults.checker import NOT_POSTED, OK, Called, Disturbed, History, Posted, Verdict, as_line, check
from tests.faults.load import EVERYTHING, PIPELINE, SCHEDULE, SCHEDULE_S, STEPS, Load, Mix
from tests.faults.nodes import Cluster, Node, cluster, single
from tests.faults.proxy import LOOPBACK, Proxy
from tests.support.defaults import stores
from tests.support.endpoint import Posted as Post
from tests.support.endpoint import endpoint, secret_of
from tests.support.faulty_api import FaultyAPI
from tests.support.limited import cgroup
from tests.support.processes import Running, environment, interpreter
from tests.support.redis import RedisServer, redis_server
from tests.support.waiting import until

MIB = 1024 * 1024
LIMIT_BYTES = 512 * MIB
"""The memory of a worker, where this user may make a cgroup: as in deploy/kubernetes."""
SIZE_MB = 64
"""The size of the separate file system for the store's file, if one can be mounted (as root)."""


class Store(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def is_a(self) -> frozenset[str]:
        """The kind of store, for faults that need one."""
        ...


@dataclass(frozen=True, slots=True)
class FileStore:
    """An SQLite file that all workers of this machine share."""

    folder: Path
    is_mounted: bool
    locked_s: list[tuple[float, float]] = field(default_factory=list, compare=False)
    """When `lock` held the lock, from and until."""

    @property
    def is_a(self) -> frozenset[str]:
        return frozenset({"file", "mount"} if self.is_mounted else {"file"})

    @property
    def path(self) -> Path:
        return self.folder / "store.sqlite3"

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    async def lock(self, lasts_s: float) -> None:
        """Hold the lock that writers need, from outside. Does nothing if the file does not exist."""
        with suppress(sqlite3.OperationalError):
            connection = await asyncio.to_thread(self._locked)
            began_s = time.monotonic()
            try:
                await asyncio.sleep(lasts_s)
            finally:
                self.locked_s.append((began_s, time.monotonic()))
                connection.close()

    async def fill(self, lasts_s: float) -> None:
        """Fill its file system."""
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * 65_536)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            ballast.unlink()

    def delete(self) -> None:
        for each in self.folder.glob("store.sqlite3*"):
            each.unlink(missing_ok=True)

    def corrupt(self, rng: random.Random) -> None:
        with self.path.open("r+b") as file:
            file.write(rng.randbytes(4096))

    def _locked(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=10, isolation_level=None, check_same_thread=False)
        connection.execute("BEGIN EXCLUSIVE")
        return connection


@dataclass(frozen=True, slots=True)
class RedisStore:
    """A Redis, and the connection to it."""

    server: RedisServer
    line: Proxy

    @property
    def is_a(self) -> frozenset[str]:
        return frozenset({"redis"})

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.line.port}/0"

    async def kill(self, lasts_s: float) -> None:
        """SIGKILL, and start it again with what it had written."""
        await asyncio.to_thread(self.server.kill)
        await asyncio.sleep(lasts_s)
        await asyncio.to_thread(self.server.start)


@asynccontextmanager
async def redis_store() -> AsyncIterator[RedisStore]:
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder), "--appendonly", "yes") as server:
        async with Proxy(LOOPBACK, server.port) as line:
            yield RedisStore(server, line)


@asynccontextmanager
async def file_store() -> AsyncIterator[FileStore]:
    """A folder for the store, on a small separate file system if possible."""
    folder = Path(tempfile.mkdtemp(prefix="lanekeeper-store-"))
    is_mounted = await _mount("-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=700", "faults", str(folder))
    try:
        yield FileStore(folder, is_mounted)
    finally:
        if is_mounted:
            # Blocking, so that no cancellation interrupts it.
            subprocess.run(["umount", "--lazy", str(folder)], check=False)  # noqa: ASYNC221
        shutil.rmtree(folder, ignore_errors=True)


async def _mount(*words: str) -> bool:
    done = await asyncio.to_thread(subprocess.run, ["mount", *words], check=False, capture_output=True)
    return done.returncode == 0


FAILPOINT_EXIT = 86
"""The exit code of a worker that dies at a failpoint (`consumers/settle.py`)."""
PAUSE_S = 0.2
ENDS = {signal.SIGKILL, signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class Ending:
    at_s: float
    worker: int
    code: int
    told: frozenset[signal.Signals]

    @property
    def is_expected(self) -> bool:
        """Whether it ended as it was told to, or at a failpoint; anything else is a crash."""
        if self.code == 0:
            return signal.SIGTERM in self.told
        if self.code == 130:
            return signal.SIGTERM in self.told  # a second signal, during the grace time of the first
        return self.code == FAILPOINT_EXIT or -self.code in self.told


@dataclass(slots=True)
class Worker:
    """One of the workers; each restart makes a new process."""

    number: int
    environ: dict[str, str]
    running: Running | None = None
    told: set[signal.Signals] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        if self.running is None or self.running.has_ended or self.told & ENDS:  # its end may not be noticed yet
            return False
        return bool(self.running.told("service.ready"))

    @property
    def pid(self) -> int:
        assert self.running is not None
        return self.running.process.pid

    def send(self, number: signal.Signals) -> None:
        """Send SIGKILL, SIGTERM, SIGSTOP, SIGCONT or another signal."""
        self.told.add(number)
        if self.running is not None and not self.running.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def ended(self, *, within_s: float = 40) -> None:
        if self.running is not None:
            await asyncio.wait_for(self.running.process.wait(), timeout=within_s)


class Crew:
    """One worker for each of `environs`, until the block ends. `module`: the module that runs them."""

    def __init__(
        self,
        environs: Sequence[Mapping[str, str]],
        *,
        folder: Path,
        module: str = "service.cli.main",
    ) -> None:
        self.workers = [Worker(number, dict(environ)) for number, environ in enumerate(environs)]
        self.endings: list[Ending] = []
        self._folder = folder
        self._module = module
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: list[Running] = []

    @property
    def crashes(self) -> list[Ending]:
        return [each for each in self.endings if not each.is_expected]

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._keep(each), name=f"keeps worker {each.number}") for each in self.workers
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.workers:
            each.send(signal.SIGCONT)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ready(self, *, within_s: float = 600) -> None:
        """Wait until all workers take requests; not for one that ends by itself, which would never be ready. On a busy
        machine a start takes minutes."""
        await until(lambda: bool(self.crashes) or all(each.is_ready for each in self.workers), within_s=within_s)

    def scheduled(self) -> set[str]:
        """The ids of the requests that a schedule has published, as the workers say."""
        return {event["id"] for event in self.events() if event.get("event") == "schedule.fired"}

    def told_of(self, identity: str) -> list[dict[str, Any]]:
        """The events of a request in the workers' logs."""
        return [event for event in self.events() if event.get("request") == identity]

    def told_s(self, event: str) -> list[float]:
        """When the workers logged this event, as `time.monotonic()`."""
        ago_s = time.time() - time.monotonic()
        moments = (each["timestamp"] for each in self.events() if each.get("event") == event)
        return sorted(datetime.fromisoformat(each).timestamp() - ago_s for each in moments)

    def events(self) -> list[dict[str, Any]]:
        lives = [*self._ended, *(each.running for each in self.workers if each.running is not None)]
        return [event for life in lives for event in life.events]

    async def _keep(self, worker: Worker) -> None:
        life = 0
        while True:
            life += 1
            worker.told.clear()
            async with interpreter(
                "serve", environ=worker.environ, folder=self._folder, module=self._module
            ) as running:
                worker.running = running
                try:
                    code = await running.process.wait()
                    self.endings.append(Ending(time.monotonic(), worker.number, code, frozenset(worker.told)))
                finally:
                    self._ended.append(running)
                    self._write_down(worker, life, running)
            await asyncio.sleep(PAUSE_S)

    def _write_down(self, worker: Worker, life: int, running: Running) -> None:
        (self._folder / f"worker-{worker.number}-{life}.log").write_text("\n".join(map(str, running.events)))


WORKERS = 3
BROKERS = {"single": single, "cluster": cluster}
STORES: dict[str, Callable[[], AbstractAsyncContextManager[Store]]] = {"sqlite": file_store, "redis": redis_store}
SETTLED_S = 4.0
"""How old a quorum queue must be to survive a SIGKILL of its broker: test_broker_killed.py."""
PATIENT = {
    f"LANEKEEPER_LANES__{lane}__{name}": value
    for lane in ("CRITICAL", "NORMAL", "BATCH")
    for name, value in (("MAX_ATTEMPTS", "100"), ("CALL_TIMEOUT_S", "4"), ("DEADLINE_S", "900"))
}
"""Settings with which requests survive every fault: an attempt that hangs ends soon, and attempts do not run out."""
SLOTS = {"critical": 3, "normal": 3, "batch": 2}
"""Few, so that requests wait for a slot after each fault, and tenants' requests are set aside."""
BATCHES = {
    "ENABLED": "true",
    "COUNT": "10",
    "WINDOW_S": "0.5",
    "FIRST_POLL_S": "0.1",
    # a request in a batch that hangs is run live after 15 s
    "LEAST_S": "890",
    "PROMOTE_S": "885",
}
OPTIONS = SimulatedOptions(keep_calls=200_000, batches=BatchOptions(processing_s=0.3))
SETTINGS = {
    **PATIENT,
    **{f"LANEKEEPER_LANES__BATCH__BATCHES__{name}": value for name, value in BATCHES.items()},
    **{f"LANEKEEPER_LANES__{lane.upper()}__SLOTS": str(slots) for lane, slots in SLOTS.items()},
    f"LANEKEEPER_PIPELINES__{PIPELINE.upper()}__STEPS": json.dumps(STEPS),
    "LANEKEEPER_SPEAKERS": "guest,lanekeeper",
    "LANEKEEPER_HELD_BYTES": str(16 * MIB),
    f"LANEKEEPER_SCHEDULES__{SCHEDULE.upper()}__CRON": f"*/{SCHEDULE_S} * * * * *",
    f"LANEKEEPER_SCHEDULES__{SCHEDULE.upper()}__KEY": "normal.tests.schedules",
    f"LANEKEEPER_SCHEDULES__{SCHEDULE.upper()}__BODY": json.dumps({"prompt": SCHEDULE}),
    "LANEKEEPER_RETRY__BASE_S": "0.2",
    "LANEKEEPER_RETRY__CAP_S": "2",
    "LANEKEEPER_GRACE_S": "10",
    "LANEKEEPER_GATEWAY__PORT": "0",
    "LANEKEEPER_LOG_FORMAT": "json",
}


TOO_LATE_S = 20.0
POSTS = {"LANEKEEPER_WEBHOOKS__TIMEOUT_S": "10"}
"""A slow endpoint answers within half of this time, or after twice as much."""


@dataclass
class Ground:
    """A running service, with methods to break it."""

    on: str
    """`single` or `cluster`."""
    broker: Cluster
    api: FaultyAPI
    provider_line: Proxy
    lines: list[list[Proxy]]
    """For each worker, its connections to each node of the broker."""
    store: Store
    crew: Crew
    load: Load
    history: History
    rng: random.Random
    began_s: float = field(default_factory=time.monotonic)

    @property
    def workers(self) -> list[Worker]:
        return self.crew.workers

    @property
    def every_line(self) -> list[Proxy]:
        return [line for lines in self.lines for line in lines]

    def lines_of(self, worker: Worker) -> list[Proxy]:
        return self.lines[worker.number]

    def node(self, rng: random.Random) -> Node:
        """A node of the broker; not the one from which replies are read, unless it is the only one."""
        nodes = self.broker.nodes
        return rng.choice(nodes[:-1] or nodes)

    def misbehave(self, **shares: float) -> None:
        """Let the provider fail these shares of its calls (`tests/support/faulty_api.py`); without arguments it works
        again."""
        self.api.configure(replace(self.api.options, faults=shares))

    def calls(self) -> list[Called]:
        """Live ones, and what was asked in batches."""
        in_batches = [
            _called(
                item.asked.prompt,
                at_s=batch.began_s,
                ended_s=None,
                outcome=OK if item.fault is None else item.fault.name,
                batch=batch.id,
            )
            for batch in self.api.batches.all.values()
            for item in batch.items
            if item.asked is not None
        ]
        return in_batches + [
            _called(call.prompt, at_s=call.started_s, ended_s=call.ended_s, outcome=call.outcome)
            for call in self.api.calls
            # "1": a worker's own call, which finds out whether the provider answers at all
            if call.prompt not in ("1", SCHEDULE)
        ]

    async def posted(self, *, within_s: float) -> None:
        """Wait until every confirmed request with a webhook is posted, as far as that happens within this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.verdict().of(NOT_POSTED):  # noqa: ASYNC110  each look reads the whole history
                    await asyncio.sleep(0.5)

    def verdict(self, *, store_was_lost: bool = False) -> Verdict:
        return check([*self.history.events, *self.calls()], store_was_lost=store_was_lost)

    def write(self, path: Path) -> None:
        """Write the whole history in order, for debugging."""
        events = sorted([*self.history.events, *self.calls()], key=lambda each: each.at_s)
        path.write_text("".join(f"{as_line(event)}\n" for event in events))

    def disturbances(self) -> list[Disturbed]:
        return [each for each in self.history.events if isinstance(each, Disturbed)]


def _called(prompt: str, **how: Any) -> Called:
    identity, _, step = prompt.partition(" ")[0].partition("/")
    return Called(identity=identity, step=step, **how)


@asynccontextmanager
async def ground(
    on: str,
    *,
    folder: Path,
    seed: int,
    rate: float,
    mix: Mix = EVERYTHING,
    workers: int = WORKERS,
    store_is: str = "sqlite",
    module: str = "service.cli.main",
    **settings: str,
) -> AsyncIterator[Ground]:
    """All parts, ready for a load. `module` runs the workers (`broken.py`); `settings` are their settings."""
    rng = random.Random(seed)
    written = History()
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(BROKERS[on]())
        api = await stack.enter_async_context(FaultyAPI(OPTIONS))
        provider_line = await stack.enter_async_context(Proxy(LOOPBACK, api.port))
        store = await stack.enter_async_context(STORES[store_is]())
        stack.enter_context(stores())  # an environment for this worker, not for the whole test
        lines = [
            [await stack.enter_async_context(_line_to(url, rng)) for url in broker.amqp_urls] for _ in range(workers)
        ]
        hook, slow = [await stack.enter_async_context(endpoint()) for _ in range(2)]
        hooks = {**hook.environment(slow, tenants=[each for each in mix.tenants if each]), **POSTS}
        environs = []
        for own in lines:
            urls = [_through(url, line) for url, line in zip(broker.amqp_urls, own, strict=True)]
            found = {
                "LANEKEEPER_MANAGEMENT_URL": broker.management_url,
                "ANTHROPIC_BASE_URL": f"http://{LOOPBACK}:{provider_line.port}",
                "LANEKEEPER_STORE_URL": store.url,
            }
            if module == "service.cli.main":
                found["CGROUP"] = str(stack.enter_context(cgroup(LIMIT_BYTES)) or "")
            environs.append(environment(",".join(urls), **{**found, **SETTINGS, **hooks, **settings}))
        limited = "tests.support.limited" if module == "service.cli.main" else module
        crew = await stack.enter_async_context(Crew(environs, folder=folder, module=limited))
        await crew.ready()
        hook.answer = partial(_answered, random.Random(seed), written, late_s=(0, 1))
        slow.answer = partial(_answered, random.Random(seed), written, late_s=(2, 4))
        posted_to = (hook.url("/hook"), slow.url("/hook"))
        load = Load(broker.amqp_urls, written, rng=rng, rate=rate, mix=mix, name=f"{on[0]}{seed}", webhooks=posted_to)
        await stack.enter_async_context(load)
        yield Ground(on, broker, api, provider_line, lines, store, crew, load, written, rng)


def _answered(
    rng: random.Random, written: History, posted: Post, *, late_s: tuple[float, float]
) -> web.Response | float:
    """What an endpoint of webhooks answers: sometimes an error, sometimes `late_s`; a slow one nearly always, and at
    times too late. A wrong signature is an error too."""
    posted.verify(secret_of(posted.path.rpartition("/")[2]))
    is_slow = late_s[0] > 1
    if (roll := rng.random()) < 0.1:
        return web.Response(status=500)
    if is_slow and roll < 0.15:
        return web.Response(status=503, headers={"retry-after": "1"})
    if is_slow and roll < 0.2:
        return TOO_LATE_S
    digest = blake2b(posted.body, digest_size=8).hexdigest()
    written.add(Posted(at_s=time.monotonic(), identity=posted.id, digest=digest))
    return rng.uniform(*late_s) if roll < 0.2 or is_slow else web.Response(status=204)


def _line_to(url: str, rng: random.Random) -> Proxy:
    parts = urlsplit(url)
    return Proxy(parts.hostname or LOOPBACK, parts.port or 5672, rng=random.Random(rng.random()))


def _through(url: str, line: Proxy) -> str:
    parts = urlsplit(url)
    who, _, _ = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, f"{who}@{LOOPBACK}:{line.port}", parts.path, parts.query, ""))
