"""Registers all commands, each of which has a separate file. A command imports what it needs only when it runs, so that
the other commands start fast."""

import sys
from functools import cache
from typing import Annotated

import typer
from typer.core import TyperGroup

from service.cli import (
    cancel,
    check,
    demo,
    gateway,
    options,
    result,
    send,
    serve,
    settings,
    simulate,
    status,
    topology,
)
from service.cli.ending import BAD_USE

LATER = ("top", "dead", "change", "pause", "resume", "pauses", "audit")
"""Names that are reserved for commands of later versions. Such a command reports that it is not available yet, which
says more than the error `No such command`."""
app = typer.Typer(
    name="lanekeeper",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(serve.serve)
app.command()(serve.consume)
app.command()(gateway.gateway)
app.add_typer(gateway.app, name="key")
app.command()(send.send)
app.command()(cancel.cancel)
app.command()(result.result)
app.command()(status.status)
app.add_typer(topology.app, name="topology")
app.command()(check.check)
app.command()(settings.settings)
app.command()(simulate.simulate)


def _absent(context: typer.Context) -> None:
    """Not available in this version."""
    print(f"lanekeeper: `{context.info_name}` is not available in this version", file=sys.stderr)
    raise typer.Exit(BAD_USE)


for _name in LATER:
    app.command(_name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        _absent
    )


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lanekeeper {options.version()}")
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
    """The group of all commands of `lanekeeper`. It is made once, because making it takes 30 ms."""
    return typer.main.get_group(app)
