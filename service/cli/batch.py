"""`lanekeeper batch …`: Message Batches at a gateway, by Anthropic's own paths, and other groups of requests. A file is
read line by line, when it is checked and when it is sent, so that its size does not matter."""

import asyncio
import json as json_text
import sys
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from lanekeeper.contract import names as n
from lanekeeper.contract.problems import LanekeeperError
from service.cli import options
from service.cli.options import duration, named
from service.cli.process import BAD_USE, FAILED, print_json, print_note, printable, run
from service.telemetry import redaction

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

    from service.config.settings import Settings

PATH: Final = "/v1/messages/batches"
GROUPS: Final = "/v1/groups"
BATCH: Final = "msgbatch_"
"""The ids of Message Batches begin with it."""
VERSION: Final = "2023-06-01"
LOOK_EVERY_S: Final = 2.0
NO_GATEWAY_FOR_S: Final = 60.0
"""For so long `--wait` goes on asking a gateway that is being restarted."""
WRONG_LINES: Final = 5
app = typer.Typer(
    no_args_is_help=True,
    help="Message Batches and other groups: submit a file to a gateway, follow them, fetch results, cancel.",
)
Id = Annotated[str, typer.Argument(metavar="ID", help="The batch's id: msgbatch_…, or a group's.")]
OfTenant = Annotated[str | None, named("--tenant", "TENANT", "Another tenant's: for operators' keys.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it has ended, and show how far it is.")]


class GatewayFailed(LanekeeperError):
    """The gateway cannot be reached, or has refused the call. `is_passing`: the same call may be answered later."""

    def __init__(self, text: str, *, is_passing: bool = False) -> None:
        super().__init__(text)
        self.is_passing = is_passing


@app.command()
@options.with_settings
def submit(
    settings: "Settings",
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One request a line, as JSON; `-`: standard input.")],
    lane: Annotated[str | None, named("--lane", "LANE", "Default: the lane batch, or one that the key allows.")] = None,
    deadline: Annotated[float | None, duration("--deadline", "Each is to be answered within: 6h.")] = None,
    webhook: Annotated[str | None, named("--webhook", "URL", "Where the outcomes are posted.")] = None,
    wait: Wait = False,
    json: options.Json = False,
) -> None:
    """Submit a file of requests as one batch, and print its id. All of them are accepted, or none.

    Each line is a request of Anthropic's Message Batches: {"custom_id": "a-1", "params": {"model": …, "max_tokens": …,
    "messages": […]}}.

    Examples:

      lanekeeper batch submit requests.jsonl

      lanekeeper batch submit requests.jsonl --lane night --deadline 6h --wait
    """
    headers = {n.LANE_NAME: lane, n.WEBHOOK: webhook}
    if deadline is not None:
        headers[n.DEADLINE_MS] = str(round(1000 * deadline))

    async def submitted() -> dict[str, Any]:
        with _opened(file) as lines:
            _check(lines)
            lines.seek(0)
            async with _Gateway(settings) as gateway:
                batch = await gateway.create(lines, {name: value for name, value in headers.items() if value})
                print_note(f"{printable(batch['id'])}: {_total(batch):,} requests submitted")
                return await gateway.ended(batch) if wait else batch

    batch = run(submitted())
    print_json(batch) if json else print(printable(batch["id"]))
    if not wait:
        print_note(f"to follow it: lanekeeper batch status {printable(batch['id'])} --wait")


