"""Recurring requests: at the times of a cron expression, one worker publishes a request to `lane.requests`.

The worker that has the lease does it. The id of a request is made of the schedule's name and the time, so that two
workers, or one that died before it had recorded a firing, publish one request. The store keeps when each schedule fired
last; what fell due since then while nobody could publish is missed.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo

import structlog
from cronsim import CronSim

from consumers.brake import Brake
from consumers.clock import NowMs, moment_text
from consumers.clock import now_ms as system_ms
from consumers.state.base import Firing, Identity, Pause, StoreUnavailable
from consumers.state.store import Store
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import signals

LOOK_EVERY_S: Final = 1.0
LEASE: Final = "schedules"
LEASE_S: Final = 10.0
LATE_MS: Final = 60_000
"""A firing that could not be published for longer than this is missed. One that is recorded further in the future was
recorded by a clock that was wrong."""
TOLD_MS: Final = 3_600_000
"""A time that was missed counts as late for so long, or until the schedule fires again."""
NOTHING: Final[Mapping[str, str | None]] = {"trouble": None, "failed": None, "late_since": None}
NO_FAILURES: Final = frozenset({"cancelled", "superseded"})
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """The settings of one schedule."""

    name: str
    cron: str
    timezone: str = "UTC"
    key: str
    """The request's routing key."""
    body: bytes
    type: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    missed: Literal["skip", "once"] = "skip"

    def after(self, at_ms: int) -> Iterator[int]:
        """The times after `at_ms` at which it fires, in ms since 1970. Around a change of summer time it does as
        Debian's cron: what falls into the skipped hour runs after it, what falls into the repeated one runs once."""
        zone = ZoneInfo(self.timezone)
        since = datetime.fromtimestamp(at_ms / 1000, zone).replace(fold=0)
        # cronsim does so itself only for five fields: it is given local times without a zone
        is_at_hours = not any(field.startswith("*") for field in self.cron.split()[-5:-3])
        for at in CronSim(self.cron, since.replace(tzinfo=None) if is_at_hours else since):
            found_ms = round(1000 * (_after_skipped(at, zone) if is_at_hours else at).timestamp())
            if found_ms > at_ms:
                at_ms = found_ms
                yield found_ms

    def due(self, last_ms: int, now_ms: int) -> list[int]:
        """The times after `last_ms` and up to `now_ms`; of many only the last ones."""
        back_ms = 100_000
        while True:
            since_ms = max(last_ms, now_ms - back_ms)
            found = list(takewhile(lambda at_ms: at_ms <= now_ms, self.after(since_ms)))
            if found or since_ms == last_ms:
                return found
            back_ms *= 100

    def request_id(self, at_ms: int) -> str:
        return f"schedule-{self.name}-{datetime.fromtimestamp(at_ms // 1000, UTC):%Y%m%dT%H%M%SZ}"

    def message(self, at_ms: int, *, now_ms: int, user: str | None) -> Message:
        """The request of this time. `user`: the AMQP user that publishes it; None: it belongs to no tenant."""
        return Message(
            body=self.body,
            content_type="application/json",
            type=self.type,
            message_id=self.request_id(at_ms),
            user_id=user,
            headers={**self.headers, n.SENT_MS: now_ms},
        )

    def figures(
        self, now_ms: int, last: Firing | None, pause: Pause | None = None, *, told: Mapping[str, str | None] = NOTHING
    ) -> dict[str, str | None]:
        """What the status tells. `last`: the id of the request that was published last. `told`: what only the process
        that publishes knows."""
        return {
            "cron": self.cron,
            "timezone": self.timezone,
            "key": self.key,
            "missed": self.missed,
            "next": moment_text(next(self.after(now_ms))),
            "last": (last and last.id) or None,
            "paused": None if pause is None else pause.description,
            **told,
        }


def _after_skipped(at: datetime, zone: ZoneInfo) -> datetime:
    """A local time in its zone: the first of two, or the next one if it is in a skipped hour."""
    while (found := at.replace(tzinfo=zone)).astimezone(UTC).astimezone(zone).replace(tzinfo=None) != at:
        at += timedelta(minutes=1)
    return found


