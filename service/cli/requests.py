"""`lanekeeper send`, `cancel` and `result`: publish a request and print its answer; cancel it; fetch its answer."""

import asyncio
import json as json_text
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lanekeeper.contract.identity import encodable
from lanekeeper.contract.problems import AccessRefused
from service.cli import options
from service.cli.options import duration, instant, named
from service.cli.process import BAD_USE, FAILED, SERVICE_NAME, connected, print_json, print_note, printable, run
from service.cli.webhooks import course
from service.telemetry import redaction

if TYPE_CHECKING:
    from consumers.state.base import RequestFilter
    from consumers.state.store import Store
    from lanekeeper import Client
    from lanekeeper.replies import Cancelled, Final, Part
    from lanekeeper.requests import Options
    from lanekeeper.telemetry.tracing import Tracing
    from service.config.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Requests of all tenants, for operators.")
DEFAULT_KEY = "{lane}.cli.send"
QUIET_S = 2.0
CANCELLED: dict["Cancelled", str] = {
    "recorded": "{id} is cancelled: it ends so wherever it waits",
    "told": "{id} is running: its worker has been told to stop",
    "ended": "{id} had ended before; how: lanekeeper result {id}",
    "unseen": "{id}: no worker has seen it; recorded for when it comes, to end as cancelled. "
    "If it is another tenant's: lanekeeper requests find {id}",
}
Texts = list[str] | None
Id = Annotated[str, typer.Argument(metavar="ID", help="The request's id: its message_id.")]


