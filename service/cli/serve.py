"""`lanekeeper serve` and `lanekeeper consume`: run a worker."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options
from service.cli.options import LaneName
from service.cli.process import run_with_telemetry, stop_signals

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from service.config.settings import Settings
    from service.gateway.server import Server

Simulate = Annotated[
    bool, typer.Option("--simulate", help="Answer without a provider: this process runs a simulated one.")
]
Host = Annotated[str | None, typer.Option("--host", help="Where the HTTP server listens.")]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65_535, help="Its port; 0: any free one.")]


def serve(
    simulate: Simulate = False,
    host: Host = None,
    port: Port = None,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Run all parts in one process: declare the topology, work all lanes, answer HTTP calls.

    Examples:

      lanekeeper serve --simulate

      ANTHROPIC_API_KEY=… lanekeeper serve --set lanes.batch.slots=12
    """
    settings = options.settings_of(config, sets, for_calls=not simulate, gateway={"host": host, "port": port})
    run_with_telemetry(settings, partial(_serve, settings, lanes=(), declares=True, simulate=simulate))


def consume(
    lanes: Annotated[
        list[LaneName] | None, typer.Option("--lane", help="Consume only this lane; can be repeated. Default: all.")
    ] = None,
    simulate: Simulate = False,
    host: Host = None,
    port: Port = None,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Work lanes whose topology is declared already (`lanekeeper topology apply`).

    If several workers run on one machine, the first one uses the default port for /healthz, and the others have no
    /healthz unless a port is given.

    Example:  lanekeeper consume --lane critical --lane normal --port 8081
    """
    settings = options.settings_of(config, sets, for_calls=not simulate, gateway={"host": host, "port": port})
    run_with_telemetry(settings, partial(_serve, settings, lanes=lanes or (), declares=False, simulate=simulate))


async def _serve(
    settings: "Settings",
    traces: "TracerProvider | None",
    *,
    lanes: Sequence[LaneName],
    declares: bool,
    simulate: bool,
) -> None:
    from lanekeeper.telemetry import signals
    from lanekeeper.telemetry.logs import logger
    from lanekeeper.telemetry.tracing import Tracing
    from service.checks import production
    from service.config.copies import with_provider
    from service.gateway.app import Gateway, client_for
    from service.gateway.server import Server
    from service.side_tasks import end
    from service.simulated.app import SimulatedAPI
    from service.worker import heap
    from service.worker import running as worker
    from service.worker.assembly import assemble

    log = logger()
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        if simulate:
            api = await stack.enter_async_context(SimulatedAPI())
            settings = with_provider(settings, api.base_url, key="simulated")
        await production.refuse(settings)
        production.warn_of_plain_text(settings)
        parts = await stack.enter_async_context(
            assemble(settings, lanes=lanes, declares=declares, traces=traces, simulated=simulate)
        )
        gateway = None
        if declares:  # `serve`: all parts
            client = await stack.enter_async_context(client_for(settings, Tracing(traces)))
            gateway = Gateway(settings, client, parts.store)

        def reasons() -> Mapping[str, str | None]:
            return {**parts.reasons(), **({} if gateway is None else gateway.reasons())}

        server = Server(reasons, host=settings.gateway.host, port=settings.gateway.port, routes=gateway)
        health_url = await _listen(server, stack, is_needed=declares or "gateway" in settings.model_fields_set)

        def ready() -> None:
            log.info(
                signals.SERVICE_READY,
                version=options.version(),
                lanes=[lane.name for lane in parts.lanes],
                broker=settings.broker,
                providers=["simulated"]
                if simulate
                else [provider.name for provider in settings.routes_spec().providers],
                health=health_url,
            )

        heap.tune()
        stop.armed = True
        draining = asyncio.create_task(_drain(server, stop.event, settings.grace_s), name="drain")
        try:
            await worker.run(parts, stop=stop.event, grace_s=settings.grace_s, on_ready=ready)
            await draining  # other workers may still answer calls of this gateway
        finally:
            await end((draining,))


async def _listen(server: "Server", stack: AsyncExitStack, *, is_needed: bool) -> str | None:
    """Start the HTTP server, and return its URL. If the server cannot listen on its address, and `is_needed` is false,
    log that and return None."""
    from lanekeeper.telemetry import signals
    from lanekeeper.telemetry.logs import logger
    from service.gateway.server import CannotListen

    try:
        await stack.enter_async_context(server)
    except CannotListen as error:
        if is_needed:
            raise
        log = logger()
        log.warning(signals.HEALTH_ABSENT, reason=str(error))
        return None
    return server.url


async def _drain(server: "Server", stop: asyncio.Event, grace_s: float) -> None:
    """Wait until `stop` is set. Then refuse new HTTP calls, and wait for up to `grace_s` until the calls in progress
    have been answered."""
    await stop.wait()
    await server.drained(within_s=grace_s)
