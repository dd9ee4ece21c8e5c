"""`lanekeeper send`: publish one request, and print its answer."""

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lanekeeper.contract.problems import AccessRefused
from service.cli import options
from service.cli.answers import print_answer, print_text, printable, tell_problem
from service.cli.cancel import text_of
from service.cli.ending import BAD_USE, FAILED, run
from service.cli.options import LaneName
from service.cli.traced import tell_trace_of, traced

if TYPE_CHECKING:
    from lanekeeper import Client
    from lanekeeper.options import Options
    from lanekeeper.replies import Final, Part
    from lanekeeper.telemetry.tracing import Tracing
    from service.config.settings import Settings

DEFAULT_KEY = "{lane}.cli.send"
QUIET_S = 2.0
"""After this many seconds without an answer, `lanekeeper send` checks whether the lane has a worker. Most answers come
sooner."""


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
    priority: Annotated[int, typer.Option("--priority", min=0, max=9, help="Within the lane; higher ones first.")] = 4,
    model: Annotated[str | None, typer.Option("--model", help="Default: the lane's.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Default: the lane's.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    id: Annotated[str | None, typer.Option("--id", help="The request's id; default: one is made.")] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", parser=options.seconds, metavar="DURATION", help="Answer within: 30s.")
    ] = None,
    tenant: options.Tenant = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="LANE.APP.TASK", help="The whole routing key, in place of --lane.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="--no-wait: only publish, and print the id.")] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as JSON; with --stream, one line for each part.")
    ] = False,
    config: options.Config = None,
    sets: options.Set = None,
) -> None:
    """Publish a request and print the answer. The request's id is printed first, on standard error. Ctrl-C cancels the
    request, and says so.

    Examples:

      lanekeeper send "Name three rivers."

      lanekeeper send --lane batch --delay 10s --no-wait "Summarise this later."

      git diff | lanekeeper send --stream --system "Review this change." -
    """
    settings = options.settings_of(config, sets)
    _warn_of_ignored(tenant, settings)
    if prompt == "-":
        prompt = _read_stdin()
    body = _given(prompt=prompt, system=system, model=model, max_tokens=max_tokens)
    publish_options = _given(priority=priority, message_id=id, tenant=tenant, deadline_s=deadline, delay_s=delay, at=at)
    with traced(settings) as tracing:
        run(
            _send(
                settings,
                body,
                key=key or DEFAULT_KEY.format(lane=lane),
                publish_options=cast("Options", publish_options),
                wait=wait,
                stream=stream,
                json=json,
                tracing=tracing,
            )
        )


def _given(**values: Any) -> dict[str, Any]:
    """The options that the user has given: those whose value is not None."""
    return {name: value for name, value in values.items() if value is not None}


async def _send(
    settings: "Settings",
    body: dict[str, Any],
    *,
    key: str,
    publish_options: "Options",
    wait: bool,
    stream: bool,
    json: bool,
    tracing: "Tracing",
) -> None:
    from lanekeeper.replies import Problem
    from service.cli.connecting import client_of
    from service.side_tasks import beside

    id = publish_options.setdefault("message_id", uuid.uuid4().hex)
    async with client_of(settings, tracing=tracing) as client:
        try:
            if not wait:
                print_text(await client.publish(body, key=key, **publish_options), end="\n")
                return
            print(f"lanekeeper: request {printable(id)}", file=sys.stderr, flush=True)
            lane = key.partition(".")[0]
            timeout_s = _longest_wait_s(settings, lane, publish_options)
            async with beside(_warn_if_no_worker(client, lane), name="watch"):
                if stream:
                    await _print_parts(client.stream(body, key=key, timeout_s=timeout_s, **publish_options), json=json)
                else:
                    answer = await client.request(body, key=key, timeout_s=timeout_s, **publish_options)
                    print_answer(answer, json=json)
                    tell_trace_of(answer)
        except Problem as problem:
            tell_problem(problem)
            raise typer.Exit(FAILED) from None
        except AccessRefused as refused:
            raise _with_advice(refused, key, settings) from refused
        except asyncio.CancelledError:
            if wait:
                await _cancel(client, id, tenant=publish_options.get("tenant"))
            raise


