"""The demo's fourth act: the first provider fails for a while, and the second one answers in its place."""

import asyncio
import io
import json
from contextlib import suppress
from dataclasses import dataclass

from lanekeeper import Client
from lanekeeper.replies import Final
from lanekeeper.telemetry import signals
from service.config.budget_sections import ProviderSettings
from service.config.copies import with_provider
from service.config.settings import Settings
from service.demo.working import answer_of, working
from service.simulated.app import SimulatedAPI
from service.simulated.options import SimulatedOptions
from service.telemetry import logs
from topology.lanes import CRITICAL

UP = SimulatedOptions(latency_ms=300)
DOWN = SimulatedOptions(faults={"unavailable": 1.0})
EVERY_S = 0.025
"""The seconds between two requests in the demo's outage act (the first of two providers fails for a while)."""
UP_S = 0.5
"""How many seconds the first of the demo's two providers works before it fails."""
DOWN_S = 2.0
"""For how many seconds the first of the demo's two providers fails."""
UP_AGAIN_CALLS = 20
"""The demo's outage act ends when the first provider, after it works again, has answered this many requests."""
UP_AGAIN_WITHIN_S = 10.0
CALLS_MOST = 1.5
"""The demo's outage act succeeds only if the providers were called at most this often for each answer, on average.
Calls beyond one for each answer are retries, which the outage causes."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The result of the demo's outage act (the first provider fails for a while), as requesters and providers measured
    it."""

    asked: int
    answered: int
    elsewhere: int
    """How many requests the second provider answered."""
    calls: int
    """How many calls both simulated providers together have counted."""
    breaker: tuple[str, ...]
    """The states of the first provider's circuit breaker, in the order in which they were logged."""

    @property
    def calls_per_answer(self) -> float:
        return self.calls / max(1, self.answered)

    @property
    def is_well(self) -> bool:
        closed_again = self.breaker[:1] == ("open",) and self.breaker[-1:] == ("closed",)
        return self.answered == self.asked and self.calls_per_answer <= CALLS_MOST and closed_again


async def run(settings: Settings) -> Outage:
    """Run the demo's outage act: a worker of the critical lane, and two simulated providers, of which the first fails
    for a while."""
    log = io.StringIO()
    async with SimulatedAPI(UP) as first, SimulatedAPI(UP) as second:
        settings = with_provider(settings, first.base_url, key="simulated")
        second_provider = ProviderSettings.model_validate({"base_url": second.base_url, "api_key": "simulated"})
        settings = settings.model_copy(update={"providers": {"second": second_provider}})
        with logs.configured(service="lanekeeper demo", level="info", format="json", stream=log):
            async with working(settings, lanes=(CRITICAL.name,)) as (_, client):
                finals = await _ask_meanwhile(client, first)
        return Outage(
            asked=len(finals),
            answered=sum(final is not None for final in finals),
            elsewhere=sum(final is not None and final.provider == "second" for final in finals),
            calls=first.stats()["calls"] + second.stats()["calls"],
            breaker=tuple(
                event["state"]
                for event in map(json.loads, log.getvalue().splitlines())
                if event["event"] == signals.BREAKER_CHANGED
            ),
        )


async def _ask_meanwhile(client: Client, first: SimulatedAPI) -> list[Final | None]:
    async def keep_asking() -> None:
        while True:
            prompt = f"request {len(tasks)} of the fourth act"
            asked = answer_of(client, prompt, key=f"{CRITICAL.name}.demo.outage")
            tasks.append(group.create_task(asked))
            await asyncio.sleep(EVERY_S)

    def answered() -> int:
        return int(first.stats()["outcomes"].get("ok", 0))

    tasks: list[asyncio.Task[Final | None]] = []
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(keep_asking())
        await asyncio.sleep(UP_S)
        first.configure(DOWN)
        await asyncio.sleep(DOWN_S)
        first.configure(UP)
        enough = answered() + UP_AGAIN_CALLS
        with suppress(TimeoutError):
            await first.until(lambda: answered() >= enough, timeout_s=UP_AGAIN_WITHIN_S)
        asking.cancel()
    return [task.result() for task in tasks]
