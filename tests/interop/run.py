"""`./dev interop`: each example client against one running service: publish, ask, stream, cancel, trace, large answer.

Answers are compared byte for byte, and RabbitMQ's firehose shows every message, which must fit `/asyncapi.json`. A
language whose tools are missing is skipped by name; in CI (CI=true) that is a failure."""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiormq
from jsonschema import Draft202012Validator
from pamqp.common import FieldTable

from tests.support.brokers import RunningBroker, Vhost, fresh_vhost
from tests.support.defaults import stores
from tests.support.otlp import OtlpReceiver
from tests.support.processes import environment, lanekeeper
from tests.support.serving import HELD, HeldCalls
from tests.support.waiting import until

HOUSE = Path(__file__).parents[2]
EXAMPLES = HOUSE / "examples"
BUILT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lanekeeper", "interop")
BUILD_S = 600
RUN_S = 90
LARGE_BYTES = 4096
"""Longer answers are kept in the store, and the reply has their address."""
TEXT = 'naïve "quotes", back\\slash,\ttab, <&>, % $HOME `x`\n河 🚣 \u2028 Ω'
"""What JSON, a shell or a wrong encoding would change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How an example is built and run. Its build is a copy of its folder, so that the checkout stays clean."""

    name: str
    folder: str
    needs: tuple[str, ...]
    """Programs; those of Debian's packages of the same names are installed by `./dev install`."""
    build: tuple[tuple[str, ...], ...] = ()
    run: tuple[str, ...]
    has_ids: bool = True
    """Whether its library can set a message id and a type; without, it can neither cancel nor fetch."""
    fetches: bool = False
    """Whether it fetches large answers."""


LANGUAGES = (
    Language(name="Python, pika", folder="python", needs=(), run=(sys.executable, "lane.py")),
    Language(name="Python, our client", folder="python", needs=(), run=(sys.executable, "client.py"), fetches=True),
    Language(
        name="TypeScript, amqplib",
        folder="typescript",
        needs=("node", "npm"),
        build=(("npm", "ci", "--no-audit", "--no-fund", "--silent"),),
        run=("node", "--import", "tsx", "lane.ts"),
    ),
    Language(
        name="Go, amqp091-go",
        folder="go",
        needs=("go",),
        build=(("go", "build", "-p", "1", "-o", "lane", "."),),
        run=("./lane",),
    ),
    Language(
        name="Java, amqp-client",
        folder="java",
        needs=("java", "mvn"),
        build=(("mvn", "-q", "-B", "compile", "dependency:copy-dependencies", "-DoutputDirectory=target/dependency"),),
        run=("java", "-cp", "target/classes:target/dependency/*", "lane.Lane"),
    ),
    Language(
        name="Rust, lapin",
        folder="rust",
        needs=("cargo",),
        build=(("cargo", "build", "--quiet", "--jobs", "1"),),
        run=("target/debug/lane",),
    ),
    Language(
        name="shell, amqp-tools",
        folder="shell",
        needs=("amqp-publish", "jq"),
        run=("./lane.sh",),
        has_ids=False,
    ),
)
PACKAGES = {"amqp-publish": "amqp-tools", "jq": "jq"}


class NotAsPromised(Exception):
    """A step went otherwise than it should."""


@dataclass
class Wire:
    """What the firehose showed, compared with the document."""

    messages: Mapping[str, Any]
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def see(self, delivered: aiormq.abc.DeliveredMessage) -> None:
        """One message that was published, by an example or by a worker."""
        about: FieldTable = delivered.header.properties.headers or {}
        properties = about["properties"]
        assert isinstance(properties, dict)
        found = properties.get("headers")
        headers = dict(found) if isinstance(found, dict) else {}
        exchange, type = about["exchange_name"], properties.get("type")
        assert isinstance(exchange, str)
        name = self._name(exchange, headers, type if isinstance(type, str) else None, delivered)
        if name is None:
            return
        self.seen[name] += 1
        if name not in self.messages:
            self.wrong.append(f"{exchange}: {name}")
            return
        described = self.messages[name]
        lines = delivered.body.splitlines() if described["contentType"] == "application/jsonl" else [delivered.body]
        if name == "parts":
            self.seen["part"] += len(lines)
        for what, value in (("headers", headers), *(("payload", json.loads(line)) for line in lines)):
            if what in described:
                for error in Draft202012Validator(described[what]).iter_errors(value):
                    self.wrong.append(f"{name}: {what}: {error.message[:300]}")
        if properties.get("content_type") != described["contentType"]:
            self.wrong.append(f"{name}: content type {properties.get('content_type')!r}")

    def _name(
        self, exchange: str, headers: Mapping[str, Any], type: str | None, delivered: aiormq.abc.DeliveredMessage
    ) -> str | None:
        match exchange:
            case "lane.requests":
                return "request"
            case "lane.control":
                return type if type in self.messages else "a control message without its type"
            case "lane.events":
                return f"event{str(json.loads(delivered.body)['event']).capitalize()}"
            case "":
                if (control := headers.get("x-lane-control")) is not None:
                    return "refused" if control == "error" else str(control)
                if headers.get("x-lane-part") == "several":
                    return "parts"
                return {"ok": "answer", "error": "error", None: "part"}[headers.get("x-lane-status")]
        return None  # inside

    @property
    def is_quiet(self) -> bool:
        """Whether every request has ended."""
        ended = sum(self.seen[f"event{each}"] for each in ("Completed", "Failed", "Cancelled"))
        return ended == self.seen["request"]