@app.command("list")
@options.with_settings
def list_(
    settings: "Settings",
    status: Annotated[list[str] | None, named("--status", "STATUS", "in_progress, cancelling or ended.")] = None,
    tenant: OfTenant = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="How many to list.")] = 20,
    after: Annotated[str | None, typer.Option("--after", help="The next page: what the page before named.")] = None,
    json: options.Json = False,
) -> None:
    """List batches and other groups, the newest first: your own; with an operator's key those of all tenants.

    Example:  lanekeeper batch list --status in_progress
    """

    query = [("limit", str(limit)), *(("status", each) for each in status or ())]
    query += [(name, given) for name, given in (("tenant", tenant), ("after", after)) if given is not None]

    async def listed() -> dict[str, Any]:
        async with _Gateway(settings) as gateway:
            return await gateway.groups(query)

    found = run(listed())
    if json:
        print_json(found)
        return
    for group in found["groups"]:
        whose = f"tenant {group['tenant'] or 'none'}  " if "tenant" in group else ""
        print(f"{printable(whose)}{_line(_as_batch(group))}")
    if not found["groups"]:
        print_note("no groups match")
    if found["next"] is not None:
        print(f"the next page: --after {printable(found['next'])}")


@app.command()
@options.with_settings
def status(
    settings: "Settings", id: Id, wait: Wait = False, tenant: OfTenant = None, json: options.Json = False
) -> None:
    """Print how far a batch is: how many of its requests have ended, and how.

    Example:  lanekeeper batch status msgbatch_5b0c --wait
    """

    async def looked() -> dict[str, Any]:
        async with _Gateway(settings, tenant) as gateway:
            batch = await gateway.batch(id)
            return await gateway.ended(batch) if wait else batch

    batch = run(looked())
    print_json(batch) if json else print(_line(batch))


@app.command()
@options.with_settings
def results(
    settings: "Settings",
    id: Id,
    output: Annotated[Path | None, named("--output", "FILE", "Where to write them; default: standard output.")] = None,
    wait: Wait = False,
) -> None:
    """Print the results of a batch that has ended, one a line, as JSON, in any order: custom_id says which it is.

    The exit code is 1 if the batch has not ended yet, or if not all of its requests have succeeded.

    Example:  lanekeeper batch results msgbatch_5b0c --output results.jsonl
    """

    async def fetched() -> dict[str, Any]:
        async with _Gateway(settings) as gateway:
            batch = await gateway.batch(id)
            if wait:
                batch = await gateway.ended(batch)
            if batch["processing_status"] != "ended":
                raise GatewayFailed(f"{_line(batch)}; to wait for its end: --wait")
            await gateway.write_results(id, output)
            return batch

    batch = run(fetched())
    print_note(_line(batch))
    if batch["request_counts"]["succeeded"] < _total(batch):
        raise typer.Exit(FAILED)


@app.command()
@options.with_settings
def cancel(settings: "Settings", id: Id, tenant: OfTenant = None, json: options.Json = False) -> None:
    """Cancel a batch. Requests that run are still answered; the others end as canceled.

    Example:  lanekeeper batch cancel msgbatch_5b0c
    """

    async def cancelled() -> dict[str, Any]:
        async with _Gateway(settings, tenant) as gateway:
            return await gateway.cancel(id)

    batch = run(cancelled())
    print_json(batch) if json else print(_line(batch))


def _total(batch: Mapping[str, Any]) -> int:
    return sum(batch["request_counts"].values())


def _line(batch: Mapping[str, Any]) -> str:
    counts, all = batch["request_counts"], _total(batch)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if kind != "processing" and count)
    ended = all - counts.get("processing", 0)
    more = [kinds] if kinds else []
    if saved_usd := batch.get("saved_usd"):
        more.append(f"${saved_usd:,.2f} saved")
    if "predicted_end_at" in batch:
        more.append(f"ends about {batch['predicted_end_at']}")
    how = f" ({', '.join(more)})" if more else ""
    return printable(f"{batch['id']} {batch['processing_status']}: {ended:,} of {all:,} requests have ended{how}")


# ---- the file --------------------------------------------------------------------------------------------------------


def _opened(file: Path) -> BinaryIO:
    if str(file) == "-":
        return _copied(sys.stdin.buffer)
    try:
        return file.open("rb")
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="FILE") from None


def _copied(coming: BinaryIO) -> BinaryIO:
    """A pipe can be read only once."""
    import shutil
    import tempfile

    copy = tempfile.TemporaryFile()  # noqa: SIM115 - its caller closes it
    shutil.copyfileobj(coming, copy)
    copy.seek(0)
    return copy


