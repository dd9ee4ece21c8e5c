"""Names that are reserved for commands of later versions. They report that they are not available yet; without them,
the error would be `No such command`."""

import sys

import typer

from service.cli.ending import BAD_USE

COMMANDS = ("top", "dead", "change", "pause", "resume", "pauses", "audit")
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def absent(context: typer.Context) -> None:
    """Not available in this version."""
    print(f"lanekeeper: `{context.info_name}` is not available in this version", file=sys.stderr)
    raise typer.Exit(BAD_USE)
