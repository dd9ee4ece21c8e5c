"""`lanekeeper result`: fetch the answer to one request."""

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options
from service.cli.answers import print_answer, tell_problem
from service.cli.ending import FAILED, run

if TYPE_CHECKING:
    from service.config.settings import Settings


def result(
    id: Annotated[str, typer.Argument(metavar="ID", help="The request's id: its message_id.")],
    tenant: options.Tenant = None,
    wait: Annotated[
        float | None,
        typer.Option("--wait", parser=options.seconds, metavar="DURATION", help="How long to wait for its end: 20s."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Print the answer to a request that was published before, by this command or any other client.

    The exit code is 1 if the request ended in an error, or has not ended yet.

    Example:  lanekeeper result --wait 20s 5b0c2f6e
    """
    run(_result(options.settings_of(config, sets), id, tenant=tenant, wait_s=wait or 0, json=json))


async def _result(settings: "Settings", id: str, *, tenant: str | None, wait_s: float, json: bool) -> None:
    from lanekeeper.replies import Problem
    from service.cli.connecting import client_of

    async with client_of(settings) as client:
        try:
            print_answer(await client.result(id, tenant=tenant, wait_s=wait_s), json=json)
        except Problem as problem:
            tell_problem(problem)
            raise typer.Exit(FAILED) from None