@options.with_settings
def send(
    settings: "Settings",
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="What to ask; `-` reads standard input. For --type and --pipeline JSON, or else a text.",
        ),
    ],
    lane: Annotated[
        str | None, named("--lane", "LANE", "How urgent it is; default: the most urgent one (over HTTP: normal).")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")] = False,
    delay: Annotated[float | None, duration("--delay", "Start not before: 10s.")] = None,
    at: Annotated[datetime | None, instant("--at", "Start not before: 2026-11-21T18:00:00Z.")] = None,
    priority: Annotated[int, typer.Option("--priority", min=0, max=9, help="Within the lane; higher ones first.")] = 4,
    model: Annotated[str | None, typer.Option("--model", help="Default: the lane's.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Default: the lane's.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    id: Annotated[str | None, typer.Option("--id", help="The request's id; default: one is made.")] = None,
    deadline: Annotated[float | None, duration("--deadline", "Answer within: 30s.")] = None,
    type: Annotated[str | None, named("--type", "HANDLER", "The handler that answers, in place of a model.")] = None,
    pipeline: Annotated[str | None, named("--pipeline", "NAME", "The pipeline to run.")] = None,
    webhook: Annotated[str | None, named("--webhook", "URL", "Where the outcome is posted.")] = None,
    debounce: Annotated[
        str | None, named("--debounce", "KEY", "Of requests with one key only the last runs; needs --delay.")
    ] = None,
    tenant: options.Tenant = None,
    key: Annotated[str | None, named("--key", "LANE.APP.TASK", "The whole routing key, in place of --lane.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="--no-wait: only publish, and print the id.")] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as JSON; with --stream, one line for each part.")
    ] = False,
) -> None:
    """Publish a request and print the answer. The request's id is printed first, on standard error. Ctrl-C cancels the
    request, and says so.

    Examples:

      lanekeeper send "Name three rivers."

      lanekeeper send --lane batch --delay 10s --no-wait "Summarise this later."

      git diff | lanekeeper send --stream --system "Review this change." -

      lanekeeper send --pipeline ingest '{"text": "…"}'
    """
    user, _ = settings.credentials
    if tenant not in (None, user) and user not in settings.speakers:
        print_note(
            f"user {user} is not in LANEKEEPER_SPEAKERS here: where the workers' settings say the same, "
            f"--tenant {tenant} is ignored, and the request is {user}'s"
        )
    if prompt == "-":
        prompt = _read_stdin()
    about_a_model = _given(system=system, model=model, max_tokens=max_tokens)
    is_for_a_model = type is None and pipeline is None
    if about_a_model and not is_for_a_model:
        raise typer.BadParameter("--system, --model and --max-tokens are for a model, not for --type and --pipeline")
    body = {"prompt": prompt, **about_a_model} if is_for_a_model else _as_json(prompt)
    how = _given(
        priority=priority, message_id=id, tenant=tenant, deadline_s=deadline, delay_s=delay, at=at,
        handler=type, pipeline=pipeline, webhook=webhook, debounce=debounce,
    )  # fmt: skip
    key = key or DEFAULT_KEY.format(lane=options.lane_names(settings, [lane or settings.lane_specs()[0].name])[0])
    with _traced(settings) as tracing:
        run(_send(settings, tracing, body, key=key, how=cast("Options", how), wait=wait, stream=stream, json=json))


def _as_json(text: str) -> bytes:
    try:
        json_text.loads(text)
    except ValueError:
        text = json_text.dumps(text)
    return text.encode()


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


async def _send(
    settings: "Settings",
    tracing: "Tracing",
    body: dict[str, Any] | bytes,
    *,
    key: str,
    how: "Options",
    wait: bool,
    stream: bool,
    json: bool,
) -> None:
    from opentelemetry.trace import INVALID_SPAN

    from consumers.background import background_task
    from lanekeeper.telemetry.tracing import trace_id_of

    id = how.setdefault("message_id", uuid.uuid4().hex)
    lane = key.partition(".")[0]
    async with _client_of(settings, tracing=tracing) as client:
        try:
            with _problem_told(settings):
                if not wait:
                    _print_now(await client.publish(body, key=key, **how), end="\n")
                    return
                print_note(f"request {printable(id)}")
                timeout_s = _longest_wait_s(settings, lane, how)
                async with background_task(_warn_if_no_worker(client, lane), name="watch"):
                    if stream:
                        parts = client.stream(body, key=key, timeout_s=timeout_s, **how)
                        answer = await _print_parts(parts, json=json)
                    else:
                        answer = await client.request(body, key=key, timeout_s=timeout_s, **how)
                        _print_answer(answer, json=json)
                _tell_trace(settings, trace_id_of(INVALID_SPAN, answer.headers))
        except AccessRefused as refused:
            if key != DEFAULT_KEY.format(lane=lane):
                raise
            user, _ = settings.credentials
            raise AccessRefused(
                f"{refused}; a user that may publish under its own name alone says so: --key {lane}.{user}.send, "
                "with a lane that it may use"
            ) from refused
        except asyncio.CancelledError:
            if wait:
                await _cancel_interrupted(client, id, tenant=how.get("tenant"))
            raise


@options.with_settings
def cancel(
    settings: "Settings",
    id: Id,
    tenant: options.Tenant = None,
    json: options.Json = False,
) -> None:
    """Cancel a request wherever it is: queued, delayed, running.

    Its requester is answered `cancelled`. A request that has ended is not changed. A request with this id that arrives
    later is cancelled too, if it arrives within the longest deadline of all lanes (by default a day).

    Example:  lanekeeper cancel 5b0c2f6e
    """

    async def cancelled() -> "Cancelled":
        async with _client_of(settings) as client:
            return await client.cancel(id, tenant=tenant)

    outcome = run(cancelled())
    print(json_text.dumps({"id": id, "outcome": outcome}) if json else CANCELLED[outcome].format(id=id))


@options.with_settings
def result(
    settings: "Settings",
    id: Id,
    tenant: options.Tenant = None,
    wait: Annotated[float | None, duration("--wait", "How long to wait for its end: 20s.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """Print the answer to a request that was published before, by this command or any other client.

    The exit code is 1 if the request ended in an error, or has not ended yet.

    Example:  lanekeeper result --wait 20s 5b0c2f6e
    """

    async def fetch() -> None:
        async with _client_of(settings) as client:
            with _problem_told(settings):
                answer = await client.result(id, tenant=tenant, wait_s=wait or 0)
            _print_answer(answer, json=json)
            _tell_webhook(answer.webhook)

    run(fetch())


@app.command()
@options.with_settings
def find(settings: "Settings", id: Id, json: options.Json = False) -> None:
    """Find a request by its id, whose tenant is not known: print whose it is, and how it stands.

    It reads the workers' store (LANEKEEPER_STORE_URL). The exit code is 1 if no tenant has a request with this id.

    Example:  lanekeeper requests find 5b0c2f6e
    """
    found = run(_found(settings, id))
    if json:
        print_json(found)
    for each in () if json else found:
        when = f", ended {each['ended_at']}" if "ended_at" in each else ""
        why = f": {each['problem']['code']}" if "problem" in each else ""
        tenant = each["tenant"] or "none"
        print(printable(f"{id}: tenant {tenant}, lane {each['lane'] or 'unknown'}, {each['status']}{when}{why}"))
    if not found:
        print_note(f"{printable(id)}: no worker has seen a request with this id, or it is kept no longer")
        raise typer.Exit(FAILED)


async def _found(settings: "Settings", id: str) -> list[dict[str, Any]]:
    from consumers.clock import now_ms
    from consumers.state.base import Identity
    from service.gateway.requests import Known, status_of

    found: list[dict[str, Any]] = []
    async with _store_of(settings) as store:
        for tenant in await store.tenants_of(id):
            identity = Identity(tenant, id)
            if (state := await store.find(identity)) is not None:
                known = Known(id, state, await store.submission(identity))
                status = status_of(known, now_ms=now_ms(), of_tenant=tenant)
                assert isinstance(status, bytes)
                found.append(json_text.loads(status))
    return found


@options.taking
def chosen(
    statuses: Annotated[
        Texts, typer.Option("--status", help="waiting, running, completed, failed or cancelled.")
    ] = None,
    lanes: Annotated[Texts, typer.Option("--lane")] = None,
    tenants: Annotated[Texts, typer.Option("--tenant")] = None,
    apps: Annotated[Texts, typer.Option("--app", help="The application in the routing key.")] = None,
    models: Annotated[Texts, typer.Option("--model", help="The one that was asked for, or that answered.")] = None,
    codes: Annotated[Texts, typer.Option("--code", help="The error's code, such as timeout.")] = None,
    causes: Annotated[Texts, typer.Option("--cause", help="The error's cause, as `dead list` shows it.")] = None,
    groups: Annotated[Texts, typer.Option("--group", help="The group's or the batch's id.")] = None,
    since: Annotated[str | None, named("--since", "TIME", "Seen from then on: 2h (ago), or a time (RFC 3339).")] = None,
    until: Annotated[str | None, named("--until", "TIME", "Seen before: 10m (ago), or a time (RFC 3339).")] = None,
) -> "RequestFilter":
    """The requests that these options choose. Raises typer.BadParameter."""
    from service.requests import filter_of

    given = _given(
        status=statuses, lane=lanes, tenant=tenants, app=apps, model=models, code=codes, cause=causes, group=groups,
        since=since and options.moment_or_ago(since).isoformat(),
        until=until and options.moment_or_ago(until).isoformat(),
    )  # fmt: skip
    try:
        return filter_of(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _require_choice(wanted: "RequestFilter") -> None:
    if wanted == type(wanted)():
        raise typer.BadParameter("name the requests: --lane, --tenant, --status, --since, …")


@app.command("list")
@chosen
@options.with_settings
def list_(
    settings: "Settings",
    wanted: "RequestFilter",
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="How many requests to list.")] = 50,
    after: Annotated[str | None, typer.Option("--after", help="The next page: what the page before named.")] = None,
    json: options.Json = False,
) -> None:
    """List requests of all tenants, the newest first.

    It reads the workers' store (LANEKEEPER_STORE_URL): what waits in a queue and no worker has received yet is only
    listed if it came through a gateway.

    Example:  lanekeeper requests list --status failed --lane batch --since 2h
    """
    from consumers.clock import now_ms
    from service.gateway.requests import Known, word_of
    from service.requests import page

    async def listed() -> dict[str, Any]:
        async with _store_of(settings) as store:
            return await page(
                store, wanted, lambda id, found: word_of(Known(id, found, None), now_ms()), limit=limit, after=after
            )

    try:
        found = run(listed())
    except ValueError:
        raise typer.BadParameter("not what a page named as the next", param_hint="--after") from None
    if json:
        print_json(found)
        return
    for each in found["requests"]:
        tenant, why = each["tenant"] or "none", f" {each['code']}" if each["code"] else ""
        about = f"{each['lane'] or 'unknown'}, {each['app'] or 'unknown'}, {each['model'] or 'no model'}"
        print(printable(f"{each['seen_at']}  {each['id']}  tenant {tenant}  {about}: {each['status']}{why}"))
    if not found["requests"]:
        print("no requests match" + (f" back to {found['back_to']}" if found["back_to"] else ""))
    if found["next"] is not None:
        print(f"the next page: --after {found['next']}")


@app.command("cancel")
@chosen
@options.with_settings
def cancel_several(
    settings: "Settings",
    wanted: "RequestFilter",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False,
    json: options.Json = False,
) -> None:
    """Cancel all requests that match and have not ended. Their requesters are answered `cancelled`.

    Example:  lanekeeper requests cancel --tenant crm --lane batch --dry-run
    """
    from service.requests import cancel

    _require_choice(wanted)

    async def cancelled() -> dict[str, int]:
        async with _store_of(settings) as store:
            return (await cancel(store, wanted, dry_run=dry_run, why="cancelled by an operator")).as_json()

    done = run(cancelled())
    if json:
        print_json(done)
    elif dry_run:
        print(f"{done['matched']} would be cancelled")
    else:
        print(f"{done['cancelled']} cancelled, {done['told']} of them running: their workers stop them within seconds")


@app.command()
@chosen
@options.with_settings
def replay(
    settings: "Settings",
    wanted: "RequestFilter",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be replayed.")] = False,
    rate: options.Rate = None,
    to_lane: Annotated[str | None, named("--to-lane", "LANE", "Into another lane.")] = None,
    json: options.Json = False,
) -> None:
    """Run failed requests that match again, if they are kept as dead letters.

    Example:  lanekeeper requests replay --code timeout --since 1h --rate 5
    """
    from service.deadletters import DeadLetters, LetterEdit
    from service.requests import replay

    _require_choice(wanted)

    async def replayed() -> dict[str, Any]:
        async with _store_of(settings) as store, connected(settings, "requests") as connection:
            letters, change = DeadLetters(settings, connection), LetterEdit(to_lane=to_lane)
            failed, done = await replay(store, letters, wanted, change, rate_per_s=rate, dry_run=dry_run)
            return {"failed": failed, **done.as_json()}

    done = run(replayed())
    if json:
        print_json(done)
    else:
        verb = "would be replayed" if dry_run else "replayed"
        number = done["matched"] if dry_run else done["replayed"]
        print(f"{done['failed']} failed requests match, {done['matched']} are kept as dead letters, {number} {verb}")
        for each in done["refused"]:
            print_note(printable(f"{each['id']}: {each['reason']}; nothing was sent"))
        if done["requests"]:
            print("what they become: lanekeeper requests find ID, of")
        for each in done["requests"]:
            print(printable(f"  {each['id']}"))
    if done["refusals"]:
        raise typer.Exit(FAILED)


@asynccontextmanager
async def _store_of(settings: "Settings") -> "AsyncIterator[Store]":
    from consumers.state import open_store

    async with open_store(settings.store, namespace=settings.namespace, spec=settings.store_spec()) as store:
        yield store


@asynccontextmanager
async def _client_of(settings: "Settings", *, tracing: "Tracing | None" = None) -> "AsyncIterator[Client]":
    from lanekeeper import Client
    from service.telemetry import logs

    with logs.configured(service=SERVICE_NAME, level="error"):
        client = Client(
            settings.broker_url,
            names=settings.names(),
            ssl_context=settings.ssl_context(),
            tracing=tracing,
            identified=settings.needs_user_id,
            bodies=settings.body_store(),
            cancel_abandoned=False,  # an interrupted command cancels its request itself, and reports the outcome
        )
        async with client:
            yield client


@contextmanager
def _problem_told(settings: "Settings") -> Iterator[None]:
    from lanekeeper.replies import Problem

    try:
        yield
    except Problem as problem:
        attempts = f"{problem.attempts} attempt{'' if problem.attempts == 1 else 's'}"
        request = f"[request {printable(problem.request)}, {attempts}]"
        print_note(f"{problem.code} ({problem.status}): {printable(problem.detail)} {request}")
        _tell_trace(settings, problem.trace)
        _tell_webhook(problem.webhook)
        raise typer.Exit(FAILED) from None


def _tell_webhook(log: Mapping[str, Any] | None) -> None:
    if log is not None:
        print_note(printable(f"webhook {course(log)}"))
        for error in log["errors"]:
            print_note(printable(f"  {error}"))


async def _cancel_interrupted(client: "Client", id: str, *, tenant: str | None) -> None:
    from lanekeeper import LanekeeperError, NoReply

    print_note(f"cancelling {id}; Ctrl-C again leaves it running")
    try:
        print_note(CANCELLED[await client.cancel(id, tenant=tenant)].format(id=id))
    except NoReply as kept:
        print_note(f"{id}: its cancellation is kept by the broker: {kept}")
    except LanekeeperError as error:
        print_note(
            f"{id} is left running, it could not be cancelled: {error}; to fetch its answer: lanekeeper result {id}"
        )


def _longest_wait_s(settings: "Settings", lane: str, how: "Options") -> float:
    """Delay and deadline together: if no worker runs, nothing else ends the wait."""
    from lanekeeper.requests import ANSWER_LATE_S

    deadlines_s = {spec.name: spec.deadline_s for spec in settings.lane_specs()}
    deadline_s = how.get("deadline_s", deadlines_s.get(lane, max(deadlines_s.values())))
    at = how.get("at")
    until_at_s = 0.0 if at is None else max(0.0, (at - datetime.now(UTC)).total_seconds())
    return max(how.get("delay_s", 0.0), until_at_s) + deadline_s + ANSWER_LATE_S


async def _warn_if_no_worker(client: "Client", lane: str) -> None:
    await asyncio.sleep(QUIET_S)
    depth = await client.depth(lane)
    if depth is not None and not depth.consumers:
        print_note(
            f"no worker takes the lane {lane}: the request waits; start one with `lanekeeper serve` or "
            "`lanekeeper consume`"
        )


def _print_answer(answer: "Final", *, json: bool) -> None:
    """What a model said; of a handler or a pipeline whose answer is no Message, its JSON."""
    is_message = isinstance(answer.value, dict) and isinstance(answer.value.get("content"), list)
    if is_message and not json:
        _print_now(answer.text, end="\n")
    else:
        _print_now_json(answer.body.decode(), end="\n")


async def _print_parts(replies: "AsyncGenerator[Part | Final, None]", *, json: bool) -> "Final":
    from lanekeeper.replies import Part

    final: Final | None = None
    async for reply in replies:
        if not isinstance(reply, Part):
            final = reply
            _print_now_json(reply.body.decode() if json else "", end="\n")
        elif json:
            part = {"part": reply.kind, "seq": reply.seq, "event": reply.event}
            text = json_text.dumps(part, ensure_ascii=False)
            _print_now_json(text if encodable(text) == text else json_text.dumps(part), end="\n")
        elif reply.kind == "restart":
            print("\n[an attempt failed: from the beginning]", file=sys.stderr)
        else:
            _print_now(reply.text, end="")
    assert final is not None
    return final


def _print_now(text: str, *, end: str) -> None:
    text = encodable(text)  # a model may be cut off within a character
    print(redaction.lines(text) if sys.stdout.isatty() else text, end=end, flush=True)


def _print_now_json(text: str, *, end: str) -> None:
    print(redaction.json_text(text) if sys.stdout.isatty() else text, end=end, flush=True)


def _read_stdin() -> str:
    try:
        prompt = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        print_note(f"standard input is not UTF-8: {error}")
        raise typer.Exit(BAD_USE) from None
    if not prompt.strip():
        print_note("standard input is empty: there is nothing to ask")
        raise typer.Exit(BAD_USE)
    return prompt


@contextmanager
def _traced(settings: "Settings") -> Iterator["Tracing"]:
    """Runs the block in a root span, and tells the trace's id, if spans are sent somewhere."""
    from lanekeeper.telemetry.tracing import Tracing, error_type, mark_failed

    url = settings.traces_url
    if url is None:
        yield Tracing()
        return
    from service.telemetry import exporters, logs  # the exporter is slow to import

    exit_error: typer.Exit | None = None
    name = "lanekeeper send"
    with (
        logs.configured(service=name, level="warning"),  # on standard error: scripts read the standard output
        exporters.exporting(url, service_name=name) as provider,
    ):
        tracing = Tracing(provider)
        with tracing.ask() as span:
            if span.is_recording() and (trace_id := tracing.trace_id()) is not None:
                print_note(_trace_line(settings, trace_id))
            try:
                yield tracing
            except typer.Exit as error:  # the command has printed the actual error, which is the context of this one
                mark_failed(span, error_type(error.__context__ or error))
                exit_error = error
    if exit_error is not None:
        raise exit_error


def _tell_trace(settings: "Settings", trace_id: str | None) -> None:
    """Tell the id of a request's trace, unless the command has begun that trace and told its id."""
    from opentelemetry import trace

    if trace_id is not None and not trace.get_current_span().get_span_context().is_valid:
        print_note(_trace_line(settings, trace_id))


def _trace_line(settings: "Settings", trace_id: str) -> str:
    from lanekeeper.telemetry.tracing import trace_url

    link = trace_url(settings.traces_page, trace_id)
    return f"trace {printable(trace_id)}" + ("" if link is None else f" {printable(link)}")
