"""`lanekeeper cancel`: cancel one request."""

from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options
from service.cli.ending import run

if TYPE_CHECKING:
    from lanekeeper.errors import Cancelled
    from service.config.settings import Settings

TEXTS: dict["Cancelled", str] = {
    "recorded": "{id} is cancelled: it ends so wherever it waits",
    "told": "{id} is running: its worker has been told to stop",
    "ended": "{id} had ended before; how: lanekeeper result {id}",
    "unseen": "{id}: no worker has seen it; recorded for when it comes, to end as cancelled",
}


def cancel(
    id: Annotated[str, typer.Argument(metavar="ID", help="The request's id: its message_id.")],
    tenant: options.Tenant = None,
    json: options.Json = False,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Cancel a request wherever it is: queued, delayed, running.

    Its requester is answered `cancelled`. A request that has ended is not changed. A request with this id that arrives
    later is cancelled too, if it arrives within the longest deadline of all lanes (by default a day).

    Example:  lanekeeper cancel 5b0c2f6e
    """
    run(_cancel(options.settings_of(config, sets), id, tenant=tenant, json=json))


async def _cancel(settings: "Settings", id: str, *, tenant: str | None, json: bool) -> None:
    from json import dumps

    from service.cli.connecting import client_of

    async with client_of(settings) as client:
        outcome = await client.cancel(id, tenant=tenant)
    print(dumps({"id": id, "outcome": outcome}) if json else text_of(outcome, id))


def text_of(outcome: "Cancelled", id: str) -> str:
    """The sentence that the command prints for the outcome of a cancellation."""
    return TEXTS[outcome].format(id=id)
