"""START HERE: the simulated Anthropic API, an HTTP server, which is OpenAI's too. `_call` and `_answer` contain the
steps of a call to `POST /v1/messages`, `/v1/chat/completions`, `/v1/responses` or `/v1/embeddings`: check key, version,
request and model; choose a fault; apply the limits; wait; answer."""

import asyncio
import itertools
import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from aiohttp import web

from service.simulated import messages, openai
from service.simulated.batches import BATCHES_PATH, BatchOptions, SimulatedBatches
from service.simulated.buckets import Limits
from service.simulated.faults import ERROR_TYPES, MID_STREAM, Fault, Faults, Refusal, invalid
from service.simulated.files import FILES_PATH, Files
from service.simulated.openai_batches import BATCHES_PATH as OPENAI_BATCHES_PATH
from service.simulated.openai_batches import SimulatedFileBatches
from service.simulated.sending import json_answer, read_body, send_stream

BODY_KEPT_BYTES = 16 * 1024
TEXT_KEPT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOptions:
    """Latency, limits and faults of a simulated API. With the defaults, it answers every call at once."""

    api_key: str | None = None
    models: frozenset[str] = frozenset()
    latency_ms: float = 0.0
    tokens_per_s: float | None = None
    output_tokens: int | None = None
    stream_deltas: int = 8
    requests_per_minute: int = 1_000_000
    input_tokens_per_minute: int = 1_000_000_000
    output_tokens_per_minute: int = 1_000_000_000
    """Each line of models (`messages.limit_line`) has these three limits to itself."""
    burst_s: float = 60.0
    """The size of a limit's token bucket, as the number of seconds in which it is filled. With 1, a limit of 60 a
    minute is enforced as 1 a second, which Anthropic may do as well."""
    faults: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    keep_calls: int = 2_000
    max_body_bytes: int = 32 * 1024 * 1024
    batches: BatchOptions = field(default_factory=BatchOptions)


@dataclass(slots=True)
class Call:
    """The record of one call of the model."""

    started_s: float
    headers: Mapping[str, str]
    body: bytes = b""
    model: str = ""
    stream: bool = False
    prompt: str = ""
    request_id: str = ""
    outcome: str = "running"
    status: int = 0
    ended_s: float | None = None
    concurrency: int = 0


