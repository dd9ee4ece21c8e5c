"""Checks the topology again whenever it may have changed, because a missing binding or queue loses messages.

It checks after each reconnect, after the broker ended a consumer, after a publish found no exchange, and every 45 s. It
asks over AMQP which queues and exchanges exist. Only the management API shows bindings; if it does not answer soon, a
process that may declare makes them again, which changes nothing if they exist.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from aio_pika.abc import AbstractConnection

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.border import asks_to_stop
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals
from topology.broker.admin.apply import apply, bind, broker_errors
from topology.broker.admin.management import Management, is_same_broker
from topology.broker.admin.verify import verify
from topology.model import Topology
from topology.plan import Difference, compare

LOOK_EVERY_S = 45.0
"""A deleted exchange or binding is noticed within a minute. One check: 75 questions, 30 ms of CPU."""
AGAIN_AFTER_S = 2.0
"""The time between two checks while something is missing."""
SOONEST_S = 0.2
"""The shortest time between two checks, because a hundred publishes may fail, and ask for a check, at the same time."""
MANAGEMENT_WITHIN_S = 5.0
COMMAND = "lanekeeper topology apply"
log = logs.logger()

FindManagement = Callable[[Connection], Awaitable[Management | None]]


class TopologyWatch:
    """Checks over `connection` whether everything declared exists. `declares`: what is missing is then declared.

    It assumes at first that all is well: its creator has just applied or verified the topology.
    """

    def __init__(
        self, topology: Topology, connection: Connection, *, declares: bool, find_management: FindManagement
    ) -> None:
        self._topology = topology
        self._connection = connection
        self._declares = declares
        self._find_management = find_management
        self._management: Management | None = None
        self._looked_at = connection.openings
        self._searched_at = 0
        self._missing: tuple[Difference, ...] = ()
        self._unbound: tuple[Difference, ...] = ()
        self._failed: str | None = None
        self._reported: dict[str, frozenset[str]] = {}
        self._heard = 0
        self._asked = asyncio.Event()
        names = Names(topology.namespace)
        self._intakes = tuple(names.intake(lane) for lane in topology.lanes)

    @property
    def trouble(self) -> str | None:
        """What is missing, or that no check was made since the connection was opened; None: nothing is missing."""
        if self._failed is not None:
            return self._failed
        if missing := (*self._missing, *self._unbound):
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            return f"{missing[0].line.removeprefix(missing[0].what).strip()}{more}; run: {COMMAND}"
        return None if self._is_looked_at else "not verified since the connection was lost"

    @property
    def hindrance(self) -> str | None:
        """Why no work should be taken; None if nothing is missing, or only the intake of a lane.

        If an intake is missing, its lane gets no requests and the other lanes go on. If anything else is missing, the
        results of work could be lost.
        """
        if all(self._is_an_intake(each) for each in (*self._missing, *self._unbound)) and self._failed is None:
            return None if self._is_looked_at else self.trouble
        return self.trouble

    def look(self) -> None:
        """Ask for a check soon."""
        self._asked.set()

    @property
    def _is_looked_at(self) -> bool:
        return self._connection.is_open and self._looked_at == self._connection.openings

    def _is_an_intake(self, missing: Difference) -> bool:
        return missing.what != "exchange" and any(
            missing.name == intake or f" → queue {intake}," in missing.name for intake in self._intakes
        )

    async def run(self) -> None:
        """Check again and again, until cancelled."""
        while True:
            if asks_to_stop():  # aiormq may have swallowed a cancellation while it waited
                raise asyncio.CancelledError
            self._asked.clear()
            try:
                await self._look()
            except BrokerError as error:
                if self._connection.is_open:
                    self._failed = str(error)
            await asyncio.sleep(SOONEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_AFTER_S if self.trouble else LOOK_EVERY_S * random.uniform(0.8, 1.2)):
                    await self._asked.wait()

    async def _look(self) -> None:
        underlying = await self._connection.underlying()
        opening = self._connection.openings
        if self._heard != opening:
            self._heard = opening
            self._connection.loss.add_done_callback(lambda _: self.look())
        missing = (await verify(self._topology, None, underlying)).missing
        self._report("things", missing)
        if missing and self._declares:
            self._missing = missing
            await self._apply(underlying)
            missing = (await verify(self._topology, None, underlying)).missing
        self._missing, self._failed, self._looked_at = missing, None, opening
        if not missing:
            await self._look_at_bindings(underlying, opening)

    async def _look_at_bindings(self, underlying: AbstractConnection, opening: int) -> None:
        """Work goes on during this check."""
        unbound: tuple[Difference, ...] | None = None
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(MANAGEMENT_WITHIN_S):
                if self._searched_at != opening:
                    self._searched_at = opening
                    self._management = await self._find_management(self._connection)
                if self._management is not None:
                    unbound = await self._unbound_at(self._management, underlying)
        if unbound is not None:
            self._report("bindings", unbound)
        if self._declares and unbound != ():
            self._unbound = unbound or ()
            await self._bind(underlying)
            unbound = ()
        self._unbound = self._unbound if unbound is None else unbound

    async def _unbound_at(
        self, management: Management, underlying: AbstractConnection
    ) -> tuple[Difference, ...] | None:
        if not is_same_broker(await management.overview(), underlying):
            return None
        found = compare(
            replace(self._topology, exchanges=(), queues=()), Topology(bindings=await management.bindings())
        )
        return tuple(each for each in found if each.change == "missing")

    async def _apply(self, underlying: AbstractConnection) -> None:
        await apply(self._topology, underlying)
        log.info(
            signals.TOPOLOGY_APPLIED,
            exchanges=len(self._topology.exchanges),
            queues=len(self._topology.queues),
            bindings=len(self._topology.bindings),
        )

    async def _bind(self, underlying: AbstractConnection) -> None:
        with broker_errors():
            channel = await underlying.channel()
            for binding in self._topology.bindings:
                await bind(channel, binding)
            await channel.close()

    def _report(self, kind: str, missing: tuple[Difference, ...]) -> None:
        """Log once what is missing, and again only if it existed in between."""
        known = self._reported.get(kind, frozenset())
        self._reported[kind] = frozenset(each.line for each in missing)
        new = [each for each in missing if each.line not in known]
        if queues := [each.name for each in new if each.what == "queue"]:
            log.error(signals.QUEUE_DELETED, queues=queues, command=COMMAND)
        for each in new:
            if each.what != "queue":
                log.error(signals.TOPOLOGY_DIFFERS, difference=each.line, command=COMMAND)
