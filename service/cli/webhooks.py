"""`lanekeeper webhooks`: list how posts went, and post an outcome again."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lanekeeper.contract import names as n
from service.cli import options
from service.cli.brake import ask
from service.cli.process import print_json, printable, run

if TYPE_CHECKING:
    from service.config.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Webhooks: how the posts of outcomes went.")


@app.command("list")
@options.with_settings
def list_(
    settings: "Settings",
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="A request's id; default: the last hundred.")] = None,
    tenant: options.Tenant = None,
    json: options.Json = False,
) -> None:
    """List requests with a webhook: where it stands, and how the last attempts failed.

    Example:  lanekeeper webhooks list --json
    """
    wanted = {} if id is None else {n.WEBHOOKS_KEY: id, "tenant": tenant}
    found = run(ask(settings, n.WEBHOOKS_KEY, wanted))["webhooks"]
    if json:
        print_json(found)
        return
    for each in found:
        print(_line(each))
        for error in each["errors"] if id is not None else ():
            print(printable(f"  {error}"))
    if not found:
        print("no webhook is known")


@app.command()
@options.with_settings
def redeliver(
    settings: "Settings",
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The ids of requests.")],
    tenant: options.Tenant = None,
) -> None:
    """Post outcomes again, as long as they are kept. Of dead letters, see `lanekeeper dead replay`.

    Example:  lanekeeper webhooks redeliver 5b0c2f6e
    """
    for id in ids:
        for each in run(ask(settings, n.REDELIVER_KEY, {n.REDELIVER_KEY: id, "tenant": tenant}))["webhooks"]:
            print(printable(f"{each['id']} is posted again to {each['endpoint']}"))


def _line(row: dict[str, Any]) -> str:
    tenant = f" of {row['tenant']}" if row["tenant"] else ""
    return printable(f"{row['id']}{tenant}  {course(row)}")


def course(row: Mapping[str, Any]) -> str:
    """Where posting an outcome stands."""
    then = f", next at {row['next_at']}" if row["next_at"] else ""
    tries = "1 attempt" if row["attempts"] == 1 else f"{row['attempts']} attempts"
    return f"{row['endpoint']}  {row['state']} at {row['at']} after {tries}{then}"
