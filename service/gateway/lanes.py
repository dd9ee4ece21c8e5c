"""`GET /v1/lanes`: what `lanekeeper status` shows, of the lanes and the tenant of a key; for an operator all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from service.config.settings import GatewayKey
from service.gateway.problems import answer
from service.status import Status, look
from topology.lanes import LaneSpec

FRESH_S: Final = 2.0
"""Calls within this time get the same figures, because each question is answered by all workers."""


class LanePaths:
    """Handles `/v1/lanes`."""

    def __init__(self, connection: Connection | None, lanes: tuple[LaneSpec, ...], *, names: Names) -> None:
        self._connection = connection
        self._lanes = lanes
        self._names = names
        self._looking = asyncio.Lock()
        self._found: tuple[float, Status] | None = None

    async def get(self, request: web.Request, caller: GatewayKey) -> web.Response:
        return answer(shown(await self.status(), caller))

    async def status(self) -> Status:
        now_s = asyncio.get_running_loop().time
        async with self._looking:
            if self._found is None or now_s() - self._found[0] >= FRESH_S:
                assert self._connection is not None
                found = await look(self._connection, lanes=self._lanes, names=self._names)
                self._found = now_s(), found
            return self._found[1]


def shown(status: Status, caller: GatewayKey) -> dict[str, Any]:
    """The part of a status that this caller may see: the lanes that its key allows, and of tenants only its own. An
    operator sees all."""
    if caller.operator != "no":
        lanes = [_lane(asdict(lane), status, status.tenants.get(lane.lane, {})) for lane in status.lanes]
        rest = asdict(status)
        return {**rest, "lanes": lanes}
    lanes = []
    for lane in status.lanes:
        if caller.lanes is None or lane.lane in caller.lanes:
            tenants = status.tenants.get(lane.lane, {})
            own = {name: figures for name, figures in tenants.items() if name == caller.tenant}
            lanes.append(_lane(asdict(lane), status, own))
    return {"lanes": lanes, "accounts": status.accounts, "paused": status.paused, "breakers": status.breakers}


def _lane(figures: dict[str, Any], status: Status, tenants: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    name = figures["lane"]
    begins = f"{name}: "
    return {
        **figures,
        "spent": status.spent.get("lane", {}).get(name),
        "waits_for": [line.removeprefix(begins) for line in status.waiting if line.startswith(begins)],
        "tenants": tenants,
    }
