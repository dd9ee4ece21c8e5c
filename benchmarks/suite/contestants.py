"""Who is measured: how a worker process of each is started, and where its requests are published."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lanekeeper.contract.names import Names
from suite.processes import HERE, clean_environ
from topology.declaration import Broker, declare
from topology.lanes import DEFAULT_LANES
from topology.model import Queue, Topology

NAMES = Names("bench")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a contestant's worker finds broker and provider; `folder` is its own."""

    amqp_url: str
    base_url: str
    folder: Path
    slots: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """A worker process."""

    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=clean_environ)


class Floor:
    """`benchmarks/floor.py`."""

    name = "floor"
    exchange = ""
    key = queue = "bench.floor"
    reply_to = "bench.reply.floor"

    def topology(self, version: str) -> Topology:
        """A queue like a lane's intake on that broker."""
        type_ = {"x-queue-type": "quorum"} if Broker.of(version).quorum_intake else {"x-max-priority": 9}
        return Topology(exchanges=(), queues=(Queue(self.queue, type_), Queue(self.reply_to)), bindings=())

    def worker(self, place: Place) -> Work:
        arguments = ("work", place.amqp_url, self.queue, str(place.slots), place.base_url)
        return Work(command=(sys.executable, str(HERE / "floor.py"), *arguments))


class Lanekeeper:
    """`lanekeeper serve` with all its parts: store, gates, claims, events; `settings` are further ones, by name."""

    lane = "normal"

    def __init__(self, name: str = "lanekeeper", *, code: Path | None = None, **settings: str) -> None:
        """`code`: another checkout, with an environment of its own; None: this one."""
        self.name = name
        self.exchange = NAMES.requests
        self.key = f"{self.lane}.bench.drain"
        self.queue = NAMES.intake(self.lane)
        self.reply_to = f"{NAMES.reply_prefix}{name}"
        self._code = code
        self._settings = settings

    def topology(self, version: str) -> Topology:
        declared = declare(DEFAULT_LANES, names=NAMES, broker_version=version)
        return Topology(
            exchanges=declared.exchanges,
            queues=(*declared.queues, Queue(self.reply_to)),
            bindings=declared.bindings,
        )

    def worker(self, place: Place) -> Work:
        python = Path(sys.executable) if self._code is None else self._code / ".venv/bin/python"
        environ = clean_environ(
            LANEKEEPER_AMQP_URL=place.amqp_url,
            LANEKEEPER_NAMESPACE=NAMES.namespace,
            LANEKEEPER_STORE_URL=f"sqlite:///{place.folder}/store.sqlite",
            LANEKEEPER_LOG_LEVEL="warning",
            ANTHROPIC_API_KEY="benchmark",
            ANTHROPIC_BASE_URL=place.base_url,
            **{f"LANEKEEPER_LANES__{self.lane.upper()}__SLOTS": str(place.slots)},
            **self._settings,
        )
        if self._code is not None:
            environ["PYTHONPATH"] = str(self._code)
        return Work(command=(str(python), "-m", "service.cli.main", "serve", "--port", "0"), environ=environ)


Contestant = Floor | Lanekeeper
