"""`./dev judges`: the vendors' SDKs, unmodified, at the simulated API and at a gateway before it, must get the same.

What is called: the Python SDK's own tests (`upstream.py`), its examples and that of the TypeScript SDK's README, and
calls with both SDKs (`calls.py`, `calls.js`): messages, the streams that the Python SDK's tests have recorded, errors,
timeouts and retries. Claude Code (`claude_code.py`) is run too, and calls with OpenAI's Python SDK (`openai_calls.py`)
and with libraries on OpenAI's API (`libraries.py`, `vercel/judge.js`).
A difference without a reason in `reasons.py`, or a
reason without a difference, is a failure.

The tests and examples come from the source package of the locked version. The package of the TypeScript SDK (locked in
tests/support/typescript) has neither."""

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aiohttp import web
from typing_extensions import override

from benchmarks.harness.report import between
from service.simulated import messages, openai
from service.simulated.app import SimulatedOptions
from service.simulated.faults import Fault
from service.simulated.sending import send_stream
from tests.judges import claude_code
from tests.judges.kept_responses import KeptResponses
from tests.judges.reasons import REASONS
from tests.support.brokers import RunningBroker, Vhost, fresh_vhost
from tests.support.defaults import stores
from tests.support.faulty_api import FaultyAPI
from tests.support.processes import environment, lanekeeper

HOUSE = Path(__file__).parents[2]
HERE = Path(__file__).parent
KEPT = HOUSE / ".cache" / "judges"
PYTHON = KEPT / "bin" / "python"
OF_LIBRARIES = HOUSE / ".cache" / "libraries" / "bin" / "python"
PAGE = HOUSE / "docs" / "sdks.md"
PARTS = ("calls", "openai", "libraries", "examples", "claude", "tests")
WITHIN_S = 600
PATIENCE_S = 10
"""How long a call that meets an error may take: what the gateway waits out until then is a difference."""
MODELS = ("model_id", "claude-1.3", "claude")
"""Models that the SDK's tests name."""
TESTS = (
    "tests/api_resources/test_messages.py",
    "tests/api_resources/messages",
    "tests/api_resources/test_models.py",
    "tests/api_resources/beta/test_messages.py",
    "tests/api_resources/beta/messages",
    "tests/api_resources/beta/test_models.py",
    "tests/lib/streaming/test_messages.py",
    "tests/lib/streaming/test_beta_messages.py",
)
EXAMPLES = (
    "images",
    "messages",
    "messages_stream",
    "structured_outputs",
    "structured_outputs_streaming",
    "thinking",
    "thinking_stream",
    "tools",
    "tools_runner",
    "tools_runner_search_tool",
    "tools_stream",
    "web_search",
    "web_search_stream",
    "fallbacks",
)
"""The others need Files, Agents, Skills, Threads, MCP, a terminal, or another vendor's platform."""


# ---- what is called --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, by each client. CLIENT in the body becomes the client's name."""

    name: str
    how: str = "create"
    body: Mapping[str, Any]
    retries: int = 0
    timeout_s: float = 60
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def asked(name: str, prompt: str, **extra: Any) -> dict[str, Any]:
    # A model of its own, because circuit breakers are by model.
    said = [{"role": "user", "content": f"{prompt} «{name} CLIENT»"}]
    return {"model": f"{name} CLIENT", "max_tokens": 1024, "messages": said, **extra}


