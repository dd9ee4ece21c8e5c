"""The demo's second act: a worker is killed in the middle of its work, requests are sent twice, one is cancelled."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lanekeeper import Client
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.replies import Final
from lanekeeper.telemetry import signals
from service.config.settings import Settings
from service.demo.working import answer_of
from service.simulated.app import SimulatedAPI
from topology.lanes import BATCH

JOBS = 60
"""How many requests are published in the act of the demo in which a worker is killed."""
TWICE = 20
"""How many requests are published a second time in the act of the demo in which a worker is killed."""
READY_WITHIN_S = 30.0
WORKS_FIRST_S = 0.45
"""How many seconds the second worker works before it is killed: by then it has answered some requests and is working on
others."""


@dataclass(frozen=True, slots=True)
class Unbroken:
    """The results of the demo's second act: a worker is killed, requests are sent twice, one is cancelled."""

    answered: int
    cut: int
    """How many calls ended without an answer, because the worker that made them was killed."""
    calls: int
    """How many calls the provider got for the `JOBS` requests when they were published for the first time."""
    replayed: int
    """How many of the `TWICE` requests that were sent again got the same answer from the store."""
    calls_again: int
    """How many calls the provider got for the requests that were sent again. It is 0 if all were answered from the
    store."""
    cancelled: str
    """The outcome of cancelling a delayed request, and how the request then ended, for example "recorded,
    cancelled"."""

    @property
    def is_well(self) -> bool:
        return (self.answered, self.replayed, self.calls_again) == (JOBS, TWICE, 0) and "cancelled" in self.cancelled


async def run(settings: Settings, client: Client, api: SimulatedAPI, *, folder: Path) -> Unbroken:
    """Run the demo's second act, on the broker and the store of the running worker. `api`: the simulated provider,
    whose calls are counted."""
    before = len(api.calls)
    async with _second_worker(settings, folder) as second:
        asking = [asyncio.create_task(_ask(client, number)) for number in range(JOBS)]
        await asyncio.sleep(WORKS_FIRST_S)
        second.kill()
        finals = await asyncio.gather(*asking)
    calls = list(api.calls)[before:]
    answered = [final for final in finals if final is not None]
    again = [await _ask(client, number) for number in range(TWICE)]
    replayed = sum(
        1 for first, second_time in zip(finals, again, strict=False) if first and _is_replay(first, second_time)
    )
    return Unbroken(
        answered=len(answered),
        cut=sum(call.outcome == "client_gone" for call in calls),
        calls=len(calls),
        replayed=replayed,
        calls_again=len(api.calls) - before - len(calls),
        cancelled=await _cancelled(client),
    )


async def _ask(client: Client, number: int) -> Final | None:
    prompt = f"job {number} of the second act"
    return await answer_of(client, prompt, key=f"{BATCH.name}.demo.unbroken", message_id=f"unbroken-{number}")


def _is_replay(first: Final, again: Final | None) -> bool:
    return again is not None and again.replayed and again.body == first.body


async def _cancelled(client: Client) -> str:
    id = await client.publish({"prompt": "never asked"}, key=f"{BATCH.name}.demo.unbroken", delay_s=3600)
    try:
        outcome = await client.cancel(id)
        await client.result(id, wait_s=5)
    except LanekeeperError as problem:
        return f"{outcome}, {getattr(problem, 'code', problem)}"
    return f"{outcome}, answered"


@asynccontextmanager
async def _second_worker(settings: Settings, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a second worker as a process of its own, for the batch lane. The AMQP URL, which may contain a password, is
    passed in a file that only this user can read."""
    config = folder / "second-worker.toml"
    config.touch(mode=0o600)
    config.write_text(f"amqp_url = {json.dumps(settings.broker_url)}\n", encoding="utf-8")
    sets = {  # as options, so that neither the environment nor a file overrides them
        "store_url": settings.store,
        "namespace": settings.namespace,
        "anthropic_base_url": settings.provider_url,
        "anthropic_api_key": "simulated",
        "gateway.port": "0",
        "log_format": "json",
    }
    command = [sys.executable, "-m", "service.cli.main", "consume", "--lane", BATCH.name, "--config", str(config)]
    for name, value in sets.items():
        command += ["--set", f"{name}={value}"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(READY_WITHIN_S):
            async for line in process.stderr:
                if signals.SERVICE_READY.encode() in line:
                    break
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