@dataclass(frozen=True)
class Ground:
    """A service, its provider, its spans, and what is on the wire."""

    vhost: Vhost
    api: HeldCalls
    otlp: OtlpReceiver
    wire: Wire
    bodies: Path


@asynccontextmanager
async def ground(vhost: Vhost, folder: Path) -> AsyncIterator[Ground]:
    bodies = folder / "bodies"
    bodies.mkdir()
    async with OtlpReceiver() as otlp, HeldCalls() as api:
        environ = environment(
            vhost,
            api,
            OTEL_EXPORTER_OTLP_ENDPOINT=otlp.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="50",
            LANEKEEPER_BODIES__URL=f"file://{bodies}",
            LANEKEEPER_BODIES__ANSWERS_OVER_BYTES=str(LARGE_BYTES),
        )
        async with lanekeeper("serve", environ=environ, folder=folder) as worker:
            url = await worker.ready()
            wire = Wire((await asyncio.to_thread(_fetched, f"{url}/asyncapi.json"))["components"]["messages"])
            vhost.api("PUT", f"vhosts/{vhost.quoted}", {"tracing": True})
            connection = await aiormq.connect(vhost.amqp_url)
            try:
                channel = await connection.channel()
                queue = (await channel.queue_declare("", exclusive=True)).queue
                assert queue is not None
                await channel.queue_bind(queue, "amq.rabbitmq.trace", "publish.#")

                async def see(message: aiormq.abc.DeliveredMessage) -> None:
                    wire.see(message)

                await channel.basic_consume(queue, see, no_ack=True)
                yield Ground(vhost, api, otlp, wire, bodies)
            finally:
                api.release()
                await connection.close()