async def _cancel(client: "Client", id: str, *, tenant: str | None) -> None:
    """Called after Ctrl-C: cancel the request, and print the outcome. A second Ctrl-C ends the command at once."""
    from lanekeeper import LanekeeperError, NoReply

    print(f"lanekeeper: cancelling {id}; Ctrl-C again leaves it running", file=sys.stderr, flush=True)
    try:
        text = text_of(await client.cancel(id, tenant=tenant), id)
    except NoReply as kept:
        text = f"{id}: its cancellation is kept by the broker: {kept}"
    except LanekeeperError as error:
        text = f"{id} is left running, it could not be cancelled: {error}; to fetch its answer: lanekeeper result {id}"
    print(f"lanekeeper: {text}", file=sys.stderr, flush=True)


def _warn_of_ignored(tenant: str | None, settings: "Settings") -> None:
    """Print a warning if workers will ignore the tenant of the option `--tenant`, because the AMQP user may not act for
    this tenant."""
    user, _ = settings.credentials
    if tenant not in (None, user) and user not in settings.speakers:
        print(
            f"lanekeeper: user {user} is not in LANEKEEPER_SPEAKERS here: where the workers' settings say the same, "
            f"--tenant {tenant} is ignored, and the request is {user}'s",
            file=sys.stderr,
        )


def _with_advice(refused: AccessRefused, key: str, settings: "Settings") -> AccessRefused:
    """Add advice to an AccessRefused if the default routing key was used: an application may publish only with routing
    keys whose second word is its own name. If another routing key was used, the error is returned unchanged."""
    user, _ = settings.credentials
    lane = key.partition(".")[0]
    if key != DEFAULT_KEY.format(lane=lane):
        return refused
    return AccessRefused(
        f"{refused}; a user that may publish under its own name alone says so: --key {lane}.{user}.send, "
        "with a lane that it may use"
    )


def _longest_wait_s(settings: "Settings", lane: str, publish_options: "Options") -> float:
    """How long the command waits for the answer: the request's delay plus its deadline, which is by default the lane's
    deadline. If no worker runs, nothing else ends the wait. If the routing key names no lane, the longest deadline of
    all lanes is used; this has no effect, because such a request is refused at once."""
    from lanekeeper.options import ANSWER_LATE_S

    deadlines_s = {spec.name: spec.deadline_s for spec in settings.lane_specs()}
    deadline_s = publish_options.get("deadline_s", deadlines_s.get(lane, max(deadlines_s.values())))
    at = publish_options.get("at")
    until_at_s = 0.0 if at is None else max(0.0, (at - datetime.now(UTC)).total_seconds())
    return max(publish_options.get("delay_s", 0.0), until_at_s) + deadline_s + ANSWER_LATE_S


async def _warn_if_no_worker(client: "Client", lane: str) -> None:
    """Wait for `QUIET_S`, then print a warning if no worker consumes the lane."""
    await asyncio.sleep(QUIET_S)
    depth = await client.depth(lane)
    if depth is not None and not depth.consumers:
        print(
            f"lanekeeper: no worker takes the lane {lane}: the request waits; start one with `lanekeeper serve` or "
            "`lanekeeper consume`",
            file=sys.stderr,
        )


async def _print_parts(replies: "AsyncGenerator[Part | Final, None]", *, json: bool) -> None:
    from json import dumps

    from lanekeeper.replies import Part

    async for reply in replies:
        if not isinstance(reply, Part):
            print_text(reply.body.decode() if json else "", end="\n")
            tell_trace_of(reply)
        elif json:
            print_text(
                dumps({"part": reply.kind, "seq": reply.seq, "event": reply.event}, ensure_ascii=False), end="\n"
            )
        elif reply.kind == "restart":
            print("\n[an attempt failed: from the beginning]", file=sys.stderr)
        else:
            print_text(reply.text, end="")


def _read_stdin() -> str:
    try:
        prompt = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        print(f"lanekeeper: standard input is not UTF-8: {error}", file=sys.stderr)
        raise typer.Exit(BAD_USE) from None
    if not prompt.strip():
        print("lanekeeper: standard input is empty: there is nothing to ask", file=sys.stderr)
        raise typer.Exit(BAD_USE)
    return prompt
