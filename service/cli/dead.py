"""`lanekeeper dead`: list dead letters by cause, show one, replay, drop, export and import them."""

import json as json_text
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lanekeeper.contract.names import ERRORS, STRIPPED_ON_REPUBLISH
from service.cli import options
from service.cli.options import Texts, named
from service.cli.process import FAILED, connected, print_json, print_note, printable, run

if TYPE_CHECKING:
    from rich.table import Table

    from service.config.settings import Settings
    from service.deadletters import DeadLetters, Filter

T = TypeVar("T")
Tenants = Annotated[Texts, typer.Option("--tenant", help="Whose request it is.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters, instead of a choice.")]
SHOWN = 160
WHOLE = ("at", "id", "cause", "count", "again", "newest")
"""The columns of `dead list` that are never cut: ids and causes are copied."""

app = typer.Typer(no_args_is_help=True, help="Dead letters: failed requests that are kept to be mended and run again.")


@options.taking
def chosen(
    ids: Annotated[Texts, typer.Argument(metavar="[ID]...", help="The ids of requests.")] = None,
    codes: Annotated[Texts, typer.Option("--code", help="The error's code, such as provider_rejected.")] = None,
    lanes: Annotated[Texts, typer.Option("--lane", help="The lane to which it was published.")] = None,
    apps: Annotated[Texts, typer.Option("--app", help="The application in its routing key.")] = None,
    tenants: Tenants = None,
    causes: Annotated[Texts, typer.Option("--cause", help="The cause, as `dead list` shows it.")] = None,
    since: Annotated[
        str | None, named("--since", "TIME", "Only later ones: a duration ago (2h) or a time (RFC 3339).")
    ] = None,
) -> "Filter":
    """The letters that these options choose. Raises typer.BadParameter."""
    from service.deadletters import Filter

    given: dict[str, Any] = {
        "ids": ids,
        "codes": codes,
        "lanes": lanes,
        "apps": apps,
        "tenants": tenants,
        "causes": causes,
    }
    since_ms = 0 if since is None else int(1000 * options.moment_or_ago(since).timestamp())
    return Filter(since_ms=since_ms, **{name: frozenset(values or ()) for name, values in given.items()})


def _require_choice(wanted: "Filter", *, everything: bool) -> None:
    if wanted.is_empty and not everything:
        raise typer.BadParameter("name dead letters by id, or by --cause, --code, --lane, …, or say --all")


def _with_letters(settings: "Settings", work: "Callable[[DeadLetters], Awaitable[T]]") -> T:
    from service.deadletters import DeadLetters

    async def working() -> T:
        async with connected(settings, "dead") as connection:
            return await work(DeadLetters(settings, connection))

    return run(working())


@app.command("list")
@chosen
@options.with_settings
def list_(
    settings: "Settings",
    wanted: "Filter",
    limit: Annotated[int, typer.Option("--limit", min=0, max=200, help="How many letters to list.")] = 20,
    after: Annotated[str | None, typer.Option("--after", help="The next page: what the page before named.")] = None,
    json: options.Json = False,
) -> None:
    """Count dead letters by cause, and list the newest.

    Example:  lanekeeper dead list --code provider_rejected --since 2h
    """
    from service.deadletters import position

    try:
        begin = None if after is None else position(after)
    except ValueError:
        raise typer.BadParameter("not what a page named as the next", param_hint="--after") from None
    overview = _with_letters(settings, lambda letters: letters.overview(wanted, limit=limit, after=begin))
    found = overview.as_json(jaeger_url=settings.traces_page)
    if json:
        print_json(found)
    else:
        _print_overview(found)


def _print_overview(found: dict[str, Any]) -> None:
    from rich.console import Console

    if not found["matched"]:
        print(f"none of {found['total']} dead letters match" if found["total"] else "no dead letters")
        return
    console = Console()
    causes = [
        {
            "cause": group["cause"],
            "count": str(group["count"]),
            "last hour": str(group["last_hour"] or ""),
            "again": str(group["relapses"] or ""),
            "newest": _short(group["newest"]),
            "error": shorten(f"{group['code']}: {group['error']}", SHOWN, placeholder=" …"),
        }
        for group in found["groups"]
    ]
    console.print(_table(causes))
    if found["letters"]:
        names = ("id", "lane", "app", "tenant", "cause")
        letters = [
            {"at": _short(each["at"]), **{name: each[name] for name in names}, "again": str(each["replays"] or "")}
            for each in found["letters"]
        ]
        console.print()
        console.print(_table(letters))
    of = "" if found["matched"] == found["total"] else f" of {found['total']}"
    print(f"\n{found['matched']}{of} dead letters; again: those that were replayed before")
    if found["next"] is not None:
        print(f"the next page: --after {found['next']}")


def _table(rows: "Sequence[Mapping[str, str]]") -> "Table":
    """Columns without a value are left out. Where there is no room, errors are wrapped, and names are cut with `…`."""
    from rich.table import Table
    from rich.text import Text

    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in titles:
        table.add_column(
            Text(title, no_wrap=True),
            no_wrap=title in WHOLE,
            justify="right" if title in ("count", "last hour", "again") else "left",
        )
    for row in rows:
        cells = ((printable(row[title]), title != "error") for title in titles)
        table.add_row(*(Text(text, no_wrap=name, overflow="ellipsis" if name else "fold") for text, name in cells))
    return table


