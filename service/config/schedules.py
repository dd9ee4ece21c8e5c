"""The settings of schedules."""

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

import jiter
from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, BeforeValidator, Field

from consumers.flows.schedules import ScheduleSpec
from consumers.flows.webhooks import WebhookSpec
from lanekeeper.amqp.tolerant import HEADERS_BYTES, encoded
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import WEBHOOK
from lanekeeper.contract.problems import RequestProblem
from service.config.value_types import Disagreement, Section, wrong
from topology.codec.decoding import decode
from topology.lanes import LaneSpec

ID: Final = "0"


def _cron(value: str) -> str:
    try:
        next(CronSim(value, datetime.now(UTC)))
    except (CronSimError, StopIteration):
        raise wrong(
            "a cron expression that fires sometime, such as 0 7 * * 1-5 (minute hour day month weekday)"
        ) from None
    return value


def _zone(value: str) -> str:
    try:
        return ZoneInfo(value).key
    except (KeyError, OSError, ValueError):
        raise wrong("a time zone, such as Europe/Berlin") from None


def _object(value: Any) -> Any:
    try:
        return jiter.from_json(value.encode()) if isinstance(value, str) else value
    except ValueError:
        raise wrong("a table, in the environment as JSON") from None


class ScheduleSettings(Section):
    """A request that is published again and again, at the times of a cron expression."""

    cron: Annotated[str, AfterValidator(_cron)] | None = None
    """When: minute, hour, day of the month, month, weekday; with six fields, seconds first. Example: 0 7 * * 1-5"""
    timezone: Annotated[str, AfterValidator(_zone)] = "UTC"
    """The time zone of `cron`, with its summer time. Example: Europe/Berlin"""
    key: str = ""
    """The request's routing key. Example: batch.reports.nightly"""
    body: Annotated[dict[str, Any], BeforeValidator(_object)] = Field(default_factory=dict)
    """The request's body. Example: {"prompt": "Summarise the night."}"""
    headers: Annotated[dict[str, Any], BeforeValidator(_object)] = Field(default_factory=dict)
    """Further headers of the request. Example: {"x-lane-deadline-ms": 3600000}"""
    type: str | None = None
    """The handler that runs; None: the model. Example: chunk"""
    missed: Literal["skip", "once"] = "skip"
    """What becomes of a time at which nothing could be published for a minute. `once`: the last such request is
    published as soon as possible. Example: once"""

    def spec(self, name: str) -> ScheduleSpec:
        return ScheduleSpec(
            name=name,
            cron=self.cron or "",
            timezone=self.timezone,
            key=self.key,
            body=json.dumps(self.body, ensure_ascii=False).encode(),
            type=self.type,
            headers=self.headers,
            missed=self.missed,
        )

    def wrong(
        self,
        name: str,
        lanes: Mapping[str, LaneSpec],
        *,
        handlers: Collection[str],
        pipelines: Collection[str],
        webhooks: WebhookSpec,
        tenant: str,
    ) -> Iterator[Disagreement]:
        """Find what a worker would refuse in the request, and what is missing."""
        at = ("schedules", name)
        if self.cron is None:
            yield Disagreement("is not set: when it fires, such as 0 7 * * 1-5", at=((*at, "cron"),))
        lane, words = lanes.get(self.key.partition(".")[0]), self.key.split(".")
        if lane is None or len(words) < 3 or not all(words) or len(self.key.encode()) > 255:
            text = f"found {self.key[:80]!r}, allowed is LANE.APP.TASK with a lane of {', '.join(lanes)}"
            yield Disagreement(text, at=((*at, "key"),))
            return
        spec = self.spec(name)
        message = Message(
            body=spec.body, routing_key=spec.key, type=spec.type, headers=spec.headers, content_type="application/json"
        )
        try:
            decode(message, lane=lane, request_id=ID, hop=None, now_ms=0, handlers=handlers, pipelines=pipelines)
        except RequestProblem as problem:
            yield Disagreement(problem.detail, at=tuple((*at, each) for each in ("body", "headers", "type")))
        url = spec.headers.get(WEBHOOK)
        if isinstance(url, str) and (why := webhooks.refusal(url, tenant=tenant)) is not None:
            yield Disagreement(f"{WEBHOOK}: {why}", at=((*at, "headers"),))
        try:
            is_sendable = len(encoded(message)) <= HEADERS_BYTES
        except (TypeError, ValueError):
            is_sendable = False
        if not is_sendable:
            text = f"cannot be sent: allowed are keys of 255 bytes, integers of 64 bits, {HEADERS_BYTES} bytes in all"
            yield Disagreement(text, at=((*at, "headers"),))