def _fetched(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


class Example:
    """One language's example on the ground."""

    def __init__(self, language: Language, folder: Path, on: Ground) -> None:
        self.language = language
        self._folder = folder
        self._on = on
        self._number = LANGUAGES.index(language) + 1

    async def steps(self) -> list[str]:
        """The row of the table; raises NotAsPromised."""
        cells = []
        steps: list[tuple[Callable[[], Awaitable[str]], bool]] = [
            (self._publishes, True),
            (self._asks, True),
            (self._streams, True),
            (self._cancels, self.language.has_ids),
            (self._carries_a_trace, True),
            (self._gets_a_large_answer, True),
        ]
        before = self._on.wire.seen.total()
        for step, can in steps:
            cells.append(await step() if can else "by the command `lanekeeper cancel`")
        await until(lambda: self._on.wire.is_quiet, within_s=RUN_S)
        if self._on.wire.wrong:
            raise NotAsPromised("; ".join(self._on.wire.wrong))
        return [*cells, str(self._on.wire.seen.total() - before)]

    async def _publishes(self) -> str:
        prompt = f"{TEXT} published by {self.language.name}"
        id = (await self._succeeds("publish", prompt)).strip()
        await until(lambda: any(prompt in call.prompt for call in self._on.api.calls), within_s=RUN_S)
        if self.language.has_ids:
            await until(lambda: self._on.wire.is_quiet, within_s=RUN_S)
            self._same(await self._succeeds("result", id.decode()), prompt)
        return "yes"

    async def _asks(self) -> str:
        self._same(await self._succeeds("ask", TEXT), TEXT)
        return "yes"

    async def _streams(self) -> str:
        before = self._on.wire.seen["part"]
        self._same(await self._succeeds("stream", TEXT), TEXT)
        await until(lambda: self._on.wire.seen["part"] > before + 2, within_s=RUN_S)
        return "yes"

    async def _cancels(self) -> str:
        prompt = f"slow {self._number} {HELD}"
        id = (await self._succeeds("publish", prompt)).strip().decode()
        await until(lambda: any(prompt in call.prompt for call in self._on.api.calls), within_s=RUN_S)
        if (told := (await self._succeeds("cancel", id)).strip()) != b"told":
            raise NotAsPromised(f"cancel: {told!r}")
        await until(lambda: self._on.wire.is_quiet, within_s=RUN_S)
        _, said = await self._fails("result", id)
        if b"ancelled" not in said:
            raise NotAsPromised(f"result of what was cancelled: {said!r}")
        return "yes"

    async def _carries_a_trace(self) -> str:
        trace, parent = f"{self._number:032x}", f"{self._number:016x}"
        self._same(await self._succeeds("ask", TEXT, TRACEPARENT=f"00-{trace}-{parent}-01"), TEXT)
        spans = await self._on.otlp.trace(trace, names=["process lane.critical"])
        if not any(span.parent_id == parent for span in spans):
            raise NotAsPromised(f"no span below the caller's: {spans}")
        return "yes"

    async def _gets_a_large_answer(self) -> str:
        prompt = "ü" * (LARGE_BYTES * 3 // 4)  # fewer tokens than `max_tokens`, and more bytes
        if self.language.fetches:
            self._same(await self._succeeds("ask", prompt, BODIES=f"file://{self._on.bodies}"), prompt)
            return "fetched"
        out, said = await self._fails("ask", prompt)
        if out or f"file://{self._on.bodies}".encode() not in said:
            raise NotAsPromised(f"a large answer: {out!r}, {said!r}")
        return "its URL is printed"

    def _same(self, printed: bytes, prompt: str) -> None:
        if printed != (wanted := f"echo: {prompt}\n".encode()):
            raise NotAsPromised(f"printed {printed!r}, not {wanted!r}")

    async def _succeeds(self, *line: str, **environ: str) -> bytes:
        code, out, said = await self._run(*line, **environ)
        if code != 0:
            raise NotAsPromised(f"{line[0]}: exit {code}: {said.decode(errors='replace')}")
        return out

    async def _fails(self, *line: str) -> tuple[bytes, bytes]:
        code, out, said = await self._run(*line)
        if code == 0:
            raise NotAsPromised(f"{line[0]} succeeded, and should not: {out!r}")
        return out, said

    async def _run(self, *line: str, **more: str) -> tuple[int | None, bytes, bytes]:
        environ = {
            **os.environ,
            "AMQP_URL": self._on.vhost.amqp_url,
            "PYTHONPATH": str(HOUSE),
            "LC_ALL": "C.UTF-8",  # Java's encoding of arguments and output
            **more,
        }
        process = await asyncio.create_subprocess_exec(
            *self.language.run, *line, cwd=self._folder, env=environ, stdout=PIPE, stderr=PIPE
        )
        try:
            out, said = await asyncio.wait_for(process.communicate(), RUN_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise NotAsPromised(f"{line[0]}: not within {RUN_S} s") from None
        return process.returncode, out, said


async def built(language: Language) -> Path:
    """The folder in which it can be run. Raises NotAsPromised."""
    folder = BUILT / language.folder
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        EXAMPLES / language.folder,
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("target", "node_modules", "Cargo.lock", "__pycache__", "documents"),
    )
    for command in language.build:
        process = await asyncio.create_subprocess_exec("nice", *command, cwd=folder, stdout=PIPE, stderr=PIPE)
        try:
            out, said = await asyncio.wait_for(process.communicate(), BUILD_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise NotAsPromised(f"{' '.join(command)}: not within {BUILD_S} s") from None
        if process.returncode != 0:
            raise NotAsPromised(f"{' '.join(command)}: {(out + said).decode(errors='replace')[-2000:]}")
    return folder


def missing(language: Language) -> list[str]:
    """The programs that it lacks, after those of Debian were installed."""
    for program in language.needs:
        if shutil.which(program) is None and program in PACKAGES and os.geteuid() == 0 and shutil.which("apt-get"):
            os.spawnv(os.P_WAIT, str(HOUSE / "dev"), ["dev", "install", PACKAGES[program]])
    return [program for program in language.needs if shutil.which(program) is None]


HEAD = ("client", "publish", "ask", "stream", "cancel, result", "trace", "large answer", "messages checked")


def table(rows: list[list[str]]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


async def main(broker: RunningBroker, only: list[str]) -> tuple[list[list[str]], list[str]]:
    """The rows of the table, and the names of those that failed, or were skipped in CI."""
    rows, failures = [], []
    with fresh_vhost(broker) as vhost, tempfile.TemporaryDirectory() as name, stores():
        async with ground(vhost, Path(name)) as on:
            for language in LANGUAGES:
                if only and language.folder not in only:
                    continue
                began = time.monotonic()
                if lacks := missing(language):
                    print(f"{language.name}: SKIPPED: {', '.join(lacks)} is missing", flush=True)
                    if os.environ.get("CI") == "true":
                        failures.append(language.name)
                    continue
                try:
                    folder = await built(language)
                    building = time.monotonic() - began
                    rows.append([language.name, *await Example(language, folder, on).steps()])
                    took = time.monotonic() - began
                    print(f"{language.name}: passed in {took:.0f} s, of which building {building:.0f} s", flush=True)
                except (NotAsPromised, AssertionError, TimeoutError) as error:
                    failures.append(language.name)
                    print(f"{language.name}: FAILED: {str(error)[:2000]}; {'; '.join(on.wire.wrong)}", flush=True)
                    on.api.release(f"slow {LANGUAGES.index(language) + 1}")
                    on.wire.wrong.clear()
    return rows, failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="./dev interop", description=__doc__)
    parser.add_argument("languages", nargs="*", help="folders of examples/; without, all")
    given = parser.parse_args()
    at = RunningBroker.at(os.environ["LANEKEEPER_AMQP_URL"], os.environ.get("LANEKEEPER_MANAGEMENT_URL"))
    found, failed = asyncio.run(main(at, given.languages))
    print(table(found))
    print(f"{len(found)} passed, {len(failed)} failed")
    sys.exit(1 if failed else 0)