def _check(lines: BinaryIO) -> None:
    """Name what is wrong with the file, by lines, before anything is sent."""
    ids: dict[str, int] = {}
    wrong: list[str] = []
    for number, line in enumerate(_read(lines), start=1):
        if line:
            try:
                id = _custom_id(line)
                if id in ids:
                    raise ValueError(f"custom_id {id[:64]!r} is that of line {ids[id]} too")
                ids[id] = number
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
        if len(wrong) == WRONG_LINES:
            wrong.append("perhaps more")
            break
    if not wrong and not ids:
        wrong.append("no requests: each line is one")
    if wrong:
        print_note(printable(f"nothing was sent: {'; '.join(wrong)}"))
        raise typer.Exit(BAD_USE)


def _custom_id(line: bytes) -> str:
    try:
        found = json_text.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON in UTF-8") from None
    if not isinstance(found, dict) or not isinstance(id := found.get("custom_id"), str):
        raise ValueError('not {"custom_id": "…", "params": {…}}: custom_id is missing')
    if not isinstance(found.get("params"), dict):
        raise ValueError("params is missing, or no object")
    return id


def _read(lines: BinaryIO) -> Iterator[bytes]:
    """The lines without space around them, and without the mark that Windows puts in front of UTF-8."""
    for number, line in enumerate(lines):
        yield (line.removeprefix(BOM_UTF8) if number == 0 else line).strip()


def _body(lines: BinaryIO) -> Iterator[bytes]:
    yield b'{"requests":['
    comma = b""
    for line in filter(None, _read(lines)):
        yield comma + line
        comma = b",\n"
    yield b"]}"


# ---- the gateway -----------------------------------------------------------------------------------------------------


