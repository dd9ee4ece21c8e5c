"""A collector in the test's process: receives spans by OTLP over HTTP, and decodes them from the bytes that were sent.

async with OtlpReceiver() as otlp:
    ...  # OTEL_EXPORTER_OTLP_ENDPOINT=otlp.endpoint, in this process or another
    spans = await otlp.wait_for(lambda spans: any(span.name == "ack lane.critical" for span in spans))
"""

import asyncio
import gzip
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from tests.support.waiting import PATIENCE_S

_UNPACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """One exported span; ids are lower-case hexadecimal, `parent_id` is "" on a root, times are ns since 1970."""

    service: str
    scope: str
    name: str
    kind: str
    """INTERNAL, SERVER, CLIENT, PRODUCER or CONSUMER."""
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[tuple[str, str], ...]
    """Trace id and span id of each link."""
    attributes: dict[str, Any]
    status: str
    """UNSET, OK or ERROR."""
    status_message: str
    events: tuple[str, ...]
    start_ns: int
    end_ns: int
    resource: dict[str, Any] = field(repr=False)


class OtlpReceiver:
    """Listens on a free loopback port, in its own thread, because flushing an exporter may block the test's loop."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.requests: list[tuple[dict[str, str], bytes]] = []
        """Headers (names in lower case) and decompressed body of each export."""
        self.endpoint = ""
        """The value for OTEL_EXPORTER_OTLP_ENDPOINT; spans arrive at `/v1/traces` under it."""
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def do_POST(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(headers["content-length"]))
                body = _UNPACK.get(headers.get("content-encoding", ""), bytes)(body)
                known = self.path == "/v1/traces"
                if known:
                    with suppress(RuntimeError):  # the test has ended and its loop is closed
                        loop.call_soon_threadsafe(receiver._receive, headers, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if known else 404)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="otlp receiver")
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._thread.join()
        self._server.socket.close()  # not server_close, which would wait for the threads of open connections

    async def wait_for(
        self, condition: Callable[[list[ReceivedSpan]], object], *, timeout_s: float = PATIENCE_S
    ) -> list[ReceivedSpan]:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self.spans):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not in {timeout_s:g} s; received:\n{tree(self.spans)}") from None
        return list(self.spans)

    async def trace(self, trace_id: str, *, names: Iterable[str], timeout_s: float = PATIENCE_S) -> list[ReceivedSpan]:
        wanted = sorted(names)

        def complete(spans: list[ReceivedSpan]) -> bool:
            there = [span.name for span in spans if span.trace_id == trace_id]
            return all(there.count(name) >= wanted.count(name) for name in wanted)

        spans = await self.wait_for(complete, timeout_s=timeout_s)
        return sorted((span for span in spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def _receive(self, headers: dict[str, str], body: bytes) -> None:
        self.requests.append((headers, body))
        self.spans += spans_of(body)
        self._news.set()


def spans_of(body: bytes) -> list[ReceivedSpan]:
    export = ExportTraceServiceRequest()
    export.ParseFromString(body)
    found = []
    for of_resource in export.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            found += [_span(span, resource, of_scope.scope.name) for span in of_scope.spans]
    return found


def one(spans: Iterable[ReceivedSpan], name: str, **attributes: Any) -> ReceivedSpan:
    wanted = {key.replace("_", "."): value for key, value in attributes.items()}
    found = [span for span in spans if span.name == name and wanted.items() <= span.attributes.items()]
    assert len(found) == 1, f"{len(found)} spans {name!r} with {wanted} among:\n{tree(list(spans))}"
    return found[0]


def tree(spans: Sequence[ReceivedSpan]) -> str:
    """All spans as indented text, for the message of a failing test."""
    known = {span.span_id for span in spans}
    lines: list[str] = []

    def below(parent_id: str, depth: int) -> None:
        for span in sorted((each for each in spans if each.parent_id == parent_id), key=lambda each: each.start_ns):
            lines.append(f"{'  ' * depth}{span.kind} {span.name} [{span.service}] {span.status} {span.span_id}")
            below(span.span_id, depth + 1)

    for root in sorted({span.parent_id for span in spans if span.parent_id not in known}):
        lines.append(f"under {root or 'nothing'}:")
        below(root, 1)
    return "\n".join(lines) or "(nothing)"


def _span(span: WireSpan, resource: dict[str, Any], scope: str) -> ReceivedSpan:
    return ReceivedSpan(
        service=str(resource.get("service.name", "")),
        scope=scope,
        name=span.name,
        kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        attributes=_values(span.attributes),
        status=("UNSET", "OK", "ERROR")[span.status.code],
        status_message=span.status.message,
        events=tuple(event.name for event in span.events),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        resource=resource,
    )


def _values(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    if kind == "kvlist_value":
        return _values(value.kvlist_value.values)
    return getattr(value, kind)
