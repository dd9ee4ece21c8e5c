"""Tells what happens to requests: as life-cycle events (such as `started`) on the exchange `lane.events`, for
dashboards and audit, as log lines, and in the trace. The events are not persistent, and no request waits until they
are published."""

import json
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, assert_never

import structlog

from consumers.clock import NowMs, moment_ms, now_ms
from consumers.job import Job
from consumers.outcomes import (
    Answered,
    Batched,
    DeadLettered,
    Deferred,
    Outcome,
    PipelineAdvanced,
    Refused,
    Replayed,
    Retried,
    Superseded,
)
from consumers.state.base import Completion
from lanekeeper.amqp.tolerant import KEY_BYTES
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import shown
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing, record_outcome, record_request
from topology.broker.notices import Notices
from topology.codec.decoding import app_of

APP_LENGTH = 64
ID_LENGTH = 128
MS: Final = 1_000_000
SHORTEST_NS: Final = 1 * MS
"""A wait outside a worker has a span only if it is at least this long."""
SHORTEST_IN_WORKER_NS: Final = 5 * MS
FAILURES: Final = 20
_as_json = json.JSONEncoder(default=str).encode
"""Encodes events as JSON. One encoder is used for all events, because `json.dumps` with an option creates a new encoder
at each call."""
log = structlog.get_logger()
KEPT_NAMES: Final[Mapping[type, str]] = {DeadLettered: "buried", Superseded: "dropped", PipelineAdvanced: "stepped"}
"""`lane.outcome` of spans, as dashboards read it."""


class Lifecycle:
    """Publishes life-cycle events: the steps of a request, and what the request has caused: a change of a circuit
    breaker, the pause of a provider, or a cap of which 50, 80 or 100 % are used."""

    def __init__(self, notices: Notices, *, names: Names, now_ms: NowMs = now_ms) -> None:
        self._notices = notices
        self._names = names
        self._now_ms = now_ms
        self.failures: deque[dict[str, Any]] = deque(maxlen=FAILURES)

    def publish(self, job: Job, event: str, **detail: Any) -> None:
        if step := job.step:
            detail = {"step": step, **detail}
        self._publish(event, job.id, job.lane_name, job.app, attempt=job.attempts, **detail)

    def publish_outcome(self, job: Job, outcome: Outcome) -> None:
        match outcome:
            case Answered(model=model, provider=provider, stop_reason=stop_reason):
                model, wait_ms, run_ms = shown(model), job.wait_ms, job.run_ms
                told = {"model": model, "provider": provider, "wait_ms": wait_ms, "run_ms": run_ms}
                if stop_reason is not None:
                    told["stop_reason"] = shown(stop_reason)
                log.debug(signals.REQUEST_ANSWERED, **told)
                self.publish(job, "completed", **told)
            case Deferred(delay_ms=delay_ms, reason=reason):
                log.debug(signals.REQUEST_DEFERRED, delay_ms=delay_ms, reason=reason)
                self.publish(job, "deferred", delay_ms=delay_ms, reason=reason)
            case Batched():
                log.debug(signals.REQUEST_DEFERRED, delay_ms=None, reason="batch")
                self.publish(job, "deferred", reason="batch")
            case Retried(delay_ms=delay_ms, brief=brief):
                log.info(signals.REQUEST_RETRIED, delay_ms=delay_ms, error=brief)
                self.publish(job, "retrying", delay_ms=delay_ms, error=brief)
            case Refused(problem, is_silent=True):
                log.info(signals.REQUEST_REFUSED, code=problem.code, reason=problem.brief)
            case Refused(problem) | DeadLettered(problem):
                is_buried = isinstance(outcome, DeadLettered)
                event = signals.REQUEST_BURIED if is_buried else signals.REQUEST_REFUSED
                log.info(event, code=problem.code, reason=problem.brief)
                id, app = _ascii(job.id, ID_LENGTH), _ascii(job.app, APP_LENGTH)
                where = {"id": id, "lane": job.lane_name, "code": problem.code, "app": app, "trace": job.trace_id}
                self.failures.append({"at_ms": self._now_ms(), **where})
                self.publish(job, "failed", code=problem.code, status=problem.status)
                if is_buried:
                    self.publish(job, "dead", code=problem.code)
            case PipelineAdvanced(flow=flow, done=done, of=of):
                log.debug(signals.REQUEST_STEPPED, step=flow.step, done=done, of=of)
                self.publish(job, "step", next=flow.step, **({"done": done, "of": of} if of else {}))
            case Superseded(problem):
                log.info(signals.REQUEST_REFUSED, code=problem.code, reason="")
                self.publish(job, problem.code)
            case Replayed(is_reply_only=True):
                pass  # the events were published when the request ended
            case Replayed(completion=completion):
                log.debug(signals.REQUEST_REPLAYED, code=completion.code)
                is_first = completion.code == "cancelled" and _is_first(job, completion)
                self.publish(job, "cancelled" if is_first else "replayed", status=completion.status)
            case _:
                assert_never(outcome)

    def publish_webhook(self, id: str, routing_key: str, **detail: Any) -> None:
        self._publish("webhook", id, routing_key.partition(".")[0], app_of(routing_key), **detail)

    def publish_batch(self, id: str, lane: str, **detail: Any) -> None:
        """`lane`: of its first request."""
        self._publish("batch", id, lane, "batches", **detail)

    def publish_group(self, routing_key: str, *, id: str, **progress: Any) -> None:
        """`routing_key`: of the first of its requests that was seen."""
        self._publish("group", id, routing_key.partition(".")[0], app_of(routing_key), **progress)

    def publish_for_letter(self, letter: Message, event: str, **detail: Any) -> None:
        key, id = letter.routing_key, letter.message_id or ""
        attempt, code = letter.headers.get(n.ATTEMPT, 0), str(letter.headers.get(n.DEAD_CODE, ""))[:APP_LENGTH]
        self._publish(event, id, key.partition(".")[0], app_of(key), attempt=attempt, code=code, **detail)

    def _publish(self, event: str, id: str, lane: str, app: str, **figures: Any) -> None:
        id, lane, app = _ascii(id, ID_LENGTH), _ascii(lane, APP_LENGTH), _ascii(app, APP_LENGTH)
        body = {"event": event, "id": id, "lane": lane, "app": app, "at_ms": self._now_ms(), **figures}
        self._notices.publish(
            _as_json(body).encode(),
            exchange=self._names.events,
            # too long, it would be an error for all that are written together with it
            routing_key=self._names.event_key(lane, app, event, id)[:KEY_BYTES],
        )


