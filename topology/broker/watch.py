"""Checks the topology on the broker again whenever it may have changed, because messages are lost if a binding or queue
is missing.

It checks after each reconnect, after the broker has ended a consumer, after a publish to a missing exchange, and every
45 s. Over AMQP it checks which queues and exchanges exist. Bindings are only shown by the management API. If this API
does not answer soon, a process whose user may declare objects makes all bindings again, which has no effect on existing
ones.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from aio_pika.abc import AbstractConnection

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver import asks_to_stop
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals
from topology.broker.admin import apply, verify
from topology.broker.management import Management, is_same_broker
from topology.declaration import Topology
from topology.plan import Difference, compare

LOOK_EVERY_S = 45.0
"""So a deleted exchange or binding is noticed within a minute. A check makes 75 passive declarations: 30 ms of CPU."""
AGAIN_AFTER_S = 2.0
SOONEST_S = 0.2
"""A hundred publishes may fail at the same time, and each failure asks for a check."""
MANAGEMENT_WITHIN_S = 5.0
COMMAND = "lanekeeper topology apply"
log = logs.logger()

FindManagement = Callable[[Connection], Awaitable[Management | None]]


class TopologyWatch:
    """Checks repeatedly whether all declared exchanges, queues and bindings exist. `declares`: whether it declares
    missing ones again. Before the first check all count as existing, because whoever creates a watch has just applied
    or verified the topology.
    """

    def __init__(
        self, topology: Topology, connection: Connection, *, declares: bool, find_management: FindManagement
    ) -> None:
        self._topology = topology
        self._bindings = replace(topology, exchanges=(), queues=())
        self._connection = connection
        self._declares = declares
        self._find_management = find_management
        self._management: Management | None = None
        self._checked_opening = connection.openings
        self._searched_opening = 0
        self._missing_objects: tuple[Difference, ...] = ()
        self._missing_bindings: tuple[Difference, ...] = ()
        self._failed: str | None = None
        self._reported: dict[str, frozenset[str]] = {}
        self._watched_opening = 0
        self._check_requested = asyncio.Event()
        names = Names(topology.namespace)
        intakes = {names.intake(lane) for lane in topology.lanes}
        self._intakes = intakes | {
            each.label for each in topology.bindings if each.destination_kind == "queue" and each.destination in intakes
        }
        """In the form that `Difference.name` has."""

    @property
    def trouble(self) -> str | None:
        """For people: what is missing, why the check failed, or that none was made since the connection was opened."""
        if self._failed is not None:
            return self._failed
        if missing := (*self._missing_objects, *self._missing_bindings):
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            return f"{missing[0].line.removeprefix(missing[0].what).strip()}{more}; run: {COMMAND}"
        return None if self._is_checked else "not verified since the connection was lost"

    @property
    def hindrance(self) -> str | None:
        """Why the worker must not take requests. If only intake queues are missing, just their lanes get no requests;
        without any other object, results of requests could be lost."""
        missing = (*self._missing_objects, *self._missing_bindings)
        only_intakes = all(each.what != "exchange" and each.name in self._intakes for each in missing)
        return None if only_intakes and self._failed is None and self._is_checked else self.trouble

    def check_soon(self) -> None:
        self._check_requested.set()

    @property
    def _is_checked(self) -> bool:
        return self._connection.is_open and self._checked_opening == self._connection.openings

    async def run(self) -> None:
        while True:
            if asks_to_stop():  # aiormq may have swallowed a cancellation while it waited
                raise asyncio.CancelledError
            self._check_requested.clear()
            try:
                await self._check()
            except BrokerError as error:
                if self._connection.is_open:
                    self._failed = str(error)
            await asyncio.sleep(SOONEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_AFTER_S if self.trouble else LOOK_EVERY_S * random.uniform(0.8, 1.2)):
                    await self._check_requested.wait()

    async def _check(self) -> None:
        underlying = await self._connection.underlying()
        opening = self._connection.openings
        if self._watched_opening != opening:
            self._watched_opening = opening
            self._connection.loss.add_done_callback(lambda _: self.check_soon())
        missing = (await verify(self._topology, None, underlying)).missing
        self._report("things", missing)
        if missing and self._declares:
            self._missing_objects = missing
            await apply(self._topology, underlying)
            log.info(
                signals.TOPOLOGY_APPLIED,
                exchanges=len(self._topology.exchanges),
                queues=len(self._topology.queues),
                bindings=len(self._topology.bindings),
            )
            missing = (await verify(self._topology, None, underlying)).missing
        self._missing_objects, self._failed, self._checked_opening = missing, None, opening
        if not missing:
            await self._check_bindings(underlying, opening)

    async def _check_bindings(self, underlying: AbstractConnection, opening: int) -> None:
        """If the API does not answer, or bindings are missing, make all bindings again (if `declares`). Meanwhile the
        worker takes requests."""
        missing: tuple[Difference, ...] | None = None
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(MANAGEMENT_WITHIN_S):
                if self._searched_opening != opening:
                    self._searched_opening = opening
                    self._management = await self._find_management(self._connection)
                api = self._management
                if api is not None and is_same_broker(await api.cluster_name(), underlying):
                    found = compare(self._bindings, Topology(bindings=await api.bindings()))
                    missing = tuple(difference for difference in found if difference.change == "missing")
        if missing is not None:
            self._missing_bindings = missing
            self._report("bindings", missing)
        if self._declares and missing != ():
            await apply(self._bindings, underlying)
            self._missing_bindings = ()

    def _report(self, kind: str, missing: tuple[Difference, ...]) -> None:
        """Log each missing object once, until it has existed in between."""
        known = self._reported.get(kind, frozenset())
        self._reported[kind] = frozenset(difference.line for difference in missing)
        new = [difference for difference in missing if difference.line not in known]
        if queues := [difference.name for difference in new if difference.what == "queue"]:
            log.error(signals.QUEUE_DELETED, queues=queues, command=COMMAND)
        for difference in new:
            if difference.what != "queue":
                log.error(signals.TOPOLOGY_DIFFERS, difference=difference.line, command=COMMAND)
