"""`lanekeeper serve`, `consume` and `gateway`: run a worker, the HTTP gateway, or both; `lanekeeper key new`: a key for
callers of the gateway."""

import asyncio
import json as json_text
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lanekeeper import __version__
from service.cli import options
from service.cli.options import Texts, instant, named
from service.cli.process import run_with_telemetry, stop_signals

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from consumers.spending import CapsSpec
    from service.config.loading import Changed
    from service.config.settings import GatewayKey, Settings

Simulate = Annotated[
    bool, typer.Option("--simulate", help="Answer without a provider: this process runs a simulated one.")
]


@options.with_server
def serve(given: options.Given, simulate: Simulate = False) -> None:
    """Run all parts in one process: declare the topology, work all lanes, answer HTTP calls.

    Examples:

      lanekeeper serve --simulate

      ANTHROPIC_API_KEY=… lanekeeper serve --set lanes.batch.slots=12
    """
    from service.config.loading import Changed

    new_keys = Changed(lambda settings: settings.gateway.keys, given.config, **given.values)
    new_caps = Changed(lambda settings: settings.caps.spec(), given.config, **given.values)
    settings = given.settings(for_calls=not simulate)
    serving = partial(_serve, settings, lanes=(), new_keys=new_keys, new_caps=new_caps, simulate=simulate)
    run_with_telemetry(settings, serving)


@options.with_server
def consume(
    given: options.Given,
    lanes: Annotated[Texts, named("--lane", "LANE", "Consume only this lane; can be repeated. Default: all.")] = None,
    simulate: Simulate = False,
) -> None:
    """Work lanes whose topology is declared already (`lanekeeper topology apply`).

    If several workers run on one machine, the first one uses the default port for /healthz, and the others have no
    /healthz unless a port is given.

    Example:  lanekeeper consume --lane critical --lane normal --port 8081
    """
    from service.config.loading import Changed

    new_caps = Changed(lambda settings: settings.caps.spec(), given.config, **given.values)
    settings = given.settings(for_calls=not simulate)
    consumed = options.lane_names(settings, lanes or ())
    serving = partial(_serve, settings, lanes=consumed, new_keys=None, new_caps=new_caps, simulate=simulate)
    run_with_telemetry(settings, serving)


async def _serve(
    settings: "Settings",
    traces: "TracerProvider | None",
    *,
    lanes: Sequence[str],
    new_keys: "Changed[Mapping[str, GatewayKey]] | None",
    new_caps: "Changed[CapsSpec]",
    simulate: bool,
) -> None:
    declares = new_keys is not None
    import structlog

    from consumers.background import background_task, end, restarted
    from lanekeeper.telemetry import signals
    from lanekeeper.telemetry.tracing import Tracing
    from service import checks
    from service.cli.process import SERVICE_NAME
    from service.config.settings import simulating
    from service.gateway.app import Gateway, client_for
    from service.gateway.server import CannotListen, Server
    from service.metrics import measuring, of_client, of_http
    from service.simulated.app import SimulatedAPI
    from service.telemetry.exporters import resource_of
    from service.worker import running as worker
    from service.worker.assembly import assemble
    from service.worker.figures import sources
    from service.worker.running import reread_caps, tune

    log = structlog.get_logger()
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        if simulate:
            api = await stack.enter_async_context(SimulatedAPI())
            settings = simulating(settings, api.base_url)
        await checks.refuse_risks(settings)
        checks.warn_of_plain_text(settings)
        checks.warn_of_unpriced(settings)
        parts = await stack.enter_async_context(
            assemble(settings, lanes=lanes, declares=declares, traces=traces, simulated=simulate)
        )
        metrics = await stack.enter_async_context(measuring(resource_of(SERVICE_NAME), otlp_url=settings.metrics_url))
        metrics.add(*sources(parts, tenants=settings.metrics.tenants, store_url=settings.store))
        gateway = None
        if new_keys is not None:
            client = await stack.enter_async_context(client_for(settings, Tracing(traces)))
            gateway = Gateway(settings, client, parts.store, new_keys=new_keys)
            if client.amqp is not None:
                parts.settler.replies.here = client.amqp.direct
            metrics.add(partial(of_client, client))

        def reasons() -> Mapping[str, str | None]:
            return {**parts.reasons(), **({} if gateway is None else gateway.reasons())}

        server = Server(
            reasons,
            host=settings.gateway.host,
            port=settings.gateway.port,
            paths=gateway,
            limitations=parts.limitations,
            scrape=metrics.scrape,
        )
        metrics.add(lambda: of_http(server.times, is_ready=server.is_ready))
        health_url = None
        try:
            await stack.enter_async_context(server)
            health_url = server.url
        except CannotListen as error:
            if declares or "gateway" in settings.model_fields_set:
                raise
            log.warning(signals.HEALTH_ABSENT, reason=str(error))  # another worker has the default port

        def ready() -> None:
            providers = ["simulated"] if simulate else [provider.name for provider in settings.routes_spec().providers]
            log.info(
                signals.SERVICE_READY,
                version=__version__,
                lanes=[lane.name for lane in parts.lanes],
                broker=settings.broker,
                providers=providers,
                health=health_url,
            )

        async def drain() -> None:
            await stop.event.wait()
            await server.drained(within_s=settings.grace_s)

        tune()
        stop.armed = True
        draining = asyncio.create_task(drain(), name="drain")
        rereading = restarted(partial(reread_caps, parts.budgeting.spending, new_caps), name="caps")
        try:
            async with background_task(rereading, name="caps"):
                await worker.run(parts, stop=stop.event, grace_s=settings.grace_s, on_ready=ready)
            await draining  # other workers may still answer calls of this gateway
        finally:
            await end((draining,))