def _is_first(job: Job, completion: Completion) -> bool:
    """Whether no event about this cancellation (`completion`) was published yet. That is so if it was stored before the
    request arrived or while its message waited, or if the worker that had this message before may have died before it
    published the event."""
    return completion.mark is None or (job.came_before and completion.mark == job.fingerprint.mark)


def _ascii(text: str, length: int) -> str:
    return text[:length] if text.isascii() else text[:length].encode("ascii", "replace").decode()


def record(tracing: Tracing, job: Job, outcome: Outcome, *, taken_ns: int) -> None:
    """Write into the span of a delivery what its request is and how the delivery ended, and, as spans of their own,
    where the request waited before."""
    record_request(
        job.span,
        lane=job.lane_name,
        app=job.app,
        attempt=job.attempts,
        wait_ms=job.wait_ms,
        redelivered=job.delivery.redelivered,
        step=job.step,
    )
    name = KEPT_NAMES.get(type(outcome)) or type(outcome).__name__.lower()
    match outcome:
        case Deferred(delay_ms=delay_ms) | PipelineAdvanced(delay_ms=delay_ms):
            record_outcome(job.span, name, delay_ms=delay_ms)
        case Retried(delay_ms=delay_ms):
            record_outcome(job.span, name, delay_ms=delay_ms, error="attempt_failed")
        case Refused(problem) | DeadLettered(problem) | Superseded(problem):
            record_outcome(job.span, name, error=problem.code)
        case Replayed(completion=completion) if completion.code:
            record_outcome(job.span, name, error=completion.code)
        case Answered() | Replayed() | Batched():
            record_outcome(job.span, name)
        case _:
            assert_never(outcome)
    for wait in waits(job, taken_ns):
        came_by = None if wait.is_in_worker else job.message
        tracing.passed(wait.name, start_ns=wait.start_ns, end_ns=wait.end_ns, came_by=came_by)


class WaitSpan(NamedTuple):
    """One wait of a request: the name of its span, and its beginning and end in ns since 1970."""

    name: str
    start_ns: int
    end_ns: int
    is_in_worker: bool = False


def waits(job: Job, taken_ns: int) -> list[WaitSpan]:
    """The waits of a request before its call to a provider, as far as they are long enough for a span: those outside
    the worker, which began when its requester published it, when a worker published it again, or when it became a dead
    letter, and the one between its delivery and its call."""
    queue, hop, found = job.delivery.queue, job.hop, list[WaitSpan]()
    if hop.hop_ms is not None and hop.back_ms is not None:
        back_ns = min(hop.back_ms * MS, taken_ns)
        found += [WaitSpan(f"{signals.DELAY} {queue}", hop.hop_ms * MS, back_ns)]
        found += [WaitSpan(f"{signals.WAIT} {queue}", back_ns, taken_ns)]
    elif not job.trusted and (sent_ns := _sent_ns(job, taken_ns)) is not None:
        if (parked_ms := moment_ms(hop.dead_at)) is not None:
            # a requester may have written it; OpenTelemetry knows no time before 1970, and drops the whole batch for it
            found += [WaitSpan(f"{signals.WAIT} {signals.DEAD_LETTER}", max(0, parked_ms) * MS, sent_ns)]
        found += [WaitSpan(f"{signals.WAIT} {queue}", sent_ns, taken_ns)]
    if job.attempted is not None:
        found += [
            WaitSpan(f"{signals.WAIT} {signals.TURN}", taken_ns, job.attempted.started_ms * MS, is_in_worker=True)
        ]
    return [
        each
        for each in found
        if each.end_ns - each.start_ns >= (SHORTEST_IN_WORKER_NS if each.is_in_worker else SHORTEST_NS)
    ]


def _sent_ns(job: Job, taken_ns: int) -> int | None:
    if job.decoded is not None:
        sent_ms = job.decoded.request.published.ms
        return taken_ns if sent_ms == job.taken_ms else sent_ms * MS
    header = job.message.headers.get(n.SENT_MS)  # an expired message was not decoded, so its header is not validated
    return header * MS if isinstance(header, int) and not isinstance(header, bool) and header > 0 else None
