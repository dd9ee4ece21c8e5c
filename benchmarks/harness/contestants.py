"""The contestants. Each has a worker, requesters, and the queues that they use. The other frameworks (`PEERS`) run in
the virtual environment .cache/bench, which is installed from requirements-bench.lock."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from benchmarks.harness.processes import ROOT, clean_environ
from lanekeeper.contract.names import Names
from topology.declaration import Broker, Queue, Topology, declare
from topology.lanes import DEFAULT_LANES

NAMES: Final = Names("bench")
PLAIN: Final = "benchmarks.harness.requesters:Plain"
PEERS_PYTHON: Final = ROOT / ".cache/bench/bin/python"
ONCE: Final = "faststream_once"
"""FastStream with a claim and an outcome in Redis: the peer that keeps the same promise."""
REPLIES: Final = f"{NAMES.reply_prefix}nobody"
"""The queue of answers that nobody waits for."""
ONLY_REPLIES: Final = Topology(exchanges=(), queues=(Queue(REPLIES),), bindings=())


@dataclass(frozen=True)
class Place:
    """The parameters of a worker: URLs, a folder for this run, its number of slots, and the port that it listens on."""

    amqp_url: str
    base_url: str
    redis_url: str | None
    folder: Path
    slots: int
    """0: as many as by default."""
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One contestant. Its processes get the environment variables BENCH_* and those in `environ`."""

    name: str
    queue: str
    python: Path = Path(sys.executable)
    command: Sequence[str]
    """The arguments of the interpreter that start the worker; {slots} and {port} are replaced by its numbers."""
    fills: str
    """The requester that publishes requests whose answers nobody waits for."""
    asks: str
    """The requester that uses the contestant's own client."""
    environ: Mapping[str, str] = field(default_factory=dict)
    uses_redis: bool = False
    in_redis: bool = False
    """Answers that nobody waits for are kept in Redis, not in the queue `REPLIES`."""

    def topology(self, version: str) -> Topology:
        """The topology that the suite declares for the contestant. Peers declare their own queues, so by default it is
        only the queue `REPLIES`."""
        return ONLY_REPLIES

    def environment(self, place: Place) -> dict[str, str]:
        made = clean_environ(
            BENCH_AMQP_URL=place.amqp_url,
            BENCH_BASE_URL=place.base_url,
            BENCH_REDIS_URL=place.redis_url or "",
            BENCH_SLOTS=str(place.slots),
            BENCH_REPLY_TO=REPLIES,
            BENCH_EXCHANGE="",
            BENCH_KEY=self.queue,
        )
        return {**made, **self.environ}

    def worker(self, place: Place) -> list[str]:
        return [str(self.python), *(word.format(slots=place.slots, port=place.port) for word in self.command)]


class Floor(Contestant):
    """`benchmarks/floor.py`, on queues of the same type as a lane's intake on that version of the broker."""

    def topology(self, version: str) -> Topology:
        kind = {"x-queue-type": "quorum"} if Broker(version).quorum_intake else {"x-max-priority": 9}
        names = self.environ.get("BENCH_QUEUES", self.queue).split(",")
        queues = (Queue(each.partition("=")[0], kind) for each in names)
        return Topology(exchanges=(), queues=(*queues, Queue(REPLIES)), bindings=())