TOOL = {
    "name": "look",
    "input_schema": {"type": "object", "required": ["at"], "properties": {"at": {"type": "string"}}},
}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
BODIES: Mapping[str, Mapping[str, Any]] = {
    "text": {},
    "system": {"system": [{"type": "text", "text": "Be brief."}], "metadata": {"user_id": "u-1"}},
    "thinking": {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "tools": {"tools": [TOOL]},
    "image": {"messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What “is” it? 🦊"}]}]},
    "tool result": {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "Where is it?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "🦊"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "\u2028 there"}]},
        ],
    },
    "cut at max_tokens": {"max_tokens": 2},
}
REFUSED = {"401": "[[fault: authentication]]", "402": "[[fault: billing]]"}
"""The gateway then stops calling the provider for a while, so these come after all others."""
FAULTS = {
    "400": "[[fault: invalid]]",
    "403": "[[fault: permission]]",
    "404": "[[fault: not_found]]",
    "409": "[[status: 409]]",
    "413": "[[fault: too_large]]",
    "422": "[[status: 422]]",
    "429": "[[fault: rate_limited retry_after=1]]",
    "500": "[[fault: server_error]]",
    "503": "[[fault: unavailable]]",
    "504": "[[status: 504]]",
    "529": "[[fault: overloaded]]",
    "page of a proxy": "[[fault: html]]",
    "connection reset": "[[fault: reset]]",
    "connection closed in the middle": "[[fault: truncated]]",
    "transfer ends in the middle": "[[fault: cut]]",
    "error in the middle": "[[latency: 2s]] [[fault: error_mid_stream]]",
    "broken JSON": "[[fault: broken_json]]",
    "not a message": "[[fault: not_a_message]]",
    "unfinished": "[[fault: unfinished]]",
}
ONCE = {
    "429 with retry-after": "[[fault: rate_limited retry_after=1 x1]]",
    "429 with retry-after-ms": "[[status: 429 retry-after-ms=100 x1]]",
    "500": "[[fault: server_error x1]]",
    "500 with x-should-retry: false": "[[status: 500 x-should-retry=false x1]]",
    "400 with x-should-retry: true": "[[status: 400 x-should-retry=true x1]]",
    "409": "[[status: 409 x1]]",
    "529": "[[fault: overloaded x1]]",
    "connection reset": "[[fault: reset at=start x1]]",
}


def calls(recorded: Sequence[str]) -> list[Call]:
    found = []
    for name, extra in BODIES.items():
        for how in ("create", "events", "final"):
            title = f"{name}, {how}"
            found.append(Call(name=title, how=how, body=asked(title, "tell me a “story” 🦊", **extra)))
    for name in recorded:
        for how in ("events", "final"):
            title = f"recorded {name}, {how}"
            found.append(Call(name=title, how=how, body=asked(title, f"[[replay: {name}]]")))
    for name, fault in FAULTS.items():
        for how in ("create", "events"):
            title = f"error {name}, {how}"
            found.append(Call(name=title, how=how, body=asked(title, fault), timeout_s=PATIENCE_S))
    unknown = {**asked("error", ""), "model": "claude-nobody"}
    found += [Call(name=f"error unknown model, {how}", how=how, body=unknown) for how in ("create", "events")]
    found.append(Call(name="error parameter, create", body=asked("error parameter, create", "", max_tokens=-1)))
    for how in ("create", "events"):
        title = f"error timeout, {how}"
        # By default the gateway's deadline is the SDK's timeout, so that either may be first.
        headers = {"x-lane-deadline-ms": "20000"}
        found.append(Call(name=title, how=how, body=asked(title, "[[fault: hang]]"), timeout_s=2, headers=headers))
    for name, fault in ONCE.items():
        for how in ("create", "events"):
            title = f"retry {name}, {how}"
            found.append(Call(name=title, how=how, body=asked(title, fault), retries=2))
    title = "retry 529 for ever, create"
    found.append(Call(name=title, body=asked(title, "[[fault: overloaded]]"), retries=2))
    title = "retry the same Idempotency-Key, create"
    found.append(Call(name=title, body=asked(title, "once"), times=2, headers={"Idempotency-Key": "CLIENT-1"}))
    said = {"model": "claude-opus-5-5", "messages": [{"role": "user", "content": "How many? 🦊"}]}
    found.append(Call(name="count_tokens", how="count", body=said))
    found.append(Call(name="models", how="models", body={}))
    found.append(Call(name="model", how="model", body={"model_id": "claude-opus-5-5"}))
    found.append(Call(name="unknown model", how="model", body={"model_id": "claude-nobody"}))
    return found


def refused_calls() -> list[Call]:
    titles = {f"error {name}, create": fault for name, fault in REFUSED.items()}
    return [Call(name=title, body=asked(title, fault), timeout_s=PATIENCE_S) for title, fault in titles.items()]


CLIENTS = ("sync", "async", "typescript")


# ---- what is called with OpenAI's SDK --------------------------------------------------------------------------------