class Schedules:
    """The schedules of the settings. `user`: as in `ScheduleSpec.message`."""

    def __init__(
        self,
        specs: Sequence[ScheduleSpec],
        *,
        store: Store,
        publisher: Publisher,
        exchange: str,
        brake: Brake,
        user: str | None,
        now_ms: NowMs = system_ms,
    ) -> None:
        self.specs = specs
        self._store = store
        self._publisher = publisher
        self._exchange = exchange
        self._brake = brake
        self._user = user
        self._now_ms = now_ms
        self._firings: Mapping[str, Firing] = {}
        self._paused: set[str] = set()
        """Schedules that something fell due of during a pause that may not have ended."""
        self._troubles: dict[str, str] = {}
        self._leads = False
        self._missed: dict[str, int] = {}
        """The last time that each schedule missed, unless it was paused, until it fires again."""
        self._followed: dict[str, str] = {}
        """The id of the request whose end is looked for, of each schedule: the next one when it has ended."""
        self._ended: dict[str, tuple[str, str]] = {}
        """The id of the request of each schedule that ended last, and how: a problem's code, empty if it was
        answered."""

    async def run(self, *, owner: str) -> None:
        """Publish what is due, whenever this process has the lease, until cancelled. `owner`: this process's unique
        name."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                try:
                    await self.look(owner=owner)
                except StoreUnavailable:  # `probing` logs it; what falls due meanwhile waits
                    self._leads = False
        finally:
            with suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._store.let_go(LEASE, owner)

    async def look(self, *, owner: str) -> None:
        """Publish what is due, if this process has the lease. Raises StoreUnavailable."""
        is_leader = await self._store.hold(LEASE, owner, for_s=LEASE_S)
        self._firings = await self._store.firings()
        self._leads = is_leader
        if not is_leader:
            for known in (self._troubles, self._missed, self._followed, self._ended, self._paused):
                known.clear()
            return
        for spec in self.specs:
            try:
                await self._fire(spec)
                self._troubles.pop(spec.name, None)
                await self._follow(spec)
            except StoreUnavailable:
                raise
            except Exception as error:  # a fault of ours in one schedule; it is tried again at the next look
                if spec.name not in self._troubles:
                    log.exception(signals.SCHEDULE_FAILED, schedule=spec.name)
                self._troubles[spec.name] = type(error).__name__

    async def _fire(self, spec: ScheduleSpec) -> None:
        now_ms = self._now_ms()
        last = self._firings.get(spec.name)
        if last is None:  # it is new, or the store was lost: what fell due before is not known
            await self._store.fired(spec.name, Firing(now_ms, ""))
            return
        if last.at_ms > now_ms + LATE_MS:
            log.warning(signals.SCHEDULE_AHEAD, schedule=spec.name, recorded=moment_text(last.at_ms))
            await self._store.fired(spec.name, Firing(now_ms, last.id), instead_of_ms=last.at_ms)
            return
        due = spec.due(last.at_ms, now_ms)
        if not due:
            return
        if self._brake.of("schedule", spec.name) is not None:
            self._paused.add(spec.name)
            return
        was_paused = spec.name in self._paused
        is_late = now_ms - due[-1] > LATE_MS or was_paused
        self._paused.discard(spec.name)
        at_ms = due[-1]
        runs = not is_late or spec.missed == "once"
        if runs:
            message = spec.message(at_ms, now_ms=now_ms, user=self._user)
            try:
                await self._publisher.publish(message, exchange=self._exchange, routing_key=spec.key)
            except BrokerError as error:  # tried again at the next look
                log.warning(signals.SCHEDULE_UNPUBLISHED, schedule=spec.name, error=str(error))
                return
            log.info(signals.SCHEDULE_FIRED, schedule=spec.name, id=message.message_id, late_s=(now_ms - at_ms) // 1000)
        if missed := [moment_text(each) for each in (due[:-1] if runs else due)]:
            log.warning(
                signals.SCHEDULE_MISSED,
                schedule=spec.name,
                count=len(missed),
                last=missed[-1],
                runs_once=spec.missed == "once",
            )
        firing = Firing(at_ms, spec.request_id(at_ms) if runs else last.id)
        await self._store.fired(spec.name, firing)
        self._firings = {**self._firings, spec.name: firing}
        if runs:
            self._missed.pop(spec.name, None)
        elif not was_paused:
            self._missed[spec.name] = at_ms

    async def _follow(self, spec: ScheduleSpec) -> None:
        """Look how the schedule's request ended."""
        last = self._firings.get(spec.name)
        last_id = "" if last is None else last.id
        id = self._followed.setdefault(spec.name, last_id)
        if not id or self._ended.get(spec.name) == (id, ""):
            self._followed[spec.name] = last_id
            return
        found = await self._store.find(Identity(self._user or "", id))
        if found is not None and found.completion is None:
            return
        self._followed[spec.name] = last_id
        if found is not None and found.completion is not None:
            code = found.completion.code
            self._ended[spec.name] = id, "" if code in NO_FAILURES else code
        elif self._ended.get(spec.name, ("", ""))[0] == id:  # the result is no longer kept
            del self._ended[spec.name]

    def late(self) -> dict[str, float]:
        """For how many seconds a due time of each schedule has passed without its request, if this process publishes
        them."""
        now_ms = self._now_ms()
        since = {spec.name: self._late_since_ms(spec, now_ms) for spec in self.specs}
        return {name: 0.0 if at_ms is None else (now_ms - at_ms) / 1000 for name, at_ms in since.items() if self._leads}

    def failed(self) -> dict[str, bool]:
        """Whether the last request of each schedule whose end is known failed, if this process publishes them."""
        return {name: bool(code) for name, (_, code) in self._ended.items() if self._leads}

    def _late_since_ms(self, spec: ScheduleSpec, now_ms: int) -> int | None:
        last = self._firings.get(spec.name)
        if last is None or not self._leads or self._brake.of("schedule", spec.name) is not None:
            return None
        if spec.name in self._paused:  # the pause has just ended: what fell due in it is missed at the next look
            return None
        missed_ms = self._missed.get(spec.name)
        if missed_ms is not None and now_ms - missed_ms < TOLD_MS:
            return missed_ms
        due_ms = next(spec.after(last.at_ms))
        return due_ms if due_ms <= now_ms else None

    def figures(self) -> dict[str, dict[str, str | None]]:
        now_ms = self._now_ms()
        return {spec.name: self._figures_of(spec, now_ms) for spec in self.specs}

    def _figures_of(self, spec: ScheduleSpec, now_ms: int) -> dict[str, str | None]:
        name, since_ms = spec.name, self._late_since_ms(spec, now_ms)
        id, code = self._ended.get(name, ("", ""))
        told = {
            "trouble": self._troubles.get(name),
            "failed": f"{id} ended as {code}" if code else None,
            "late_since": None if since_ms is None else moment_text(since_ms),
        }
        return spec.figures(now_ms, self._firings.get(name), self._brake.of("schedule", name), told=told)
