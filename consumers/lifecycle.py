"""Publishes events about the life cycle of requests (such as `started`) to the exchange `lane.events`, for dashboards
and audit. The events are not persistent, and no request waits until they are published."""

import json
from collections.abc import Mapping, Set
from typing import Any, assert_never

from consumers.job import Job, NowMs
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried
from consumers.state.base import Completion
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import shown
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.telemetry import logs, signals
from topology.broker.notices import Notices
from topology.codec.decoding import app_of

EVENTS: Mapping[str, Set[str]] = {
    "deferred": {"delay_ms", "reason"},
    "started": {"wait_ms"},
    "retrying": {"delay_ms", "error"},
    "completed": {"model", "provider", "wait_ms", "run_ms"},
    "failed": {"code", "status"},
    "dead": {"code"},
    "removed": {"code", "exported"},
    "cancelled": {"status"},
    "replayed": {"status"},
    "undelivered": {"status"},
    "breaker": {"provider", "model", "state", "error", "retry_in_s"},
    "cap": {"cap", "percent", "used", "limit"},
}
"""All life-cycle events of requests (such as `started`), and the fields that each may have in addition to those in
`COMMON`, which every event has."""
COMMON = ("event", "id", "lane", "app", "attempt", "at_ms")
APP_LENGTH = 64
"""The maximum length, in characters, of an application's name in a life-cycle event; also of a lane's name and an
error's code that are copied from a dead letter."""
ID_LENGTH = 128
"""The maximum length, in characters, of a request's id in an event's routing key. With it, the key (lane, app, event
and id) stays within AMQP's limit of 255 bytes."""
_as_json = json.JSONEncoder(default=str).encode
"""Encodes events as JSON. One encoder is used for all events, because `json.dumps` with an option creates a new encoder
at each call."""
log = logs.logger()


class Lifecycle:
    """Publishes life-cycle events: the steps of a request (deferred, started, retrying, completed, failed, dead, …),
    and what the request has caused: a change of a circuit breaker, or a daily cap of which 50, 80 or 100 % are used."""

    def __init__(self, notices: Notices, *, names: Names, now_ms: NowMs) -> None:
        self._notices = notices
        self._names = names
        self._now_ms = now_ms

    def publish(self, job: Job, event: str, **detail: Any) -> None:
        """Publish one life-cycle event of a job's request, as a JSON object with the fields in `COMMON` and those in
        `detail`."""
        self._publish(
            event,
            id=_ascii(job.id, ID_LENGTH),
            lane=job.lane_name,
            app=_ascii(app_of(job.routing_key), APP_LENGTH),
            attempt=job.attempts,
            **detail,
        )

    def publish_outcome(self, job: Job, outcome: Outcome) -> None:
        """Publish the life-cycle event that belongs to the outcome of a settled delivery, and log the outcome."""
        match outcome:
            case Answered(model=model, provider=provider):
                model, wait_ms, run_ms = shown(model), job.wait_ms, job.run_ms
                log.debug(signals.REQUEST_ANSWERED, model=model, provider=provider, wait_ms=wait_ms, run_ms=run_ms)
                self.publish(job, "completed", model=model, provider=provider, wait_ms=wait_ms, run_ms=run_ms)
            case Deferred(delay_ms=delay_ms, reason=reason):
                log.debug(signals.REQUEST_DEFERRED, delay_ms=delay_ms, reason=reason)
                self.publish(job, "deferred", delay_ms=delay_ms, reason=reason)
            case Retried(delay_ms=delay_ms, brief=brief):
                log.info(signals.REQUEST_RETRIED, delay_ms=delay_ms, error=brief)
                self.publish(job, "retrying", delay_ms=delay_ms, error=brief)
            case Refused(problem) | Buried(problem):
                self.publish(job, "failed", code=problem.code, status=problem.status)
                if isinstance(outcome, Buried):
                    log.info(signals.REQUEST_BURIED, code=problem.code, reason=problem.brief)
                    self.publish(job, "dead", code=problem.code)
                else:
                    log.info(signals.REQUEST_REFUSED, code=problem.code, reason=problem.brief)
            case Dropped(problem):
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

    def publish_for_letter(self, letter: Message, event: str, **detail: Any) -> None:
        """Publish one life-cycle event about a dead letter: a message of `lane.dead`, for which there is no job."""
        self._publish(
            event,
            id=_ascii(letter.message_id or "", ID_LENGTH),
            lane=_ascii(letter.routing_key.split(".", 1)[0], APP_LENGTH),
            app=_ascii(app_of(letter.routing_key), APP_LENGTH),
            attempt=letter.headers.get(n.ATTEMPT, 0),
            code=str(letter.headers.get(n.DEAD_CODE, ""))[:APP_LENGTH],
            **detail,
        )

    def _publish(self, event: str, *, id: str, lane: str, app: str, **figures: Any) -> None:
        body = {"event": event, "id": id, "lane": lane, "app": app, "at_ms": self._now_ms(), **figures}
        self._notices.publish(
            _as_json(body).encode(),
            exchange=self._names.events,
            routing_key=self._names.event_key(lane, app, event, id),
        )


def _is_first(job: Job, completion: Completion) -> bool:
    """Whether no event about this cancellation (`completion`) was published yet. That is so if it was stored before the
    request arrived or while its message waited, or if the worker that had this message before may have died before it
    published the event."""
    return completion.mark is None or (job.came_before and completion.mark == job.fingerprint.mark)


def _ascii(text: str, length: int) -> str:
    """The text as ASCII, cut to `length` characters, because the routing key or id of a refused request can be any
    text."""
    return text[:length].encode("ascii", "replace").decode()
