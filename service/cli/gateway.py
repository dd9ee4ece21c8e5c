"""`lanekeeper gateway`: the HTTP gateway by itself; `lanekeeper key new`: a key for its callers."""

import json as jsons
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options
from service.cli.options import LaneName
from service.cli.process import run_with_telemetry, stop_signals
from service.cli.serve import Host, Port

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from service.config.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Keys of the gateway.")


def gateway(host: Host = None, port: Port = None, config: options.Config = None, sets: options.Set = None) -> None:
    """Answer HTTP calls through the lanes. Other processes consume the lanes (`lanekeeper consume`).

    Any number of gateways can run behind a load balancer; they share the broker and the workers' store.

    Example:  lanekeeper gateway --port 8081
    """
    settings = options.settings_of(config, sets, gateway={"host": host, "port": port})
    run_with_telemetry(settings, partial(_run, settings))


async def _run(settings: "Settings", traces: "TracerProvider | None") -> None:
    from consumers.state.opening import open_store
    from lanekeeper.telemetry import signals
    from lanekeeper.telemetry.logs import logger
    from lanekeeper.telemetry.tracing import Tracing
    from service.checks import production
    from service.gateway.app import Gateway, client_for
    from service.gateway.server import Server

    log = logger()
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        production.warn_of_plain_text(settings)
        client = await stack.enter_async_context(client_for(settings, Tracing(traces)))
        store = await stack.enter_async_context(
            open_store(settings.store, namespace=settings.namespace, spec=settings.store_spec())
        )
        routes = Gateway(settings, client, store)
        spec = settings.gateway
        server = await stack.enter_async_context(Server(routes.reasons, host=spec.host, port=spec.port, routes=routes))
        log.info(
            signals.GATEWAY_READY,
            version=options.version(),
            broker=settings.broker,
            url=server.url,
            keys=len(spec.keys),
        )
        stop.armed = True
        await stop.event.wait()
        log.info(signals.SERVICE_STOPPING, running=routes.calls, grace_s=settings.grace_s)
        await server.drained(within_s=settings.grace_s)
        log.info(signals.SERVICE_STOPPED, orphaned=routes.calls)


@app.command("new")
def new(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant of the requests made with the key.")],
    lanes: Annotated[
        list[LaneName] | None,
        typer.Option(
            "--lane", help="A lane that calls may name; can be repeated, the first is the default. Default: all."
        ),
    ] = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", help="A model that calls may name; can be repeated. Default: all.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Make an API key for a caller of the gateway, print it once, and print what to add to the settings: only the key's
    hash.

    Example:  lanekeeper key new crm --lane normal --lane batch
    """
    from service.config.table_types import read_tenant
    from service.gateway.access import hash_of, new_key

    try:
        read_tenant(tenant)
    except ValueError:
        raise typer.BadParameter(
            "a name of 1 to 255 characters that can be printed, without * and without spaces around it",
            param_hint="TENANT",
        ) from None
    key = new_key()
    hashed = hash_of(key)
    allowed: dict[str, object] = {"tenant": tenant}
    if lanes:
        allowed["lanes"] = lanes
    if models:
        allowed["models"] = models
    if json:
        print(jsons.dumps({"key": key, "keys": {hashed: allowed}}))
        return
    print(f"key, for the caller; it is shown this once: {key}\n")
    print(f"for lanekeeper.toml of the gateway:\n\n[gateway.keys.{hashed}]")
    for name, value in allowed.items():
        print(f"{name} = {jsons.dumps(value, ensure_ascii=False)}")
