"""`/v1/pauses`: operators see, pause and resume lanes, tenants, applications, models and providers (docs/brake.md)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from consumers.brake import read_pause, too_many
from consumers.clock import now_ms
from consumers.state.base import StoredPauses
from lanekeeper.contract.problems import invalid_request
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger
from service.config.settings import GatewayKey
from service.gateway.access import require_operator
from service.gateway.calls import Bodies
from service.gateway.problems import ApiError, answer

log = logger()


@dataclass(slots=True)
class PausePaths:
    """The handlers. All of them raise ApiError, LanekeeperError."""

    store: StoredPauses
    bodies: Bodies
    lanes: Collection[str]

    async def get(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=False)
        return answer({"pauses": [pause.as_json() for pause in await self.store.pauses()]})

    async def post(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=True)
        fields: dict[str, Any] = {}
        async with self.bodies.in_memory(request, caller, check=lambda body: fields.update(_object_in(body))):
            pass
        fields["who"] = fields.get("who") or caller.tenant or "gateway"
        pause = read_pause(fields, now_ms=now_ms(), lanes=self.lanes, providers=None)
        if not await self.store.pause(pause):
            raise too_many()
        log.info(signals.BRAKE_ASKED, command="pause", user=caller.tenant, pauses=[pause.as_json()])
        return answer(pause.as_json())

    async def delete(self, request: web.Request, caller: GatewayKey) -> web.StreamResponse:
        require_operator(caller, acts=True)
        if (pause := await self.store.resume(request.match_info["id"])) is None:
            raise ApiError(404, "nothing is paused under this id")
        log.info(signals.BRAKE_ASKED, command="resume", user=caller.tenant, pauses=[pause.as_json()])
        return answer(pause.as_json())


def _object_in(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid_request("body: a JSON object is required")
    return found
