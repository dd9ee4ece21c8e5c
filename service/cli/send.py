"""`lanekeeper send`: publish one request, print its answer."""

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options
from service.cli.ending import BAD_USE, FAILED, run
from service.cli.options import LaneName

if TYPE_CHECKING:
    from service.client import Wishes
    from service.settings import Settings


def send(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to ask; `-` reads standard input.")],
    lane: Annotated[LaneName, typer.Option("--lane", help="How urgent it is.")] = LaneName.CRITICAL,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")] = False,
    delay: Annotated[
        float | None, typer.Option("--delay", parser=options.seconds, metavar="DURATION", help="Start not before: 10s.")
    ] = None,
    at: Annotated[
        datetime | None,
        typer.Option("--at", parser=options.moment, metavar="TIME", help="Start not before: 2026-11-21T18:00:00Z."),
    ] = None,
    priority: Annotated[int, typer.Option("--priority", min=0, max=9, help="Inside the lane, higher first.")] = 4,
    model: Annotated[str | None, typer.Option("--model", help="Default: the lane's.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Default: the lane's.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    id: Annotated[str | None, typer.Option("--id", help="The request's id; default: one is made.")] = None,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", parser=options.seconds, metavar="DURATION", help="Answer within: 30s."),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="LANE.APP.TASK", help="The whole routing key, in place of --lane.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Without: print the id once it is published.")] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as JSON; streamed, a line a part.")
    ] = False,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Publish a request and print the answer.

    Examples:

      lanekeeper send "Name three rivers."

      lanekeeper send --lane batch --delay 10s --no-wait "Summarise this later."

      git diff | lanekeeper send --stream --system "Review this change." -
    """
    settings = options.settings_of(config, sets)
    body = {"prompt": _read() if prompt == "-" else prompt, "system": system, "model": model, "max_tokens": max_tokens}
    wishes: Wishes = {"priority": priority}
    if id is not None:
        wishes["message_id"] = id
    if deadline is not None:
        wishes["deadline_s"] = deadline
    if delay is not None:
        wishes["delay_s"] = delay
    if at is not None:
        wishes["at"] = at
    run(
        _send(
            settings,
            {name: value for name, value in body.items() if value is not None},
            key=key or f"{lane}.cli.send",
            wishes=wishes,
            wait=wait,
            stream=stream,
            json=json,
        )
    )


async def _send(
    settings: "Settings", body: dict[str, Any], *, key: str, wishes: "Wishes", wait: bool, stream: bool, json: bool
) -> None:
    from service import logs
    from service.client import Client
    from service.replies import Problem

    with logs.written(service="lanekeeper", level="error"):
        async with Client(settings.broker_url, names=settings.names(), ssl_context=settings.ssl_context()) as client:
            try:
                if not wait:
                    _print(await client.publish(body, key=key, **wishes), end="\n")
                elif stream:
                    await _print_parts(client.stream(body, key=key, **wishes), json=json)
                else:
                    answer = await client.request(body, key=key, **wishes)
                    _print(answer.body.decode() if json else answer.text, end="\n")
            except Problem as problem:
                print(
                    f"lanekeeper: {problem.code} ({problem.status}): {printable(problem.detail)} "
                    f"[request {printable(problem.request)}, {problem.attempts} attempts]",
                    file=sys.stderr,
                )
                raise typer.Exit(FAILED) from None


async def _print_parts(replies: "Any", *, json: bool) -> None:
    from json import dumps

    from service.replies import Part

    async for reply in replies:
        if not isinstance(reply, Part):
            _print(reply.body.decode() if json else "", end="\n")
        elif json:
            _print(dumps({"part": reply.kind, "seq": reply.seq, "event": reply.event}, ensure_ascii=False), end="\n")
        elif reply.kind == "restart":
            print("\n[an attempt failed: from the beginning]", file=sys.stderr)
        else:
            _print(reply.text, end="")


def _read() -> str:
    try:
        prompt = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        print(f"lanekeeper: standard input is not UTF-8: {error}", file=sys.stderr)
        raise typer.Exit(BAD_USE) from None
    if not prompt.strip():
        print("lanekeeper: standard input is empty: there is nothing to ask", file=sys.stderr)
        raise typer.Exit(BAD_USE)
    return prompt


def _print(text: str, *, end: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def printable(text: str) -> str:
    """Without control characters: what a model writes must not steer the terminal."""
    return "".join(each if each in "\n\t" or each.isprintable() else "�" for each in text)