class SimulatedAPI:
    """A simulated Anthropic API. `port` 0: a free one, which stays the same after `stop` and `start`."""

    faults_type = Faults
    batches_type = SimulatedBatches
    files_type = Files

    def __init__(self, options: SimulatedOptions | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port
        self.batches = self.batches_type(check_model=self._check_model, notify=self._notify)
        self.file_batches = SimulatedFileBatches(self.batches, check_model=self._check_openai_model)
        self.files = self.files_type()
        self._waiting: set[asyncio.Event] = set()
        self.configure(options or SimulatedOptions())
        self.running = 0
        self._latest: deque[Call] = deque(maxlen=self.options.keep_calls)
        self._outcomes: Counter[str] = Counter()
        self._models: Counter[str] = Counter()
        self._total = self._peak = self._input_tokens = self._output_tokens = 0
        self._ids = itertools.count(1)
        self._runner: web.ServerRunner | None = None

    def configure(self, options: SimulatedOptions) -> None:
        """Use other options from now on. All token buckets are full again; the recorded calls stay."""
        self._faults = self.faults_type(options.faults, seed=options.seed)
        self.batches.configure(
            options.batches, item_faults=self._faults, output_tokens=options.output_tokens, seed=options.seed
        )
        self._limits: defaultdict[str, Limits] = defaultdict(
            partial(
                Limits,
                requests=options.requests_per_minute,
                input_tokens=options.input_tokens_per_minute,
                output_tokens=options.output_tokens_per_minute,
                burst_s=options.burst_s,
            )
        )
        self._known_models = frozenset(messages.KNOWN_MODELS) | options.models
        self._openai_models = frozenset(openai.KNOWN_MODELS) | options.models
        self.options = options

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def calls(self) -> Sequence[Call]:
        return self._latest

    def stats(self) -> dict[str, Any]:
        return {
            "calls": self._total,
            "running": self.running,
            "peak_running": self._peak,
            "outcomes": dict(self._outcomes),
            "models": dict(self._models),
            "input_tokens": self._input_tokens,
            "output_tokens": self._output_tokens,
            "batches": self.batches.stats(),
        }

    async def until(self, holds: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Wait until `holds()` is true; it is checked whenever a call starts or ends. Raises `TimeoutError`."""
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await changed.wait()
                    changed.clear()
        finally:
            self._waiting.discard(changed)

    async def start(self) -> None:
        server = web.Server(self._handle, request_factory=self._request, handler_cancellation=True, access_log=None)
        # A short timeout, so that stopping does not wait for a stalled answer.
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=1024, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop, most = asyncio.get_running_loop(), self.options.max_body_bytes
        if message.path.startswith(BATCHES_PATH):
            most = self.options.batches.bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = f"req_{next(self._ids):024d}"
        path, method = request.path, request.method
        try:
            if method == "POST" and path == "/v1/messages":
                return await self._call(request, request_id, partial(messages.read_request, version=_version(request)))
            if method == "POST" and path in openai.READERS:
                return await self._call(request, request_id, openai.READERS[path])
            if _is_openai(request):
                return await self._openai(request, request_id)
            if method == "GET" and path == "/healthz":
                return json_answer({"status": "ok"}, {})
            if method == "GET" and path == "/simulated/stats":
                return json_answer(self.stats(), {})
            self._authorise(request)
            headers = self._headers(request_id, "")
            if path.startswith(BATCHES_PATH):
                return await self.batches.answer(request, request_id, headers)
            if path == FILES_PATH or path.startswith(f"{FILES_PATH}/"):
                return await self.files.answer(request, headers)
            if method == "POST" and path == "/v1/messages/count_tokens":
                body = await read_body(request)
                asked = messages.read_request(body, counting=True, version=_version(request))
                self.files.check(body)
                return json_answer({"input_tokens": asked.input_tokens}, headers)
            if method == "GET" and path == "/v1/models":
                found = [messages.model_info(model) for model in sorted(self._known_models)]
                page = {"data": found, "has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
                return json_answer(page, headers)
            if method == "GET" and path.startswith("/v1/models/"):
                model = path.removeprefix("/v1/models/")
                self._check_model(model)
                return json_answer(messages.model_info(model), headers)
            raise Refusal(404, "Not found", outcome="not_found")
        except Refusal as refusal:
            return self._refused(request, refusal, request_id, "")

    async def _openai(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        """What OpenAI's API has besides calls of the model."""
        self._authorise(request)
        headers, path = self._openai_headers(request_id, ""), request.path
        if path.startswith((FILES_PATH, OPENAI_BATCHES_PATH)):
            return await self.file_batches.answer(request, request_id, headers)
        if request.method == "GET" and path == "/v1/models":
            found = [openai.model_info(model) for model in sorted(self._openai_models)]
            return json_answer({"object": "list", "data": found}, headers)
        if request.method == "GET" and path.startswith("/v1/models/"):
            model = path.removeprefix("/v1/models/")
            self._check_openai_model(model)
            return json_answer(openai.model_info(model), headers)
        raise Refusal(404, f"Invalid URL ({request.method} {path[:100]})", outcome="not_found")

    async def _call(
        self, request: web.BaseRequest, request_id: str, read: Callable[[bytes], messages.Asked]
    ) -> web.StreamResponse:
        call = self._begin(request, request_id)
        outcome, status = "client_gone", 0
        try:
            self._authorise(request)
            body = await read_body(request)
            call.body = body if len(body) <= BODY_KEPT_BYTES else b""
            asked = read(body)
            call.model, call.stream, call.prompt = asked.model[:TEXT_KEPT], asked.stream, asked.prompt[:TEXT_KEPT]
            if not asked.dialect.is_openai:
                self._check_model(asked.model)
                self.files.check(body)
            else:
                self._check_openai_model(asked.model)
            fault = self.fault(asked)
            if fault is not None:
                outcome = fault.name
            response = await self._answer(request, asked, fault, request_id)
            outcome, status = fault.name if fault else "ok", response.status
            return response
        except Refusal as refusal:
            outcome, status = refusal.outcome, refusal.status
            return self._refused(request, refusal, request_id, call.model)
        finally:
            call.outcome, call.status, call.ended_s = outcome, status, time.monotonic()
            self.running -= 1
            self._outcomes[outcome] += 1
            self._notify()

    def _begin(self, request: web.BaseRequest, request_id: str) -> Call:
        self._total += 1
        self.running += 1
        self._peak = max(self._peak, self.running)
        call = Call(time.monotonic(), request.headers, request_id=request_id, concurrency=self.running)
        self._latest.append(call)
        self._notify()
        return call

    def _notify(self) -> None:
        for changed in self._waiting:
            changed.set()

    async def _answer(
        self, request: web.BaseRequest, asked: messages.Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        if fault is not None:
            await self.before_answering(request, fault, streamed=asked.stream)
        dialect, deltas = asked.dialect, self.options.stream_deltas
        limits = self._limits[_openai_line(asked.model) if dialect.is_openai else messages.limit_line(asked.model)]
        limits.enter(asked.estimated_tokens)
        headers = (self._openai_headers if dialect.is_openai else self._headers)(request_id, asked.model)
        output = self.output(asked, fault)
        id = dialect.id_prefix + request_id[4:]
        try:
            duration_s = self._duration_s(asked, output)
            if asked.stream:
                events = dialect.events(asked, output, id=id, deltas=deltas)
                pause_s = duration_s / len(events)
                if fault is not None and fault.name == MID_STREAM:
                    type, half = fault.given.get("type", "overloaded_error"), max(1, len(events) // 2)
                    events = [*events[:half], dialect.error_event(type, nth=half, request_id=request_id)]
                return await self.send_stream(request, events, headers=headers, pause_s=pause_s, fault=fault)
            if duration_s > 0:
                await asyncio.sleep(duration_s)
            written = dialect.write(asked, output, id=id)
            return await self.send_message(request, json.dumps(written).encode(), headers=headers, fault=fault)
        finally:
            own = output.tokens if dialect.is_openai else 0  # OpenAI's limit of tokens is of both kinds together
            limits.settle(input_tokens=asked.input_tokens - asked.estimated_tokens + own, output_tokens=output.tokens)
            self.count(asked, output)

    def count(self, asked: messages.Asked, output: messages.Output) -> None:
        """Count what an answer has used."""
        self._models[asked.model] += 1
        self._input_tokens += asked.input_tokens
        self._output_tokens += output.tokens

    def fault(self, asked: messages.Asked) -> Fault | None:
        """Choose the fault of a call. Raises `Refusal` (400)."""
        return self._faults.choose(asked.script, asked.prompt)

    async def before_answering(self, request: web.BaseRequest, fault: Fault, *, streamed: bool) -> None:
        """What a fault does instead of an answer, or before it."""
        if (refusal := self._faults.refusal(fault)) is not None:
            raise refusal
        if fault.name == MID_STREAM and not streamed:
            type = fault.given.get("type", "overloaded_error")
            status = next((status for status, each in ERROR_TYPES.items() if each == type), 500)
            raise Refusal(status, f"{type} instead of an answer", outcome=fault.name)

    def output(self, asked: messages.Asked, fault: Fault | None) -> messages.Output:
        """What the model writes."""
        return messages.echo(asked, output_tokens=self.options.output_tokens)

    async def send_message(
        self, request: web.BaseRequest, message: bytes, *, headers: Mapping[str, str], fault: Fault | None
    ) -> web.StreamResponse:
        """Send an answer (`message`: its JSON) as one body."""
        return web.Response(body=message, headers={**headers, "content-type": "application/json"})

    async def send_stream(
        self,
        request: web.BaseRequest,
        events: Sequence[bytes],
        *,
        headers: Mapping[str, str],
        pause_s: float,
        fault: Fault | None,
    ) -> web.StreamResponse:
        """Send an answer as a stream of events, with a pause of `pause_s` seconds before each."""
        return await send_stream(request, events, headers=headers, pause_s=pause_s)

    def _duration_s(self, asked: messages.Asked, output: messages.Output) -> float:
        if asked.script.latency_s is not None:
            return asked.script.latency_s
        writing_s = output.tokens / self.options.tokens_per_s if self.options.tokens_per_s else 0.0
        return self.options.latency_ms / 1000 + writing_s

    def _authorise(self, request: web.BaseRequest) -> None:
        key, is_openai = _key(request), _is_openai(request)
        if not key:
            header = "Authorization" if is_openai else "x-api-key"
            raise Refusal(401, f"{header} header is required", outcome="unauthorised")
        if self.options.api_key is not None and key != self.options.api_key:
            raise Refusal(401, "invalid x-api-key", outcome="unauthorised")
        if "anthropic-version" not in request.headers and not is_openai:
            raise invalid("anthropic-version: header is required")

    def _check_model(self, model: str) -> None:
        if model not in self._known_models:
            raise Refusal(404, f"model: {model[:100]}", outcome="unknown_model")

    def _check_openai_model(self, model: str) -> None:
        if model not in self._openai_models:
            raise openai.unknown_model(model)

    def _headers(self, request_id: str, model: str) -> dict[str, str]:
        return {
            "request-id": request_id,
            "anthropic-organization-id": "org_simulated",
            **self._limits[messages.limit_line(model)].headers(),
        }

    def _openai_headers(self, request_id: str, model: str) -> dict[str, str]:
        limits = self._limits[_openai_line(model)]
        return {
            "x-request-id": request_id,
            "openai-organization": "org-simulated",
            "openai-version": "2020-10-01",
            "openai-processing-ms": "1",
            **openai.limit_headers(limits.requests, limits.input_tokens),
        }

    def _refused(self, request: web.BaseRequest, refusal: Refusal, request_id: str, model: str) -> web.Response:
        if _is_openai(request):
            status, body = openai.error(refusal)
            headers = self._openai_headers(request_id, model)
        else:
            status, body = refusal.status, refusal.body(request_id)
            headers = self._headers(request_id, model)
        return web.Response(
            status=status, body=body, headers={**headers, **refusal.headers, "content-type": "application/json"}
        )


def _is_openai(request: web.BaseRequest) -> bool:
    """By the path; one that is not Anthropic's alone is OpenAI's without the headers that Anthropic's clients send."""
    path = request.path
    if path in openai.READERS or path.startswith(f"{openai.RESPONSES_PATH}/"):
        return True
    if path.startswith(("/v1/messages", "/v1/organizations")):
        return False
    return path.startswith("/v1/") and "anthropic-version" not in request.headers and "x-api-key" not in request.headers


def _openai_line(model: str) -> str:
    """Each of OpenAI's models has limits of its own."""
    return f"openai {model}"


def _key(request: web.BaseRequest) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" and key else request.headers.get("x-api-key", "")


def _version(request: web.BaseRequest) -> str:
    return request.headers.get("anthropic-version", "")