class _Gateway:
    """The gateway that the settings name, inside its block. `tenant`: whose groups are meant; None: the caller's. All
    methods raise GatewayFailed."""

    def __init__(self, settings: "Settings", tenant: str | None = None) -> None:
        spec = settings.client
        host = f"[{settings.gateway.host}]" if ":" in settings.gateway.host else settings.gateway.host
        own = f"http://{host}:{settings.gateway.port}"
        self._url = (own if spec.url is None else spec.url.get_secret_value()).rstrip("/")
        self._key = None if spec.api_key is None else spec.api_key.get_secret_value()
        self._tenant = tenant
        self._session: ClientSession | None = None

    async def __aenter__(self) -> "_Gateway":
        from aiohttp import ClientSession, ClientTimeout

        headers = {n.ANTHROPIC_VERSION: VERSION, **({} if self._key is None else {"x-api-key": self._key})}
        self._session = ClientSession(
            headers=headers, timeout=ClientTimeout(total=None, sock_connect=10, sock_read=300), trust_env=True
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def create(self, lines: BinaryIO, headers: Mapping[str, str]) -> dict[str, Any]:
        async def pieces() -> AsyncIterator[bytes]:
            held = bytearray()
            for piece in _body(lines):
                held += piece
                if len(held) >= 256 * 1024:
                    yield bytes(held)
                    held.clear()
            yield bytes(held)

        sent = {"content-type": "application/json", **headers}
        async with self._call("POST", PATH, data=pieces(), headers=sent) as answer:
            return await _batch_in(answer)

    async def groups(self, query: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """A page of groups."""
        async with self._call("GET", GROUPS, params=query) as answer:
            try:
                found: dict[str, Any] = json_text.loads(await answer.content.read())
                if {"groups", "next"} <= found.keys():
                    return found
            except (ValueError, AttributeError):
                pass
        raise _no_gateway()

    async def batch(self, id: str) -> dict[str, Any]:
        async with self._call("GET", self._place(id)) as answer:
            return await _batch_in(answer)

    async def cancel(self, id: str) -> dict[str, Any]:
        place = self._place(id)
        how = ("POST", f"{place}/cancel") if place.startswith(PATH) else ("DELETE", place)
        async with self._call(*how) as answer:
            return await _batch_in(answer)

    async def ended(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch when it has ended. Its progress is told whenever it has changed."""
        told, failed_since_s = "", None
        clock = asyncio.get_running_loop().time
        while batch["processing_status"] != "ended":
            if (line := _line(batch)) != told:
                print_note(line)
                told = line
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                batch, failed_since_s = await self.batch(batch["id"]), None
            except GatewayFailed as error:
                failed_since_s = failed_since_s or clock()
                if not error.is_passing or clock() - failed_since_s > NO_GATEWAY_FOR_S:
                    raise
        return batch

    async def write_results(self, id: str, output: Path | None) -> None:
        async with self._call("GET", f"{self._place(id)}/results") as answer:
            if output is None:
                await _print(answer.content.iter_any())
                return
            part = output.with_name(f"{output.name}.part")  # so that what is at `output` is whole
            with part.open("wb") as out:
                async for piece in answer.content.iter_any():
                    out.write(piece)
            part.replace(output)

    def _place(self, id: str) -> str:
        from urllib.parse import quote

        path = PATH if id.startswith(BATCH) and self._tenant is None else GROUPS
        return f"{path}/{quote(id, safe='')}"

    @asynccontextmanager
    async def _call(self, method: str, place: str, **given: Any) -> "AsyncIterator[ClientResponse]":
        from aiohttp import ClientError

        assert self._session is not None
        if self._tenant is not None:
            given["params"] = {"tenant": self._tenant}
        try:
            async with self._session.request(method, f"{self._url}{place}", allow_redirects=False, **given) as answer:
                if answer.status not in (200, 202):
                    raise _refusal(answer.status, await answer.content.read(64 * 1024))
                yield answer
        except (ClientError, TimeoutError) as error:
            url = printable(self._url)
            where = "start one (lanekeeper serve), or name another: LANEKEEPER_CLIENT__URL"
            raise GatewayFailed(
                f"no gateway answers at {url} ({type(error).__name__}): {where}", is_passing=True
            ) from error


async def _print(pieces: AsyncIterator[bytes]) -> None:
    is_terminal, held = sys.stdout.isatty(), b""
    async for piece in pieces:
        whole, end, held = (held + piece).rpartition(b"\n")
        if end and is_terminal:
            print("\n".join(redaction.json_text(line.decode(errors="replace")) for line in whole.split(b"\n")))
        elif end:
            sys.stdout.buffer.write(whole + end)
    sys.stdout.buffer.write(held)
    sys.stdout.flush()


async def _batch_in(answer: "ClientResponse") -> dict[str, Any]:
    body = await answer.content.read()
    try:
        batch: dict[str, Any] = json_text.loads(body)
        if "counts" in batch:
            batch = _as_batch(batch)
        if all(type(count) is int for count in batch["request_counts"].values()) and batch["processing_status"]:
            return batch
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise _no_gateway()


def _no_gateway() -> GatewayFailed:
    return GatewayFailed("what answers there is no gateway: LANEKEEPER_CLIENT__URL")


def _as_batch(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a group, in the words that are told of a batch."""
    counts = group["counts"]
    named = {"processing": "in_progress", "succeeded": "completed", "errored": "failed", "canceled": "cancelled"}
    status = "canceling" if group["status"] == "cancelling" else group["status"]
    counted = {name: counts[of_group] for name, of_group in named.items()}
    return {**group, "processing_status": status, "request_counts": counted}


def _refusal(status: int, body: bytes) -> GatewayFailed:
    try:
        found = json_text.loads(body)
        text = str(found["detail"] if "detail" in found else found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = "no error of a gateway: see LANEKEEPER_CLIENT__URL"
    if status == 401:
        text += " (LANEKEEPER_CLIENT__API_KEY)"
    return GatewayFailed(printable(f"refused with {status}: {text}"), is_passing=status >= 500 or status == 429)
