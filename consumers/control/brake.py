"""Carries out the control messages of the brake, with which operators pause and resume lanes, tenants, applications,
models and providers:

pause       {"pause": {"kind": "tenant", "name": "crm", "until": "…", "who": "…", "why": "…"}}
resume      {"resume": "<id of a pause>"}
pauses      {}

The answer is `{"pauses": […]}`: the new pause, the one that was removed, or all.

They are accepted only from users in the setting `control.operators`, because a client that may cancel its own requests
must not pause those of others (docs/decisions/0024).
"""

import asyncio
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from consumers.brake import Brake, read_pause, too_many
from consumers.clock import NowMs
from consumers.control.messages import kind_of, object_in
from consumers.state.base import Pause, StoredPauses
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem, invalid_request
from lanekeeper.telemetry import logs, signals

log = logs.logger()


@dataclass(slots=True, eq=False)
class BrakeCommands:
    """`operators`: the broker's users that may pause. `lanes`, `providers`: those that exist."""

    brake: Brake
    store: StoredPauses
    _: KW_ONLY
    operators: Collection[str]
    lanes: Collection[str]
    providers: Collection[str]
    now_ms: NowMs
    _in_order: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def carry_out(self, message: Message) -> dict[str, Any]:
        """Returns the answer. Raises RequestProblem, StoreUnavailable."""
        kind = kind_of(message)
        if message.user_id not in self.operators:
            raise RequestProblem(
                "forbidden_control",
                f"user {message.user_id or '(none)'!r} may not {kind}: publish with user_id, as one of the workers' "
                "setting control.operators (LANEKEEPER_CONTROL__OPERATORS)",
            )
        body = object_in(message)
        async with self._in_order:  # two messages about one lane must not overtake each other
            match kind:
                case n.PAUSE_KEY:
                    found = [await self._pause(body.get(kind))]
                case n.RESUME_KEY:
                    removed = await self.store.resume(str(body.get(kind)))
                    found = [] if removed is None else [removed]
                case _:
                    return {"pauses": [pause.as_json() for pause in await self.store.pauses()]}
            await self.brake.read()
        told = [pause.as_json() for pause in found]
        log.info(signals.BRAKE_ASKED, command=kind, user=message.user_id, pauses=told)
        return {"pauses": told}

    async def _pause(self, fields: object) -> Pause:
        if not isinstance(fields, dict):
            raise invalid_request('body: allowed is {"pause": {"kind": "…", "name": "…"}}')
        pause = read_pause(fields, now_ms=self.now_ms(), lanes=self.lanes, providers=self.providers)
        if not await self.store.pause(pause):
            raise too_many()
        return pause
