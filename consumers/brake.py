"""The brake: what operators have paused, as this process knows it.

The store keeps the pauses (`StoredPauses`), and every process reads them twice a second. While the store is away, the
last known ones hold. A paused lane is not consumed (`Pool.pause`). Requests of a paused tenant or application, or whose
routes are all paused, are deferred (`BrakeGate`). A paused model or provider is not called (`Breakers`).
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import structlog
from cachetools import LRUCache

from consumers.clock import NowMs, moment_ms, moment_text
from consumers.clock import now_ms as system_ms
from consumers.job import Route
from consumers.state.base import PAUSE_KINDS, PAUSES_AT_MOST, Pause, PauseKind, StoredPauses, StoreUnavailable
from lanekeeper.contract.problems import RequestProblem, invalid_request
from lanekeeper.telemetry import signals

READ_EVERY_S = 0.5
LONGEST = {"name": 256, "who": 128, "why": 300}
log = structlog.get_logger()
_Key = tuple[PauseKind, str]


class Brake:
    """The pauses of this process. `store`: None if nothing can be paused."""

    def __init__(self, store: StoredPauses | None = None, *, now_ms: NowMs = system_ms) -> None:
        self._store = store
        self._now_ms = now_ms
        self.pauses: Mapping[_Key, Pause] = {}
        """Of those that end by themselves, some may have ended since they were read."""
        self._past: LRUCache[_Key, Pause] = LRUCache(PAUSES_AT_MOST)
        """The last pause of each name that has ended, and `until_ms` is when: to tell late requests why they waited."""
        self._reading = asyncio.Lock()
        self.behind: str | None = None if store is None else "what is paused is not known yet"

    async def run(self) -> None:
        while True:
            try:
                await self.read()
            except StoreUnavailable as away:
                log.debug(signals.PAUSES_UNREAD, reason=str(away))
            await asyncio.sleep(READ_EVERY_S)

    async def read(self) -> None:
        if self._store is None:
            return
        async with self._reading:  # so that an earlier state does not replace a later one
            found = {(pause.kind, pause.name): pause for pause in await self._store.pauses()}
            before, self.pauses, self.behind = self.pauses, found, None
        now_ms = self._now_ms()
        for key, pause in before.items():
            if found.get(key) != pause:
                self._past[key] = replace(pause, until_ms=min(now_ms, pause.until_ms or now_ms))
                if key not in found:
                    log.warning(signals.BRAKE_RELEASED, **_logged(pause), paused_s=(now_ms - pause.since_ms) // 1000)
        for key, pause in found.items():
            if before.get(key) != pause:
                log.warning(signals.BRAKE_PULLED, **_logged(pause))

    def of(self, kind: PauseKind, name: str) -> Pause | None:
        pause = self.pauses.get((kind, name))
        return None if pause is None or pause.has_ended(self._now_ms()) else pause

    def of_route(self, route: Route) -> Pause | None:
        return self.of("provider", route.provider) or self.of("model", route.model)

    def of_request(self, *, tenant: str, app: str, routes: Sequence[Route] = ()) -> Pause | None:
        return self.of("tenant", tenant) or self.of("app", app) or _of_all(routes, self.of_route)

    def during(
        self, *, lane: str, tenant: str, app: str, routes: Sequence[Route], from_ms: int, to_ms: int
    ) -> Pause | None:

        def find(kind: PauseKind, name: str) -> Pause | None:
            for pause in (self.pauses.get((kind, name)), self._past.get((kind, name))):
                if pause is not None and pause.since_ms < to_ms and not pause.has_ended(from_ms):
                    return pause
            return None

        def of_route(route: Route) -> Pause | None:
            return find("provider", route.provider) or find("model", route.model)

        return find("lane", lane) or find("tenant", tenant) or find("app", app) or _of_all(routes, of_route)


def _of_all(routes: Iterable[Route], of_route: Callable[[Route], Pause | None]) -> Pause | None:
    found = [of_route(route) for route in routes]
    return found[0] if found and all(found) else None


def _logged(pause: Pause) -> dict[str, str | None]:
    fields = pause.as_json()
    return {name: fields[name] for name in ("kind", "name", "until", "who", "why")}


def read_pause(fields: Mapping[str, object], *, now_ms: int, known: Mapping[PauseKind, Collection[str]]) -> Pause:
    """The pause that an operator asks for. Raises RequestProblem. `known`: the names that exist, of these kinds."""
    if unknown := sorted(fields.keys() - {"kind", "name", "until", "who", "why"}):
        raise invalid_request(f"pause: {unknown[0][:80]!r} is unknown; known are kind, name, until, who, why")
    kind = fields.get("kind")
    if kind not in PAUSE_KINDS:
        raise invalid_request(f"pause: kind {str(kind)[:80]!r} is not one of {', '.join(PAUSE_KINDS)}")
    texts = {field: fields.get(field) or "" for field in LONGEST}
    for field, text in texts.items():
        if not isinstance(text, str) or len(text) > LONGEST[field] or not text.isprintable():
            raise invalid_request(f"pause: {field}: allowed are up to {LONGEST[field]} printable characters")
    name, who, why = (str(text) for text in texts.values())
    of_kind = known.get(kind)
    if not name or (of_kind is not None and name not in of_kind):
        allowed = "a name" if of_kind is None else ", ".join(sorted(of_kind))
        raise invalid_request(f"pause: no {kind} {name!r}; allowed: {allowed}")
    until_ms = None
    if fields.get("until") is not None and ((until_ms := moment_ms(fields["until"])) is None or until_ms <= now_ms):
        raise invalid_request(f"pause: until is no time with its zone after {moment_text(now_ms)}")
    return Pause(kind=kind, name=name, since_ms=now_ms, until_ms=until_ms, who=who, why=why)


def too_many() -> RequestProblem:
    """The error for a pause beyond the limit."""
    return invalid_request(f"pause: there are {PAUSES_AT_MOST}, and there may be no more; resume some")