FUNCTION = {
    "name": "look",
    "parameters": {"type": "object", "required": ["at"], "properties": {"at": {"type": "string"}}},
}
SCHEMA = {
    "name": "place",
    "strict": True,
    "schema": {
        "type": "object",
        "required": ["at"],
        "properties": {"at": {"type": "string"}},
        "additionalProperties": False,
    },
}
DATA_URL = "data:image/png;base64,iVBORw0KGgo="
CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "🦊"}'}}
CHATS: Mapping[str, Mapping[str, Any]] = {
    "text": {},
    "several choices": {"n": 2},
    "usage": {"stream_options": {"include_usage": True}},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False},
    "image": {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What “is” it?"},
                    {"type": "image_url", "image_url": {"url": DATA_URL}},
                ],
            },
        ]
    },
    "tool result": {
        "messages": [
            {"role": "user", "content": "Where is it?"},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": "\u2028 there"},
        ],
    },
    "structured": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "sampling": {"temperature": 0.2, "top_p": 0.9, "seed": 7, "stop": ["\n\n"], "logit_bias": {"50256": -100}},
    "whose it is": {"user": "u-1", "metadata": {"team": "a"}, "store": False, "service_tier": "default"},
    "long": {"max_completion_tokens": 500, "messages": [{"role": "user", "content": "[[tokens: 400]] a long story"}]},
    "cut at its bound": {"max_completion_tokens": 2},
}
RESPONSES: Mapping[str, Mapping[str, Any]] = {
    "text": {"instructions": "Be brief.", "metadata": {"user": "u-1"}},
    "tools": {"tools": [{"type": "function", **FUNCTION, "strict": False}]},
    "image": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What “is” it?"},
                    {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
                ],
            }
        ]
    },
    "structured": {"text": {"format": {"type": "json_schema", **SCHEMA}}},
    "conversation": {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "whose it is": {"user": "u-1", "store": False, "reasoning": {"effort": "low"}, "temperature": 0.2},
    "cut at its bound": {"max_output_tokens": 16},
}
ANTHROPICS = ("not a message", "unfinished")
"""Faults of Messages alone."""
EMBEDDED: Mapping[str, Mapping[str, Any]] = {
    "one text": {"input": "🦊"},
    "several texts": {"input": ["a", "b", "c"]},
    "tokens": {"input": [[1, 2], [3]]},
    "many texts": {"input": [f"text {number}" for number in range(200)]},
    "numbers": {"input": "a", "encoding_format": "float", "dimensions": 8},
}


def openai_calls() -> list[Call]:
    found = []

    def add(
        how: str, title: str, body: Mapping[str, Any], *, prompt: str = "tell me a “story” 🦊", **options: Any
    ) -> None:
        name = f"{how}: {title}"
        said = f"{prompt} «{name} CLIENT»"
        is_chat = how.startswith("chat")
        asked = {"messages": [{"role": "user", "content": said}]} if is_chat else {"input": said}
        found.append(Call(name=name, how=how, body={"model": f"{name} CLIENT", **asked, **body}, **options))

    for title, body in CHATS.items():
        for how in ("chat", "chat events", "chat final"):
            add(how, title, {name: each for name, each in body.items() if how != "chat" or name != "stream_options"})
    for title, body in RESPONSES.items():
        for how in ("response", "response events", "response final"):
            add(how, title, body)
    for title, body in EMBEDDED.items():
        add("embeddings", title, body)
    add("chat parse", "a place", {})
    add("response parse", "a place", {})
    add("background", "polled", {}, prompt="[[latency: 300ms]]")
    for title in ("events", "resumed"):
        add(f"background {title}", "a story", {}, prompt="[[latency: 300ms]]")
    add("background cancelled", "a story", {}, prompt="[[latency: 60s]]")
    for title in ("deleted", "chained"):
        add(f"background {title}", "a story", {})
    add("retrieve", "not in the background", {})
    found.append(Call(name="retrieve unknown", how="retrieve unknown", body={}))
    for title, fault in FAULTS.items():
        if title in ANTHROPICS:
            continue
        for how in (
            "chat",
            "chat events",
            *(["response events"] if title in ("400", "429", "error in the middle") else []),
        ):
            add(how, f"error {title}", {}, prompt=fault, timeout_s=PATIENCE_S)
    unknown = {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}
    found += [Call(name=f"{how}: unknown model", how=how, body=unknown) for how in ("chat", "chat events")]
    add("chat", "error parameter", {"max_completion_tokens": -1})
    for how in ("chat", "chat events"):
        headers = {"x-lane-deadline-ms": "20000"}
        add(how, "error timeout", {}, prompt="[[fault: hang]]", timeout_s=2, headers=headers)
    for title, fault in ONCE.items():
        add("chat", f"retry {title}", {}, prompt=fault, retries=2)
    add("chat", "retry the same Idempotency-Key", {}, times=2, headers={"Idempotency-Key": "openai-CLIENT"})
    found.append(Call(name="models", how="models", body={}))
    found.append(Call(name="model", how="model", body={"model": "gpt-5.5"}))
    found.append(Call(name="unknown model", how="model", body={"model": "nobody"}))
    found.append(Call(name="moderations", how="elsewhere", body={}))
    return found


