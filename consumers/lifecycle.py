"""Life-cycle events on `lane.events`: for dashboards and audit, not persistent, never waited for."""

import json
from collections.abc import Mapping, Set
from typing import Any, assert_never

from consumers.job import Job, NowMs
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried
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
"""All events, and the fields that each may have besides `COMMON`."""
COMMON = ("event", "id", "lane", "app", "attempt", "at_ms")
APP_LENGTH = 64
ID_LENGTH = 128
"""The most characters of an id in a routing key, so that a key of lane, app, event and id stays within 255 bytes."""
log = logs.logger()


class Lifecycle:
    """Publishes the steps of a request (deferred, started, retrying, completed, failed, dead, …), and changes that it
    caused (breaker, cap)."""

    def __init__(self, notices: Notices, *, names: Names, now_ms: NowMs) -> None:
        self._notices = notices
        self._names = names
        self._now_ms = now_ms

    def tell(self, job: Job, event: str, **detail: Any) -> None:
        """Publish one event. JSON: event, id, lane, app, attempt, at_ms, and what `detail` adds."""
        app, identity = _word(app_of(job.routing_key), APP_LENGTH), _word(job.id, ID_LENGTH)
        body = {
            "event": event,
            "id": identity,
            "lane": job.lane_name,
            "app": app,
            "attempt": job.attempts,
            "at_ms": self._now_ms(),
            **detail,
        }
        self._notices.publish(
            json.dumps(body).encode(),
            exchange=self._names.events,
            routing_key=self._names.event_key(job.lane_name, app, event, identity),
        )

    def settled(self, job: Job, outcome: Outcome) -> None:
        """Publish and log what a settled delivery came to."""
        match outcome:
            case Answered(model=model, provider=provider):
                model, wait_ms, run_ms = shown(model), job.wait_ms, job.run_ms
                log.debug(signals.REQUEST_ANSWERED, model=model, provider=provider, wait_ms=wait_ms, run_ms=run_ms)
                self.tell(job, "completed", model=model, provider=provider, wait_ms=wait_ms, run_ms=run_ms)
            case Deferred(delay_ms=delay_ms, reason=reason):
                log.debug(signals.REQUEST_DEFERRED, delay_ms=delay_ms, reason=reason)
                self.tell(job, "deferred", delay_ms=delay_ms, reason=reason)
            case Retried(delay_ms=delay_ms, brief=brief):
                log.info(signals.REQUEST_RETRIED, delay_ms=delay_ms, error=brief)
                self.tell(job, "retrying", delay_ms=delay_ms, error=brief)
            case Refused(problem) | Buried(problem):
                self.tell(job, "failed", code=problem.code, status=problem.status)
                if isinstance(outcome, Buried):
                    log.info(signals.REQUEST_BURIED, code=problem.code, reason=problem.brief)
                    self.tell(job, "dead", code=problem.code)
                else:
                    log.info(signals.REQUEST_REFUSED, code=problem.code, reason=problem.brief)
            case Dropped(problem):
                log.info(signals.REQUEST_REFUSED, code=problem.code, reason="")
                self.tell(job, problem.code)
            case Replayed(retold=True):
                pass  # the events were sent when it ended
            case Replayed(completion=completion):
                log.debug(signals.REQUEST_REPLAYED, code=completion.code)
                is_news = completion.code == "cancelled" and not job.attempts
                self.tell(job, "cancelled" if is_news else "replayed", status=completion.status)
            case _:
                assert_never(outcome)

    def tell_of_letter(self, letter: Message, event: str, **detail: Any) -> None:
        """Publish one event about a dead letter, whose request has ended long ago."""
        lane, app = (
            _word(letter.routing_key.split(".", 1)[0], APP_LENGTH),
            _word(app_of(letter.routing_key), APP_LENGTH),
        )
        identity = _word(letter.message_id or "", ID_LENGTH)
        attempt, code = letter.headers.get(n.ATTEMPT, 0), str(letter.headers.get(n.DEAD_CODE, ""))[:APP_LENGTH]
        told = {"event": event, "id": identity, "lane": lane, "app": app, "attempt": attempt, "code": code}
        self._notices.publish(
            json.dumps({**told, "at_ms": self._now_ms(), **detail}, default=str).encode(),
            exchange=self._names.events,
            routing_key=self._names.event_key(lane, app, event, identity),
        )


def _word(text: str, length: int) -> str:
    """The text as ASCII, cut to `length`: the key or id of a refused request may be anything."""
    return text if len(text) <= length and text.isascii() else text[:length].encode("ascii", "replace").decode()
