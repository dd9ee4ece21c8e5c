"""Life-cycle events on `lane.events`: for dashboards and audit, not persistent, never waited for."""

import json
from collections.abc import Mapping, Set
from typing import Any

from consumers.job import Job, NowMs
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
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