def _short(at: str) -> str:
    return at[5:19].replace("T", " ")  # the year is left out, so that names have room


@app.command()
@options.with_settings
def show(
    settings: "Settings",
    id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    tenants: Tenants = None,
    json: options.Json = False,
) -> None:
    """Show one dead letter: why it failed, its attempts, headers and body, and its trace."""
    from service.deadletters import Filter, whole

    wanted = Filter(ids=frozenset({id}), tenants=frozenset(tenants or ()))
    if (letter := _with_letters(settings, lambda letters: letters.find(wanted))) is None:
        print_note(f"no dead letter has the id {printable(id)}")
        raise typer.Exit(FAILED)
    found = whole(letter, jaeger_url=settings.traces_page)
    if json:
        print_json(found)
        return
    message = found.pop("message")
    body, errors = message.pop("body", None), found.pop("errors")
    hidden = ("message_id", "body_base64", ERRORS, *STRIPPED_ON_REPUBLISH)  # the errors are below, in plain text
    for name, value in {**found, **message.pop("headers"), **message}.items():
        if value not in ("", None) and not name.startswith(hidden):
            text = value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)
            print(f"{printable(name)}: {printable(text)}")
    for error in errors:
        print(f"error: {printable(error)}")
    if body is None:
        print(f"\nbody, in base64, because it is no JSON in UTF-8:\n{message['body_base64']}")
    else:
        print()
        print_json(json_text.loads(body))


@app.command()
@chosen
@options.with_settings
def replay(
    settings: "Settings",
    wanted: "Filter",
    everything: All = False,
    edit: Annotated[
        Path | None, named("--edit", "PATCH.json", "A JSON Merge Patch (RFC 7396) for the body of each.")
    ] = None,
    to_lane: Annotated[str | None, typer.Option("--to-lane", help="Run it in this lane.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Call this model.")] = None,
    rate: options.Rate = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check and count.")] = False,
    json: options.Json = False,
) -> None:
    """Run requests again: publish each with its id, then remove its dead letter.

    If one of the chosen letters cannot be published again, or the edit does not apply to it, nothing is sent. A replay
    that is interrupted can be repeated: what has run does not run again.

    Example:  lanekeeper dead replay --cause 5f3a09c1 --edit mended.json --rate 5
    """
    from service.deadletters import LetterEdit, ReplayRefused

    _require_choice(wanted, everything=everything)
    try:
        patch = None if edit is None else json_text.loads(edit.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise typer.BadParameter(
            f"{edit}: {why}; give a file that holds a JSON Merge Patch", param_hint="--edit"
        ) from None
    try:
        change = LetterEdit(patch=patch, to_lane=to_lane, model=model)
    except ReplayRefused as error:
        raise typer.BadParameter(f"{edit}: {error}", param_hint="--edit") from None
    done = _with_letters(settings, lambda letters: letters.replay(wanted, change, rate_per_s=rate, dry_run=dry_run))
    if json:
        print_json(done.as_json())
    else:
        for refused in done.refused:
            print_note(printable(f"{refused['id']}: {refused['reason']}"))
        if done.refusals:
            print_note(f"{done.refusals} of {done.matched} cannot be replayed, so nothing was sent")
        elif dry_run:
            print(f"{done.matched} would be replayed")
        else:
            print(f"{done.replayed} replayed" + (f", {done.left} left: others hold them" if done.left else ""))
    if done.refusals or not done.matched or (done.left and not dry_run):
        raise typer.Exit(FAILED)


@app.command()
@chosen
@options.with_settings
def drop(
    settings: "Settings",
    wanted: "Filter",
    everything: All = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: options.Json = False,
) -> None:
    """Remove dead letters for good. Export them before, if somebody may want them."""
    _require_choice(wanted, everything=everything)
    if not yes:
        matched = _with_letters(settings, lambda letters: letters.overview(wanted, limit=0)).matched
        typer.confirm(f"drop {matched} dead letters for good?", abort=True, err=True)
    dropped = _with_letters(settings, lambda letters: letters.drop(wanted))
    print(json_text.dumps({"dropped": dropped}) if json else f"{dropped} dropped")
    if not dropped:
        raise typer.Exit(FAILED)


@app.command()
@chosen
@options.with_settings
def export(settings: "Settings", wanted: "Filter") -> None:
    """Write dead letters to standard output, as lines of JSON. They stay where they are.

    Example:  lanekeeper dead export --cause 5f3a09c1 > letters.jsonl
    """
    exported = _with_letters(settings, lambda letters: letters.export(wanted, sys.stdout.buffer.write))
    sys.stdout.buffer.flush()
    print_note(f"{exported} exported")


@app.command("import")
@options.with_settings
def import_(
    settings: "Settings",
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Lines of `dead export`.")],
) -> None:
    """Put exported dead letters back, or those of another installation. A wrong line is told before any is put."""
    from topology.broker.deadletters import message_of_line

    for number, line in enumerate(_lines(file), 1):
        try:
            message_of_line(line)
        except ValueError as error:
            raise typer.BadParameter(f"line {number}: {error}", param_hint="FILE") from None
    imported = _with_letters(settings, lambda letters: letters.import_(_lines(file)))
    print(f"{imported} imported")


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from (line for line in lines if line.strip())
