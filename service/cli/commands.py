"""The group of all commands. A command imports what it needs only when it runs, so that other commands start fast."""

from functools import cache
from typing import Annotated

import typer
from typer.core import TyperGroup

from lanekeeper import __version__
from service.cli import (
    batch,
    brake,
    dead,
    init,
    providers,
    requests,
    schedules,
    serve,
    simulate,
    status,
    topology,
    webhooks,
)

app = typer.Typer(
    name="lanekeeper",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    simulate.demo, init.init, serve.serve, serve.consume, serve.gateway, requests.send, requests.cancel,
    requests.result, status.status, status.top, brake.pause, brake.resume, brake.pauses, status.check, status.settings,
    simulate.simulate,
):  # fmt: skip
    app.command()(command)
app.add_typer(serve.keys, name="key")
app.add_typer(batch.app, name="batch")
app.add_typer(dead.app, name="dead")
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(schedules.app, name="schedules")
app.add_typer(providers.app, name="providers")
app.add_typer(requests.app, name="requests")
app.add_typer(topology.app, name="topology")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lanekeeper {__version__}")
        raise typer.Exit


@app.callback()
def lanekeeper(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Route AI requests over RabbitMQ: urgent first, nothing lost.

    Settings come from options, LANEKEEPER_* in the environment, .env, and lanekeeper.toml; each of these overrides
    those named after it.
    """


@cache
def every() -> TyperGroup:
    """The group of all commands; made once, because making it takes 30 ms."""
    return typer.main.get_group(app)