@dataclass(frozen=True, kw_only=True)
class Lanekeeper(Contestant):
    """`lanekeeper serve`: all parts, as a user runs it."""

    code: Path = ROOT
    """The checkout whose code and virtual environment are used."""

    def topology(self, version: str) -> Topology:
        made = declare(DEFAULT_LANES, names=NAMES, broker_version=version)
        return Topology(exchanges=made.exchanges, queues=(*made.queues, Queue(REPLIES)), bindings=made.bindings)

    def environment(self, place: Place) -> dict[str, str]:
        user = urlsplit(place.amqp_url).username or "guest"
        own = {
            "BENCH_EXCHANGE": NAMES.requests,
            "BENCH_KEY": "{lane}.bench.load",
            "BENCH_NAMESPACE": NAMES.namespace,
            "BENCH_USER": user,
            "LANEKEEPER_AMQP_URL": place.amqp_url,
            "LANEKEEPER_NAMESPACE": NAMES.namespace,
            "LANEKEEPER_SPEAKERS": user,
            "LANEKEEPER_STORE_URL": f"sqlite:///{place.folder}/store.sqlite",
            "LANEKEEPER_LOG_LEVEL": "warning",
            "LANEKEEPER_LANES__BATCH__BATCHES__ENABLED": "false",
            **({"LANEKEEPER_LANES__NORMAL__SLOTS": str(place.slots)} if place.slots else {}),
            "ANTHROPIC_API_KEY": "benchmark",
            "ANTHROPIC_BASE_URL": place.base_url,
        }
        made = {**super().environment(place), **own, **self.environ}
        if "OTEL_EXPORTER_OTLP_ENDPOINT" in made:
            made["OTEL_EXPORTER_OTLP_ENDPOINT"] = place.base_url
        return made if self.code == ROOT else {**made, "PYTHONPATH": str(self.code)}


FLOOR: Final = Floor(
    name="floor", queue="bench.floor", command=("-m", "benchmarks.floor", "work"), fills=PLAIN, asks=PLAIN
)


def floor_with_lanes(**slots: int) -> Floor:
    """The floor with one queue for each lane, each with its own slots."""
    queues = ",".join(f"bench.floor.{lane}={count}" for lane, count in slots.items())
    return replace(
        FLOOR,
        queue=f"bench.floor.{next(iter(slots))}",
        environ={"BENCH_QUEUES": queues, "BENCH_KEY": "bench.floor.{lane}"},
    )


def lanekeeper(
    name: str = "lanekeeper",
    *,
    code: Path = ROOT,
    module: str = "service.cli.main",
    lanes: Sequence[str] = (),
    **environ: str,
) -> Lanekeeper:
    """Lanekeeper as a contestant. `module`: the Python module that is run. `lanes`: the only lanes that its worker
    serves (`lanekeeper consume`); by default all (`lanekeeper serve`). `environ`: further settings."""
    what = ("consume", *(f"--lane={lane}" for lane in lanes)) if lanes else ("serve",)
    return Lanekeeper(
        name=name,
        queue=NAMES.intake(lanes[-1] if lanes else "normal"),
        python=Path(sys.executable) if code == ROOT else code / ".venv/bin/python",
        command=("-m", module, *what, "--port", "{port}"),
        fills=PLAIN,
        asks="benchmarks.harness.requesters:Own",
        environ=environ,
        code=code,
    )


def _peer(name: str, *command: str, in_redis: bool = False, uses_redis: bool = False) -> Contestant:
    module = f"benchmarks.peers.with_{name}"
    return Contestant(
        name=name,
        queue=f"bench.{name}",
        python=PEERS_PYTHON,
        command=("-m", *(word.replace("MODULE", module) for word in command)),
        fills=f"{module}:Requester",
        asks=f"{module}:Requester",
        in_redis=in_redis,
        uses_redis=uses_redis or in_redis,
    )


PEERS: Final = (
    _peer(
        "celery",
        *("celery", "-A", "MODULE", "worker", "--pool=threads", "--concurrency={slots}", "--loglevel=WARNING"),
        *("--without-gossip", "--without-mingle"),
    ),
    _peer("dramatiq", "dramatiq", "MODULE", "--processes=1", "--threads={slots}", in_redis=True),
    _peer("faststream", "MODULE"),
    _peer(ONCE, "MODULE", uses_redis=True),
    _peer(
        "taskiq",
        *("taskiq", "worker", "MODULE:broker", "--workers=1", "--max-async-tasks={slots}", "--log-level=WARNING"),
        in_redis=True,
    ),
)
