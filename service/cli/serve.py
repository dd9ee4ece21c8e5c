"""`lanekeeper serve` and `lanekeeper consume`: run a worker."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options
from service.cli.ending import STOPPED, run
from service.cli.options import LaneName

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from service.config.settings import Settings

AT_ONCE_S = 5.0
Simulate = Annotated[bool, typer.Option("--simulate", help="Answer without a provider: a simulated one runs inside.")]
Host = Annotated[str | None, typer.Option("--host", help="Where /healthz and /readyz listen.")]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65_535, help="Their port; 0: any free one.")]


def serve(
    simulate: Simulate = False,
    host: Host = None,
    port: Port = None,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Run all parts in one process: declare the topology, work all lanes.

    Examples:

      lanekeeper serve --simulate

      ANTHROPIC_API_KEY=… lanekeeper serve --set lanes.batch.slots=12
    """
    settings = options.settings_of(config, sets, for_calls=not simulate, gateway={"host": host, "port": port})
    _work(settings, lanes=(), declares=True, simulate=simulate)


def consume(
    lanes: Annotated[
        list[LaneName] | None, typer.Option("--lane", help="Work this lane alone; can be repeated. Default: all.")
    ] = None,
    simulate: Simulate = False,
    host: Host = None,
    port: Port = None,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Work lanes whose topology is declared already (`lanekeeper topology apply`).

    If several run on one machine, the first one uses the default port for /healthz, and the others have none unless a
    port is given.

    Example:  lanekeeper consume --lane critical --lane normal --port 8081
    """
    settings = options.settings_of(config, sets, for_calls=not simulate, gateway={"host": host, "port": port})
    _work(settings, lanes=tuple(lane.value for lane in lanes or ()), declares=False, simulate=simulate)


def _work(settings: "Settings", *, lanes: tuple[str, ...], declares: bool, simulate: bool) -> None:
    from service.telemetry import exporters as telemetry

    base, traces_endpoint = settings.otlp
    spec = telemetry.TelemetrySpec(
        log_level=settings.log_level,
        log_format=settings.log_format,
        log_content=settings.log_content,
        otlp_endpoint=base,
        otlp_traces_endpoint=traces_endpoint,
    )
    with telemetry.running(spec) as traces:
        run(_worked(settings, lanes=lanes, declares=declares, simulate=simulate, traces=traces))


async def _worked(
    settings: "Settings", *, lanes: tuple[str, ...], declares: bool, simulate: bool, traces: "TracerProvider | None"
) -> None:

    from lanekeeper.telemetry import signals
    from lanekeeper.telemetry.logs import logger
    from service.checks import production
    from service.simulated.app import SimulatedAPI
    from service.worker import heap
    from service.worker import running as worker
    from service.worker.assembly import assemble
    from service.worker.health import CannotListen, Health

    log = logger()
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(_stop_signals())
        if simulate:
            api = await stack.enter_async_context(SimulatedAPI())
            settings = settings.answered_by(api.base_url, key="simulated")
        await production.refuse(settings)
        for risk in production.of_transport(settings):
            log.warning(signals.PLAIN_TEXT, what=risk.what, reason=risk.text)
        parts = await stack.enter_async_context(
            assemble(settings, lanes=lanes, declares=declares, traces=traces, simulated=simulate)
        )
        health = Health(parts.reasons, host=settings.gateway.host, port=settings.gateway.port)
        listens = True
        try:
            await stack.enter_async_context(health)
        except CannotListen as error:
            if declares or "gateway" in settings.model_fields_set:
                raise
            listens = False
            log.warning(signals.HEALTH_ABSENT, reason=str(error))

        def ready() -> None:
            log.info(
                signals.SERVICE_READY,
                version=options.version(),
                lanes=[lane.name for lane in parts.lanes],
                broker=settings.broker,
                providers=["simulated"] if simulate else [each.name for each in settings.routes_spec().providers],
                health=health.url if listens else None,
            )

        heap.settle()
        stop.armed = True
        await worker.run(parts, stop=stop.event, grace_s=settings.grace_s, on_ready=ready)


class _Stop:
    """Handles SIGINT and SIGTERM. Before the work has begun the first ends the process at once; afterwards the first
    begins an orderly stop, and the second ends the process at once."""

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self._task = task
        self.event = asyncio.Event()
        self.armed = False

    def __call__(self) -> None:
        if self.armed and not self.event.is_set():
            self.event.set()
        else:
            self._task.cancel()
            # tasks that ignore the cancellation are not waited for
            asyncio.get_running_loop().call_later(AT_ONCE_S, os._exit, STOPPED)


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    task = asyncio.current_task()
    assert task is not None
    stop = _Stop(task)
    with listening(stop):
        yield stop


@contextmanager
def listening(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGINT and SIGTERM."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