@options.with_server
def gateway(given: options.Given) -> None:
    """Answer HTTP calls through the lanes. Other processes consume the lanes (`lanekeeper consume`).

    Any number of gateways can run behind a load balancer; they share the broker and the workers' store.

    Example:  lanekeeper gateway --port 8081
    """
    from service.config.loading import Changed

    new_keys = Changed(lambda settings: settings.gateway.keys, given.config, **given.values)
    settings = given.settings()
    run_with_telemetry(settings, partial(_gateway, settings, new_keys))


async def _gateway(
    settings: "Settings", new_keys: "Changed[Mapping[str, GatewayKey]]", traces: "TracerProvider | None"
) -> None:
    import structlog

    from consumers.state import open_store
    from lanekeeper.telemetry import signals
    from lanekeeper.telemetry.tracing import Tracing
    from service import checks
    from service.cli.process import SERVICE_NAME
    from service.gateway.app import Gateway, client_for
    from service.gateway.server import Server
    from service.metrics import measuring, of_client, of_http, of_store
    from service.telemetry.exporters import resource_of

    log = structlog.get_logger()
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        checks.warn_of_plain_text(settings)
        client = await stack.enter_async_context(client_for(settings, Tracing(traces)))
        store = await stack.enter_async_context(
            open_store(settings.store, namespace=settings.namespace, spec=settings.store_spec())
        )
        routes = Gateway(settings, client, store, new_keys=new_keys)
        spec = settings.gateway
        metrics = await stack.enter_async_context(measuring(resource_of(SERVICE_NAME), otlp_url=settings.metrics_url))
        metrics.add(partial(of_client, client))
        metrics.add(lambda: of_store(store.times, url=settings.store, trouble=store.trouble))
        http = Server(routes.reasons, host=spec.host, port=spec.port, paths=routes, scrape=metrics.scrape)
        server = await stack.enter_async_context(http)
        metrics.add(lambda: of_http(server.times, is_ready=server.is_ready))
        log.info(
            signals.GATEWAY_READY,
            version=__version__,
            broker=settings.broker,
            url=server.url,
            keys=len(spec.keys),
        )
        stop.armed = True
        await stop.event.wait()
        log.info(signals.SERVICE_STOPPING, running=routes.calls, grace_s=settings.grace_s)
        await server.drained(within_s=settings.grace_s)
        log.info(signals.SERVICE_STOPPED, orphaned=routes.calls)


keys = typer.Typer(no_args_is_help=True, help="Keys of the gateway.")


@keys.command("new")
def new_key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant of the requests made with the key.")],
    lanes: Annotated[
        Texts,
        named("--lane", "LANE", "A lane that calls may name; can be repeated, the first is the default. Default: all."),
    ] = None,
    models: Annotated[
        Texts, typer.Option("--model", help="A model that calls may name; can be repeated. Default: all.")
    ] = None,
    pipelines: Annotated[
        Texts,
        typer.Option(
            "--pipeline",
            help="A pipeline that calls may run although it uses other lanes or models; can be repeated.",
        ),
    ] = None,
    expires: Annotated[
        datetime | None, instant("--expires", "When the key expires, such as 2027-01-31T18:00:00Z.")
    ] = None,
    operator: Annotated[
        Literal["look", "act"] | None,
        typer.Option(
            "--operator",
            help="Whether its caller may see (look), or also change (act), what all tenants' requests do, such as "
            "dead letters. Default: neither.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Make an API key for a caller of the gateway, print it once, and print what to add to the settings: only the key's
    hash.

    Example:  lanekeeper key new crm --lane normal --lane batch
    """
    from lanekeeper.contract.identity import TENANT
    from service.config.value_types import read_tenant
    from service.gateway import access

    try:
        read_tenant(tenant)
    except ValueError:
        raise typer.BadParameter(TENANT, param_hint="TENANT") from None
    key = access.random_key()
    hashed = access.hash_of(key)
    until = None if expires is None else expires.isoformat()
    given = {
        "tenant": tenant,
        "lanes": lanes,
        "models": models,
        "pipelines": pipelines,
        "expires": until,
        "operator": operator,
    }
    allowed = {name: value for name, value in given.items() if value}
    if json:
        print(json_text.dumps({"key": key, "keys": {hashed: allowed}}))
        return
    print(f"key, for the caller; it is shown this once: {key}\n")
    print(f"for lanekeeper.toml of the gateway:\n\n[gateway.keys.{hashed}]")
    for name, value in allowed.items():
        print(f"{name} = {json_text.dumps(value, ensure_ascii=False)}")
