"""A worker in the test's own process, with a simulated provider, for one virtual host.

    async with serving(vhost) as own:
        …                               publish to `vhost.amqp_url`; `own.api.calls` is what the provider saw
        …                               publish the prompt "slow [[held]]", wait until `own.api.running == 1`
        own.api.release("slow")         its answer comes; without words all that are held, and later ones

    async with HeldProvider(parts=3) as provider, serving(url, base_url=provider.base_url):
        …                               the first third of every stream comes at once
        provider.go_on()                the next third

The environment has no effect: every setting is the default, or given here. Retries are quick unless set otherwise."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr
from typing_extensions import override

from lanekeeper import Client
from lanekeeper.amqp.connection import Connection
from service.config.settings import Settings
from service.simulated import messages
from service.simulated.app import Call, SimulatedOptions
from service.simulated.faults import Fault
from service.simulated.messages import echo, events, read_request
from service.worker import running as worker
from service.worker.assembly import Worker, assemble
from tests.support.brokers import At, url_of
from tests.support.defaults import SETTINGS, store_url
from tests.support.faulty_api import FaultyAPI
from tests.support.requester import Requester, requester
from tests.support.waiting import PATIENCE_S, STARTED_S, until
from topology.broker.admin import apply
from topology.declaration import declare

HELD = "[[held]]"


class Released:
    """The words of prompts that are held no more."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._added = asyncio.Event()

    def add(self, words: str) -> None:
        self._words.append(words)
        self._added.set()
        self._added = asyncio.Event()

    async def wait_for(self, prompt: str) -> None:
        while not any(words in prompt for words in self._words):
            await self._added.wait()


class HeldCalls(FaultyAPI):
    """It holds calls whose prompt contains `HELD` until they are released."""

    def __init__(self, options: SimulatedOptions | None = None) -> None:
        super().__init__(options)
        self._released = Released()

    def release(self, words: str = "") -> None:
        """Answer all calls whose prompt contains `words`, present and future."""
        self._released.add(words)

    @override
    async def _answer(
        self, request: web.BaseRequest, asked: messages.Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        if HELD in asked.prompt:
            await self._released.wait_for(asked.prompt)
        return await super()._answer(request, asked, fault, request_id)


PIECES = 60


class HeldProvider:
    """Every call has to be streamed."""

    def __init__(self, *, parts: int) -> None:
        self._may_come = [asyncio.Event() for _ in range(parts)]
        self.go_on()
        app = web.Application()
        app.router.add_post("/v1/messages", self._messages)
        self._server = TestServer(app)
        self.calls = 0
        self.running = 0

    @property
    def base_url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    def go_on(self) -> None:
        """Let the next part of each stream come."""
        next(each for each in self._may_come if not each.is_set()).set()

    async def __aenter__(self) -> Self:
        await self._server.start_server(shutdown_timeout=0.05)  # it cancels the handler of a client that has gone
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        self.running += 1
        try:
            return await self._answer(request)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await request.read())
        found = events(asked, echo(asked, output_tokens=None), id=f"msg_{self.calls}", deltas=PIECES)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        parts = len(self._may_come)
        for number, may_come in enumerate(self._may_come):
            await may_come.wait()
            await response.write(b"".join(found[number * len(found) // parts : (number + 1) * len(found) // parts]))
        await response.write_eof()
        return response


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
        return [call for call in self.api.calls if words in call.prompt]

    @property
    def is_well(self) -> bool:
        """Whether every queue is consumed, and no connection was lost since the start."""
        return not self.losses and all(trouble is None for trouble in self.parts.reasons().values())

    @property
    def losses(self) -> list[str]:
        return [loss.result() for loss in self._losses if loss.done()]


@asynccontextmanager
async def serving(
    broker: str | At,
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
    url = url_of(broker)
    async with HeldCalls(simulated) as api:
        given: dict[str, Any] = {
            "amqp_url": SecretStr(url),
            "anthropic_api_key": SecretStr("sk-ant-simulated"),
            "anthropic_base_url": SecretStr(base_url or api.base_url),
            "lanes": {
                name: {**SETTINGS.get(name, {}), **(lanes or {}).get(name, {})}
                for name in {**SETTINGS, **(lanes or {})}
            },
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


@asynccontextmanager
async def meeting(broker: str | At, **settings: Any) -> AsyncIterator[tuple[RunningWorker, Requester, Client]]:
    """`settings`: as for `serving`."""
    async with serving(broker, **settings) as worker, requester(broker) as app, Client(url_of(broker)) as client:
        yield worker, app, client
