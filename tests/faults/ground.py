"""Everything that faults can affect: broker, provider, store, three workers, their connections, and a load.

async with ground("single", folder=…, seed=1, rate=25) as g:
    async with g.load.asking(): …
    g.verdict()
"""

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from service.simulated.app import SimulatedAPI, SimulatedOptions
from tests.faults.broker import single
from tests.faults.checker import Verdict, check
from tests.faults.clients import Load
from tests.faults.history import Called, Disturbed, History, as_line
from tests.faults.mix import EVERYTHING, Mix
from tests.faults.proxy import LOOPBACK, Proxy
from tests.faults.store import Store, file_store, redis_store
from tests.faults.workers import Crew, Worker
from tests.support.cluster import Cluster, cluster
from tests.support.nodes import Node
from tests.support.processes import environment
from tests.support.stores import stores

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
SETTINGS = {
    **PATIENT,
    **{f"LANEKEEPER_LANES__{lane.upper()}__SLOTS": str(slots) for lane, slots in SLOTS.items()},
    "LANEKEEPER_SPEAKERS": "guest,lanekeeper",
    "LANEKEEPER_RETRY__BASE_S": "0.2",
    "LANEKEEPER_RETRY__CAP_S": "2",
    "LANEKEEPER_GRACE_S": "10",
    "LANEKEEPER_GATEWAY__PORT": "0",
    "LANEKEEPER_LOG_FORMAT": "json",
}


@dataclass
class Ground:
    """A running service, with methods to break it."""

    on: str
    """`single` or `cluster`."""
    broker: Cluster
    api: SimulatedAPI
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
        """Let the provider fail these shares of its calls (`service/simulated/faults.py`); without arguments it works
        again."""
        self.api.configure(SimulatedOptions(faults=shares, keep_calls=self.api.options.keep_calls))

    def calls(self) -> list[Called]:
        """The provider's calls so far."""
        return [
            Called(
                at_s=call.started_s,
                ended_s=call.ended_s,
                identity=call.prompt.partition(" ")[0],
                outcome=call.outcome,
            )
            for call in self.api.calls
            if call.prompt != "1"  # a worker's own call, which finds out whether the provider answers at all
        ]

    def verdict(self, *, store_was_lost: bool = False) -> Verdict:
        return check([*self.history.events, *self.calls()], store_was_lost=store_was_lost)

    def write(self, path: Path) -> None:
        """Write the whole history in order, for debugging."""
        events = sorted([*self.history.events, *self.calls()], key=lambda each: each.at_s)
        path.write_text("".join(f"{as_line(event)}\n" for event in events))

    def disturbances(self) -> list[Disturbed]:
        return [each for each in self.history.events if isinstance(each, Disturbed)]


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
        api = await stack.enter_async_context(SimulatedAPI(SimulatedOptions(keep_calls=200_000)))
        provider_line = await stack.enter_async_context(Proxy(LOOPBACK, api.port))
        store = await stack.enter_async_context(STORES[store_is]())
        stack.enter_context(stores())  # an environment for this worker, not for the whole test
        lines = [
            [await stack.enter_async_context(_line_to(url, rng)) for url in broker.amqp_urls] for _ in range(workers)
        ]
        environs = []
        for own in lines:
            urls = [_through(url, line) for url, line in zip(broker.amqp_urls, own, strict=True)]
            found = environment(",".join(urls), broker.management_url)
            found["ANTHROPIC_BASE_URL"] = f"http://{LOOPBACK}:{provider_line.port}"
            environs.append({**found, "LANEKEEPER_STORE_URL": store.url, **SETTINGS, **settings})
        crew = await stack.enter_async_context(Crew(environs, folder=folder, module=module))
        await crew.ready()
        load = Load(broker.amqp_urls, written, rng=rng, rate=rate, mix=mix, name=f"{on[0]}{seed}")
        await stack.enter_async_context(load)
        yield Ground(on, broker, api, provider_line, lines, store, crew, load, written, rng)


def _line_to(url: str, rng: random.Random) -> Proxy:
    parts = urlsplit(url)
    return Proxy(parts.hostname or LOOPBACK, parts.port or 5672, rng=random.Random(rng.random()))


def _through(url: str, line: Proxy) -> str:
    parts = urlsplit(url)
    who, _, _ = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, f"{who}@{LOOPBACK}:{line.port}", parts.path, parts.query, ""))
