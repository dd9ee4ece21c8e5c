"""START HERE: the simulated Anthropic API, an HTTP server. Its methods `_messages` and `_answer` contain the steps of a
call to `POST /v1/messages`: check key, version, request and model; choose a fault; apply the limits; wait; answer.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Self

from aiohttp import web

from service.simulated import messages, models, sending, streaming
from service.simulated.buckets import Limits
from service.simulated.calls import BODY_KEPT_BYTES, TEXT_KEPT, Call, Calls
from service.simulated.errors import TYPES, Refusal, invalid
from service.simulated.faults import Fault, Faults
from service.simulated.options import SimulatedOptions


class SimulatedAPI:
    """A simulated Anthropic API: an HTTP server on `host` and `port` (0: a free port, which stays the same after `stop`
    and `start`)."""

    def __init__(self, options: SimulatedOptions | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.port = port
        self.configure(options or SimulatedOptions())
        self._calls = Calls(self.options.keep_calls)
        self._ids = itertools.count(1)
        self._runner: web.ServerRunner | None = None

    def configure(self, options: SimulatedOptions) -> None:
        """Use other options from now on. All token buckets are full again; the recorded calls stay."""
        self._faults = Faults(options.faults, seed=options.seed)
        self._limits = {
            name: Limits(
                requests=options.requests_per_minute,
                input_tokens=options.input_tokens_per_minute,
                output_tokens=options.output_tokens_per_minute,
                burst_s=options.burst_s,
            )
            for name in models.LIMIT_CLASSES
        }
        self._models = frozenset(models.KNOWN) | options.models
        self.options = options

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def calls(self) -> Sequence[Call]:
        """The latest calls that the API has received, oldest first."""
        return self._calls.latest

    @property
    def running(self) -> int:
        """The number of calls that have not ended yet."""
        return self._calls.running

    def stats(self) -> dict[str, Any]:
        """Statistics of all calls: how many there were by outcome and by model, how many run now, the maximum that ran
        at the same time, and the tokens of all calls."""
        return self._calls.stats()

    async def until(self, holds: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Wait until `holds()` is true; it is checked whenever a call starts or ends. Raises `TimeoutError`."""
        await self._calls.until(holds, timeout_s)

    async def start(self) -> None:
        server = web.Server(self._handle, request_factory=self._request, handler_cancellation=True, access_log=None)
        # A short timeout, so that stopping does not wait for a stalled answer.
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=1024, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Refuse connections and end the running calls. `start` begins again on the same port."""
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
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = f"req_{next(self._ids):024d}"
        path, method = request.path, request.method
        try:
            if method == "POST" and path == "/v1/messages":
                return await self._messages(request, request_id)
            if method == "GET" and path == "/healthz":
                return _json({"status": "ok"}, {})
            if method == "GET" and path == "/simulated/stats":
                return _json(self._calls.stats(), {})
            self._authorise(request)
            headers = self._headers(request_id, "")
            if method == "POST" and path == "/v1/messages/count_tokens":
                asked = messages.read(await self._body(request), counting=True)
                return _json({"input_tokens": asked.input_tokens}, headers)
            if method == "GET" and path == "/v1/models":
                return _json(models.page(sorted(self._models)), headers)
            if method == "GET" and path.startswith("/v1/models/"):
                return _json(models.info(self._known(path.removeprefix("/v1/models/"))), headers)
            raise Refusal(404, "Not found", outcome="not_found")
        except Refusal as refusal:
            return self._refused(refusal, request_id, "")

    async def _messages(self, request: web.BaseRequest, request_id: str) -> web.StreamResponse:
        call = self._calls.begin(headers=request.headers, request_id=request_id)
        outcome, status = "client_gone", 0
        try:
            self._authorise(request)
            body = await self._body(request)
            call.body = body if len(body) <= BODY_KEPT_BYTES else b""
            asked = messages.read(body)
            call.model, call.stream = asked.model[:TEXT_KEPT], asked.stream
            call.prompt = asked.prompt[:TEXT_KEPT]
            self._known(asked.model)
            fault = self._faults.choose(asked.script, asked.prompt)
            if fault is not None:
                outcome = fault.name
            response = await self._answer(request, asked, fault, request_id)
            outcome, status = fault.name if fault else "ok", response.status
            return response
        except Refusal as refusal:
            outcome, status = refusal.outcome, refusal.status
            return self._refused(refusal, request_id, call.model)
        finally:
            self._calls.end(call, outcome=outcome, status=status)

    async def _answer(
        self, request: web.BaseRequest, asked: messages.Asked, fault: Fault | None, request_id: str
    ) -> web.StreamResponse:
        if fault is not None:
            await _before_answering(request, asked, fault)
        limits = self._limits[models.limit_class(asked.model)]
        limits.enter(asked.estimated_tokens)
        headers = self._headers(request_id, asked.model)
        if fault is not None and fault.name == "html":
            return sending.html(headers)
        reply = messages.answer(asked, output_tokens=self.options.output_tokens)
        id = f"msg_{request_id[4:]}"
        try:
            if asked.stream:
                events = streaming.events(asked, reply, id=id, deltas=self.options.stream_deltas)
                pause_s = self._duration_s(asked, reply) / len(events)
                return await sending.send_stream(
                    request, events, headers=headers, pause_s=pause_s, fault=fault, request_id=request_id
                )
            if (duration_s := self._duration_s(asked, reply)) > 0:
                await asyncio.sleep(duration_s)
            body = json.dumps(messages.message(asked, reply, id=id)).encode()
            return await sending.send_message(request, body, headers=headers, fault=fault)
        finally:
            limits.settle(input_tokens=asked.input_tokens - asked.estimated_tokens, output_tokens=reply.output_tokens)
            self._calls.count_usage(
                model=asked.model, input_tokens=asked.input_tokens, output_tokens=reply.output_tokens
            )

    def _duration_s(self, asked: messages.Asked, reply: messages.Answer) -> float:
        if asked.script.latency_s is not None:
            return asked.script.latency_s
        writing_s = reply.output_tokens / self.options.tokens_per_s if self.options.tokens_per_s else 0.0
        return self.options.latency_ms / 1000 + writing_s

    def _authorise(self, request: web.BaseRequest) -> None:
        headers = request.headers
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = headers.get("x-api-key", "")
        if not key:
            raise Refusal(401, "x-api-key header is required", outcome="unauthorised")
        if self.options.api_key is not None and key != self.options.api_key:
            raise Refusal(401, "invalid x-api-key", outcome="unauthorised")
        if "anthropic-version" not in headers:
            raise invalid("anthropic-version: header is required")

    async def _body(self, request: web.BaseRequest) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise Refusal(413, "Request exceeds the maximum size", outcome="too_large") from None

    def _known(self, model: str) -> str:
        if model not in self._models:
            raise models.unknown(model)
        return model

    def _headers(self, request_id: str, model: str) -> dict[str, str]:
        return {
            "request-id": request_id,
            "anthropic-organization-id": "org_simulated",
            **self._limits[models.limit_class(model)].headers(),
        }

    def _refused(self, refusal: Refusal, request_id: str, model: str) -> web.Response:
        return web.Response(
            status=refusal.status,
            body=refusal.body(request_id),
            headers={**self._headers(request_id, model), **refusal.headers, "content-type": "application/json"},
        )


async def _before_answering(request: web.BaseRequest, asked: messages.Asked, fault: Fault) -> None:
    """Carry out a fault that acts before the first byte of the answer: an error answer (raised as `Refusal`), a pause,
    or a TCP reset. Other faults take effect later."""
    if (refusal := fault.refusal()) is not None:
        raise refusal
    match fault.name:
        case "hang":
            await sending.hang()
        case "slow_first_byte":
            await asyncio.sleep(fault.delay_s)
        case "reset" if fault.at == "start" or (fault.at is None and not asked.stream):
            await sending.reset(request)
        case "error_mid_stream" if not asked.stream:
            status = next((status for status, type in TYPES.items() if type == fault.type), 500)
            raise Refusal(status, f"{fault.type} instead of an answer", outcome=fault.name)
        case _:
            pass


def _json(content: dict[str, Any], headers: dict[str, str]) -> web.Response:
    return web.Response(body=json.dumps(content).encode(), headers={**headers, "content-type": "application/json"})
