"""A worker in the test's own process, with a simulated provider, for one virtual host.

    async with serving(vhost.amqp_url) as own:
        …                               publish to `vhost.amqp_url`; `own.api.calls` is what the provider saw

The environment has no effect: every setting is the default, or given here. Retries are quick unless set otherwise.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from lanekeeper.amqp.connection import Connection
from service.config.settings import Settings
from service.simulated.app import Call, SimulatedOptions
from service.worker import running as worker
from service.worker.assembly import Worker, assemble
from tests.support.held_calls import HeldCalls
from tests.support.lanes import SETTINGS
from tests.support.stores import store_url
from tests.support.waiting import PATIENCE_S, STARTED_S, until
from topology.broker.admin import apply
from topology.declaration import declare

QUICK = {"base_s": 0.05, "cap_s": 0.2}
PLENTY = {"requests_per_min": 1e6, "input_tokens_per_min": 1e9, "output_tokens_per_min": 1e9}
"""Set beforehand, so that no request waits until the first answer has reported the limits."""


@dataclass
class RunningWorker:
    """A running worker and its simulated provider."""

    settings: Settings
    api: HeldCalls
    parts: Worker
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _losses: list["asyncio.Future[str]"] = field(default_factory=list)

    def calls(self, words: str) -> list[Call]:
        """The calls to the provider whose prompt contains `words`."""
        return [call for call in self.api.calls if words in call.prompt]

    @property
    def is_well(self) -> bool:
        """Whether every queue is consumed, and no connection was lost since the start."""
        return not self.losses and all(trouble is None for trouble in self.parts.reasons().values())

    @property
    def losses(self) -> list[str]:
        """The reasons why connections were lost; empty if none was."""
        return [loss.result() for loss in self._losses if loss.done()]


def _lane(few: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """A lane's settings, as `load_settings` makes them: if `slots` is set, the lane does not grow."""
    fixed = {"slots_max": told["slots"]} if "slots" in told else {}
    return {**few, **fixed, **told}


@asynccontextmanager
async def serving(
    url: str,
    *,
    simulated: SimulatedOptions | None = None,
    lanes: Mapping[str, Mapping[str, Any]] | None = None,
    retry: Mapping[str, float] | None = None,
    budget: Mapping[str, Any] = PLENTY,
    works: tuple[str, ...] = (),
    waits: bool = True,
    declares: bool = True,
    base_url: str | None = None,
    **settings: Any,
) -> AsyncIterator[RunningWorker]:
    """A worker that is ready; at the end it is stopped cleanly, and its error, if any, is raised.

    `waits` false: does not wait until the worker is ready.

    `base_url`: a provider other than the simulated one.

    `declares` false: the worker does not declare the topology; it is applied here before the worker starts.
    """
    async with HeldCalls(simulated) as api:
        given: dict[str, Any] = {
            "amqp_url": SecretStr(url),
            "anthropic_api_key": SecretStr("sk-ant-simulated"),
            "anthropic_base_url": SecretStr(base_url or api.base_url),
            "lanes": {name: _lane(few, (lanes or {}).get(name, {})) for name, few in SETTINGS.items()},
            "retry": QUICK if retry is None else retry,
            "budget": budget,
            "store_url": SecretStr(store_url(url)),
            **settings,
        }
        made = Settings(**given)
        if not declares:
            await _applied(made)
        async with assemble(made, lanes=works, declares=declares) as parts:
            own = RunningWorker(made, api, parts, _losses=[parts.broker.consuming.loss, parts.broker.publishing.loss])
            working = asyncio.create_task(worker.run(parts, stop=own._stop, grace_s=5), name="worker")
            try:
                if waits:
                    await until(lambda: working.done() or own.is_well, within_s=STARTED_S)
                yield own
            finally:
                api.release()  # or the worker would wait for them
                own._stop.set()
                await asyncio.wait_for(working, timeout=PATIENCE_S)


async def _applied(settings: Settings) -> None:
    async with Connection(settings.broker_url, name="deploy") as connection:
        topology = declare(settings.lane_specs(), names=settings.names(), broker_version=connection.version)
        await apply(topology, await connection.underlying())