_STATUS = re.compile(r"\[\[status: (\d+)((?: [a-z-]+=\S+)*)( x1)?\]\]")
_REPLAY = re.compile(r"\[\[replay: (\S+)\]\]")
_CALL = re.compile(r"\[\[call: (\w+) (\{.*?\})\]\]")
_FORWARDED = ("anthropic-version", "anthropic-beta")
_TYPES = {409: "conflict_error", 422: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error"}


class Judged(FaultyAPI):
    """It also sends recorded streams, errors with any status and headers, and calls the tools of Claude Code."""

    def __init__(self, made: Sequence[Call], recorded: Mapping[str, bytes]) -> None:
        models = {
            call.body["model"].replace("CLIENT", each) for call in made for each in CLIENTS if "model" in call.body
        }
        super().__init__(
            SimulatedOptions(models=frozenset({*models, *MODELS} - {"claude-nobody", "nobody"}), keep_calls=20_000)
        )
        self._recorded = recorded
        self._responses = KeptResponses()
        self._seen: Counter[str] = Counter()
        self.arrived: list[tuple[dict[str, str], str]] = []
        """Of Claude Code's calls: the headers that a gateway has to pass on, and the body."""

    def start_over(self) -> None:
        """Forget which prompts have been seen."""
        self.configure(self.options)
        self._seen.clear()
        self.calls.clear()  # type: ignore[attr-defined]  # a deque

    @override
    async def _answer(
        self, request: web.BaseRequest, asked: messages.Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        headers = {"request-id": request_id}
        if claude_code.BETA in request.headers.get("anthropic-beta", ""):
            return await self._answer_claude_code(request, asked, fault, request_id)
        if (found := _REPLAY.search(asked.prompt)) is not None:
            headers["content-type"] = "text/event-stream; charset=utf-8"
            return web.Response(body=self._recorded[found[1]], headers=headers)
        if (found := _STATUS.search(asked.prompt)) is not None:
            self._seen[asked.prompt] += 1
            if found[3] is None or self._seen[asked.prompt] == 1:
                status = int(found[1])
                headers |= dict(pair.split("=") for pair in found[2].split())
                kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
                error: dict[str, Any] = {"error": {"type": kind, "message": f"status {status}"}}
                if not asked.dialect.is_openai:
                    error |= {"type": "error", "request_id": request_id}
                return web.json_response(error, status=status, headers=headers)
        if asked.dialect is openai.RESPONSES and fault is None:
            output, deltas = self.output(asked, fault), self.options.stream_deltas
            if asked.fields.get("background") is True:
                duration_s, more = self._duration_s(asked, output), self._openai_headers(request_id, asked.model)
                return await self._responses.begin(
                    request, asked, output, id=request_id[4:], headers=more, duration_s=duration_s, deltas=deltas
                )
            self._responses.keep(asked, openai.response(asked, output, id=request_id[4:]))
        return await super()._answer(request, asked, fault, request_id)

    @override
    async def _openai(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        if request.path.startswith(f"{openai.RESPONSES_PATH}/"):
            return await self._responses.answer(request, self._openai_headers(request_id, ""))
        return await super()._openai(request, request_id)

    async def _answer_claude_code(
        self, request: web.BaseRequest, asked: messages.Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        passed = {name.lower(): value for name, value in request.headers.items() if name.lower() in _FORWARDED}
        self.arrived.append((passed, (await request.read()).decode()))
        called = _CALL.findall(asked.prompt) if asked.tool is not None else []
        asked = replace(asked, tool=None)
        if not called:
            return await super()._answer(request, asked, fault, request_id)
        thought = [block for block in messages.echo(asked, output_tokens=None).blocks if block["type"] == "thinking"]
        tools = [
            {"type": "tool_use", "id": f"toolu_{index}", "name": name, "input": json.loads(given)}
            for index, (name, given) in enumerate(called)
        ]
        output = messages.Output(blocks=(*thought, *tools), stop_reason="tool_use", tokens=50)
        events = messages.events(asked, output, id=f"msg_{request_id[4:]}", deltas=8)
        headers = {"request-id": request_id}
        return await send_stream(request, events, headers=headers, pause_s=0)


# ---- running ---------------------------------------------------------------------------------------------------------


class NotJudged(Exception):
    """Something that the judges need is missing, or has failed by itself."""


async def output(
    *command: str | Path,
    folder: Path,
    given: bytes = b"",
    fails: bool = False,
    environ: Mapping[str, str] | None = None,
    within_s: float = WITHIN_S,
) -> tuple[int, str]:
    """The exit code and standard output of a program. Raises NotJudged if it fails, unless it may."""
    process = await asyncio.create_subprocess_exec(
        "nice",
        *map(str, command),
        cwd=folder,
        env={**_ENVIRON, **(environ or {})},
        stdin=PIPE if given else DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        out, said = await asyncio.wait_for(process.communicate(given or None), within_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise NotJudged(f"{command[0]}: not within {within_s:g} s") from None
    if process.returncode != 0 and not fails:
        raise NotJudged(f"{' '.join(map(str, command))}: {(out + said).decode(errors='replace')[-2000:]}")
    last = said.decode(errors="replace").strip().splitlines()[-1:] if process.returncode else []
    return process.returncode or 0, "\n".join([out.decode(), *last])


_FOREIGN = ("ANTHROPIC_", "CLAUDE", "LANEKEEPER_")
_ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}


async def python_sdk() -> Path:
    """The folder with the source package of the locked version, unpacked."""
    lock = (HOUSE / "requirements-judges.lock").read_text()
    locked = re.search(r"^anthropic==(\S+) \\\n(?:    --hash=.*\n)+", lock, re.MULTILINE)
    assert locked is not None
    folder = KEPT / f"anthropic-{locked[1]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=KEPT) as name:
            wanted = Path(name, "wanted.txt")
            wanted.write_text(locked[0].rstrip().rstrip("\\"))
            fetch = [
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                ":all:",
                "--no-build-isolation",
                "--require-hashes",
            ]
            await output(PYTHON, "-m", "pip", *fetch, "-r", wanted, "-d", name, folder=KEPT)
            (package,) = Path(name).glob("*.tar.gz")
            shutil.unpack_archive(package, name, filter="data")
            Path(name, folder.name).rename(folder)
    return folder


async def typescript_sdk(folder: Path) -> Path:
    """A folder with the locked SDK, and with what is run."""
    shutil.copytree(HOUSE / "tests" / "support" / "typescript", folder)
    shutil.copy(HERE / "calls.js", folder / "judge.js")
    await output("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", folder=folder)
    readme = (folder / "node_modules" / "@anthropic-ai" / "sdk" / "README.md").read_text()
    for number, text in enumerate(re.findall(r"```js\n(.*?)```", readme, re.DOTALL)):
        (folder / f"readme-{number}.js").write_text(text)
    return folder


async def packages(of: Path, main: str) -> tuple[Path, str]:
    """A folder with the packages that are locked in another one, and the version of the main one."""
    version = json.loads((of / "package.json").read_text())["dependencies"][main]
    folder = KEPT / f"{of.name}-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=KEPT) as name:
            shutil.copytree(of, made := Path(name, folder.name))
            await output("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", folder=made)
            made.rename(folder)
    return folder, version


async def claude() -> tuple[Path, str]:
    """Claude Code's program, and its version."""
    folder, version = await packages(claude_code.HERE, "@anthropic-ai/claude-code")
    found = sorted(folder.glob("node_modules/@anthropic-ai/claude-code-*/claude"))
    if not found:
        raise NotJudged(f"Claude Code has no program for this machine in {folder}")
    return found[0], version


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two ways to the API."""

    name: str
    url: str


@asynccontextmanager
async def gateway(vhost: Vhost, upstream: str, folder: Path) -> AsyncIterator[str]:
    @dataclass
    class Provider:
        base_url: str

    openai = {"KIND": "openai", "BASE_URL": f"{upstream}/v1", "API_KEY": "sk-any"}
    environ = environment(
        vhost,
        Provider(upstream),
        LANEKEEPER_LANES__NORMAL__MAX_ATTEMPTS="2",
        **{f"LANEKEEPER_PROVIDERS__OPENAI__{name}": value for name, value in openai.items()},
    )
    async with lanekeeper("serve", environ=environ, folder=folder) as running:
        yield await running.ready()


@dataclass
class Verdict:
    """What was found the same, and what was not: (kind, name, direct, through)."""

    same: Counter[str] = field(default_factory=Counter)
    differ: list[tuple[str, str, str, str]] = field(default_factory=list)
    printed: dict[str, str] = field(default_factory=dict)
    """What Claude Code printed through the gateway, by scene."""

    def compare(self, kind: str, name: str, direct: object, through: object) -> None:
        one, other = _plain(direct), _plain(through)
        if one == other:
            self.same[kind] += 1
        else:
            self.differ.append((kind, name, one, other))


_IDS = re.compile(
    r"\b(msg|req|fc|resp)_\d{24}\b|\bchatcmpl-\d{24}\b|\b(resp_)?[0-9a-f]{32}\b|\bmsgbatch_\w+|0x[0-9a-f]+"
    r'|(?<="created": )\d+|(?<="created_at": )[\d.]+'
)


def _plain(found: object) -> str:
    """Without what differs from call to call."""
    text = found if isinstance(found, str) else json.dumps(found, sort_keys=True, ensure_ascii=False)
    return _IDS.sub("ID", text)


async def judge_tests(verdict: Verdict, vhost: Vhost, sdk: Path, folder: Path, api: Judged) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    upstream = f"http://127.0.0.1:{port}"
    found = []
    async with gateway(vhost, upstream, folder) as url:
        for way in (Way("direct", upstream), Way("through", url)):
            report = folder / f"{way.name}.xml"
            options = [
                "-o",
                "addopts=",
                "-o",
                "filterwarnings=",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:respx",
                "--timeout=60",
            ]
            plugins = ["-p", "tests._alias_httpx", "-p", "upstream", f"--junitxml={report}", "-q", "--tb=line"]
            environ = {
                "PYTHONPATH": str(HERE),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TEST_API_BASE_URL": way.url,
                "JUDGES_API": api.base_url,
                "JUDGES_PORT": str(port),
            }
            run: list[str | Path] = [PYTHON, "-m", "pytest", *options, *plugins, *TESTS]
            await output(*run, folder=sdk, fails=True, environ=environ)
            found.append(results(report))
    direct, through = found
    for name, (calls, result) in direct.items():
        calls_through, result_through = through.get(name, (0, "not run"))
        if calls or calls_through:
            verdict.compare("its tests", name, result, result_through)
    if not verdict.same["its tests"]:
        raise NotJudged("none of the SDK's tests made a call")


def results(report: Path) -> dict[str, tuple[int, str]]:
    """By test: how many calls it made, and how it ended."""
    if not report.exists():
        raise NotJudged("the SDK's tests wrote no report")
    found = {}
    for case in ET.parse(report).iter("testcase"):
        called = next((int(each.get("value", "0")) for each in case.iter("property")), 0)
        bad = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        said = "passed" if bad is None else f"{bad.tag}: {(bad.get('message') or '').splitlines()[:1]}"
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        found[name] = called, said
    return found


async def judge_examples(verdict: Verdict, sdk: Path, typescript: Path, ways: Sequence[Way]) -> None:
    files = [sdk / "examples" / f"{name}.py" for name in EXAMPLES]
    readme = sorted(typescript.glob("readme-*.js"))
    found: list[dict[str, str]] = []
    for way in ways:
        environ = {"ANTHROPIC_BASE_URL": way.url, "ANTHROPIC_API_KEY": "sk-ant-any", "COLUMNS": "200"}
        _, out = await output(PYTHON, "-W", "ignore", HERE / "examples.py", *files, folder=typescript, environ=environ)
        printed = json.loads(out)
        for each in readme:
            _, printed[each.name] = await output("node", each, folder=typescript, environ=environ)
        found.append(printed)
    direct, through = found
    for name, printed_directly in direct.items():
        if not printed_directly.strip():
            raise NotJudged(f"{name} printed nothing")
        verdict.compare("its examples", name, printed_directly, through[name])


async def judge_calls(
    verdict: Verdict, typescript: Path, ways: Sequence[Way], made: Sequence[Call], api: Judged
) -> None:
    given = json.dumps([call.document() for call in made]).encode()
    found: list[dict[str, Any]] = []
    arrived: dict[str, dict[str, list[str]]] = {}
    for way in ways:
        api.start_over()
        both = await asyncio.gather(
            output(PYTHON, "-W", "ignore", "-m", "tests.judges.calls", way.url, folder=HOUSE, given=given),
            output("node", "judge.js", way.url, folder=typescript, given=given),
        )
        found.append({client: got for _, out in both for client, got in json.loads(out).items()})
        arrived[way.name] = defaultdict(list)
        for each in api.calls:
            if each.prompt == "1":  # a worker's own call, which finds out whether a paused provider answers again
                continue
            arrived[way.name][each.model].append(f"{each.started_s:.3f} {each.outcome} {each.status}")
    direct, through = found
    for client in CLIENTS:
        kind = "TypeScript" if client == "typescript" else f"Python, {client}"
        for call in made:
            verdict.compare(kind, call.name, direct[client][call.name], through[client][call.name])
            if call.name.startswith("retry"):
                directly, passed_on = (arrived[way.name][f"{call.name} {client}"] for way in ways)
                if len(directly) == len(passed_on):  # else it is shown when each came, and how it ended
                    directly = passed_on = [str(len(directly))]
                verdict.compare(kind, f"calls of: {call.name}", directly, passed_on)


async def judge_libraries(verdict: Verdict, vercel: Path, ways: Sequence[Way]) -> None:
    found: list[dict[str, Any]] = []
    for way in ways:
        python = output(OF_LIBRARIES, "-W", "ignore", HERE / "libraries.py", way.url, folder=HOUSE)
        both = await asyncio.gather(python, output("node", "judge.js", way.url, folder=vercel))
        found.append({name: got for _, out in both for name, got in json.loads(out).items()})
    direct, through = found
    for name in direct:
        verdict.compare("libraries", name, direct[name], through[name])


async def judge_openai(verdict: Verdict, ways: Sequence[Way], made: Sequence[Call], api: Judged) -> None:
    given = json.dumps([call.document() for call in made]).encode()
    found = []
    for way in ways:
        api.start_over()
        module = "tests.judges.openai_calls"
        _, out = await output(sys.executable, "-W", "ignore", "-m", module, way.url, folder=HOUSE, given=given)
        found.append(json.loads(out))
    direct, through = found
    for client in ("sync", "async"):
        for call in made:
            verdict.compare(f"OpenAI's SDK, {client}", call.name, direct[client][call.name], through[client][call.name])


async def judge_claude_code(verdict: Verdict, program: Path, folder: Path, ways: Sequence[Way], api: Judged) -> None:
    for name, scene in claude_code.SCENES.items():
        found = []
        for way in ways:
            api.start_over()
            api.arrived.clear()
            environ = claude_code.environment(folder, way.url, scene)
            run: list[str | Path] = [program, *claude_code.arguments(scene)]
            _, printed = await output(*run, folder=folder / "work", fails=True, environ=environ, within_s=120)
            if not printed.startswith("{"):
                raise NotJudged(f"Claude Code, asked for {name}: {printed[-2000:]}")
            arrived = sorted(claude_code.plain(json.dumps(each, sort_keys=True)) for each in api.arrived)
            found.append((claude_code.told(printed), arrived))
        (direct, arrived_directly), (through, arrived_through) = found
        verdict.printed[name] = claude_code.shown(through["result"])
        verdict.compare("Claude Code", f"Claude Code: {name}", direct, through)
        verdict.compare("Claude Code", f"what arrives of Claude Code: {name}", arrived_directly, arrived_through)


# ---- the verdict -----------------------------------------------------------------------------------------------------

KINDS = {
    "its tests": "Python SDK's own tests that make a call",
    "its examples": "examples of both SDKs",
    "Python, sync": "calls, Python",
    "Python, async": "calls, Python async",
    "TypeScript": "calls, TypeScript",
    "OpenAI's SDK, sync": "calls, OpenAI's Python SDK",
    "OpenAI's SDK, async": "calls, OpenAI's Python SDK async",
    "libraries": "calls, LangChain, LlamaIndex and the Vercel AI SDK",
    "Claude Code": "Claude Code: what it prints, and what then arrives at the API",
}


def explained(verdict: Verdict) -> tuple[dict[str, list[tuple[str, str, str, str]]], list[tuple[str, str, str, str]]]:
    """The differences by their reasons, and those without one."""
    known: dict[str, list[tuple[str, str, str, str]]] = defaultdict(list)
    unknown = []
    for each in verdict.differ:
        name = each[1]
        why = next((why for pattern, why in REASONS if fnmatchcase(name, pattern)), None)
        if why is None:
            unknown.append(each)
        else:
            known[why].append(each)
    return known, unknown


def table(verdict: Verdict, known: Mapping[str, Sequence[tuple[str, str, str, str]]]) -> str:
    lines = ["| what | the same | different |", "|---|---|---|"]
    for kind, title in KINDS.items():
        different = sum(each[0] == kind for each in verdict.differ)
        lines.append(f"| {title} | {verdict.same[kind]} | {different} |")
    lines += ["", "| why they differ | how many |", "|---|---|"]
    lines += [f"| {why} | {len(known[why])} |" for why in dict.fromkeys(why for _, why in REASONS)]
    lines += ["", "| what Claude Code is asked | what it prints |", "|---|---|"]
    lines += [f"| {name} | {printed} |" for name, printed in verdict.printed.items()]
    return "\n".join(lines)


async def main(broker: RunningBroker, parts: Sequence[str]) -> Verdict:
    verdict, began = Verdict(), time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {what}", flush=True)

    sdk = await python_sdk()
    fixtures = sorted((sdk / "tests/lib/streaming/fixtures").glob("*.txt"))
    # They lack the empty line that ends the last event, `message_stop`; the gateway would take the stream for cut off.
    recorded = {each.stem: each.read_bytes().rstrip() + b"\n\n" for each in fixtures}
    made, refused = calls(list(recorded)), refused_calls()
    all_made = [*made, *refused, *openai_calls()]
    with (
        fresh_vhost(broker) as vhost,
        fresh_vhost(broker) as other,
        tempfile.TemporaryDirectory() as name,
        stores(),
    ):
        folder = Path(name)
        for each in ("calls", "tests"):
            (folder / each).mkdir()
        typescript = await typescript_sdk(folder / "typescript")
        program, version = await claude()
        tell(f"the SDKs and Claude Code {version} are here")
        async with Judged(all_made, recorded) as api:
            async with gateway(vhost, api.base_url, folder / "calls") as url:
                ways = (Way("direct", api.base_url), Way("through", url))
                if "calls" in parts:
                    await judge_calls(verdict, typescript, ways, made, api)
                    tell(f"{len(made)} calls by {len(CLIENTS)} clients")
                if "openai" in parts:
                    asked = openai_calls()
                    await judge_openai(verdict, ways, asked, api)
                    tell(f"{len(asked)} calls by OpenAI's SDK")
                if "libraries" in parts:
                    vercel, _ = await packages(HERE / "vercel", "ai")
                    await judge_libraries(verdict, vercel, ways)
                    tell("calls by LangChain, LlamaIndex and the Vercel AI SDK")
                if "examples" in parts:
                    await judge_examples(verdict, sdk, typescript, ways)
                    tell("examples")
                if "claude" in parts:
                    await judge_claude_code(verdict, program, folder / "claude", ways, api)
                    tell(f"{len(claude_code.SCENES)} runs of Claude Code")
                if "calls" in parts:
                    await judge_calls(verdict, typescript, ways, refused, api)
            if "tests" in parts:
                await judge_tests(verdict, other, sdk, folder / "tests", api)
                tell("the Python SDK's tests")
    return verdict


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="./dev judges", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; without, all")
    parser.add_argument("--write", action="store_true", help="put the table into docs/sdks.md")
    parser.add_argument("--differences", action="store_true", help="print all differences, also those with a reason")
    options = parser.parse_args()
    if absent := [each for each in ("node", "npm") if shutil.which(each) is None]:
        sys.exit(f"judges: {', '.join(absent)} is missing")
    at = RunningBroker.at(os.environ["LANEKEEPER_AMQP_URL"], os.environ.get("LANEKEEPER_MANAGEMENT_URL"))
    try:
        judged = asyncio.run(main(at, options.parts or PARTS))
    except NotJudged as problem:
        sys.exit(f"judges: {problem}")
    with_reason, without = explained(judged)
    for kind, name, direct, through in judged.differ if options.differences else without:
        same = next((at for at, (one, other) in enumerate(zip(direct, through, strict=False)) if one != other), 0)
        shown = slice(max(0, same - 100), same + 500)
        print(f"DIFFERENT: {kind}: {name}\n    direct:  {direct[shown]}\n    through: {through[shown]}")
    stale = [why for why in dict.fromkeys(why for _, why in REASONS) if why not in with_reason]
    for why in stale:
        print(f"NOTHING DIFFERS because: {why}")
    print(table(judged, {**dict.fromkeys(stale, ()), **with_reason}))
    print(f"{judged.same.total()} the same, {len(judged.differ)} different, of which {len(without)} without a reason")
    if options.write and not without and not stale:
        between(PAGE, table(judged, with_reason), command="./dev judges")
    sys.exit(1 if without or stale else 0)
