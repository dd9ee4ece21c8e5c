"""Which providers may be called: circuit breakers, one for each provider and model that has failed, and pauses.

    closed ──failures in a row──> open ──its time is over──> probing ──answered──> closed
                                   ^                            │
                                   └───────── failed: twice as long

Only failures in a row count, not the share of calls that fail. If calls fail by chance (for example 30 % of them with
HTTP 529), most retries succeed, so an open breaker would only make requests wait. Three failures to connect in a row
are enough to open the breaker, because no request can cause them by what it contains. A response that refuses the
request (most of those with HTTP 4xx, such as 429) does not count as a failure, because the provider works. A timeout
counts only if the call had enough time, so that requesters with short deadlines do not block a provider for others.

While a breaker is open, one call after the other is let through as a trial (the probe), at most every few seconds. Each
process has its own breakers.

    called ──AccountError, confirmed──> paused ──a probe succeeds──> called

A provider that can answer nobody is paused: its key is refused, its account is unpaid, or its base URL is wrong. Such
an error is no request's fault: requests go to their next provider, or wait with their attempts unchanged. A request can
bring about some of these errors for itself alone (a firewall's page, a feature that the account lacks). So before such
an error pauses the provider, a call of our own has to fail in the same way. While the provider is paused, this process
probes it with calls of its own. Each process finds out by itself.

A model or provider that an operator has paused (`consumers/brake.py`) is not called either.
"""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from logging import INFO, WARNING
from math import inf
from typing import Any, NamedTuple, assert_never

import structlog

from consumers.background import Background
from consumers.brake import Brake
from consumers.failures import AccountError, ProviderError, TransientError, Trips
from consumers.job import Route
from consumers.limits.base import Kind
from consumers.providers.routes import OTHER
from lanekeeper.contract.problems import ProviderFailure
from lanekeeper.telemetry import signals

FAILURES = 10
"""If 30 % of all calls fail by chance, that many failures in a row happen once in 240,000 calls."""
REQUESTS = 3
"""The failures in a row must come from at least this many requests; otherwise one request that the provider cannot
handle, with its retries, would block all others."""
UNREACHED = 3
OVERLOADED_S = 3.0
"""Overloads (529) open a circuit breaker only if there was no answer for at least this many seconds. If 60 % of many
calls are answered 529, ten in a row are frequent, and most retries succeed nevertheless."""
WINDOW_S = 120.0
"""A failure counts for this long: not shorter than a call may take (60 s in the lane critical, 120 s in normal)."""
OPEN_S = 1.0
OPEN_MOST_S = 5.0
PROBE_WITHIN_S = 30.0
"""After this many seconds another call may be the probe, even if the first one has not ended."""
LOOK_S = 1.0
FAIR_S = 5.0
"""A call that timed out counts as a failure of the provider only if its timeout was at least this many seconds."""
REMEMBERED = 1000
"""There is a limit of circuit breakers, because requests can name any number of models."""
FIRST_PROBE_S = 1.0
"""The seconds from the pause of a provider to the first probe. Each further time between two probes is twice as long,
up to `PROBE_EVERY_S`."""
PROBE_EVERY_S = 60.0
WANTED_EVERY_S = 2.0
"""While requests wait for a paused provider, it is probed at least this often."""
AGAIN_S = 120.0
"""If a provider is paused again within this many seconds after a pause, the probe did not show what is wrong: the next
ones are calls of a model. If those do not show it either, the time between two probes doubles with each pause from the
second on, although requests wait, so that not each request ends a pause and begins the next."""
Probe = Callable[[Route, bool], Awaitable[None]]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ProviderChange:
    """A breaker's new state (event `breaker`) or a provider's pause (`paused`)."""

    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Permit:
    """The permission to make one call."""

    route: Route
    request: str
    is_probe: bool = False
    change: ProviderChange | None = None


class BreakerState(StrEnum):
    """CLOSED lets all calls pass, OPEN none, PROBING one."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class FailedCall(NamedTuple):
    """A failed call."""

    at_s: float
    request: str
    is_unreached: bool
    is_overload: bool = False


class Breaker:
    """The circuit breaker of one provider and model: without I/O, times in seconds by the event loop's clock. It is
    created at the first failure, and removed at the next answer."""

    def __init__(self, rng: random.Random) -> None:
        self.state = BreakerState.CLOSED
        self._failed: deque[FailedCall] = deque(maxlen=FAILURES)
        self._failing_since_s = inf
        self._step_s = OPEN_S
        self._until_s = self.down_since_s = inf
        self._rng = rng
        self.last: ProviderFailure | None = None
        """What the provider answered to the last call that failed, without its body, which is another request's."""
        self.error = ""
        """The last call's error, in brief."""

    def wait_s(self, now_s: float) -> float:
        if self.state is BreakerState.CLOSED:
            return 0.0
        if self.state is BreakerState.PROBING and now_s < self._until_s:
            return min(LOOK_S, self._until_s - now_s)
        return max(0.0, self._until_s - now_s)

    def is_idle(self, now_s: float) -> bool:
        return now_s - self._until_s > WINDOW_S

    def probe(self, now_s: float) -> None:
        """Let the next call be the probe."""
        self.state = BreakerState.PROBING
        self._until_s = now_s + PROBE_WITHIN_S

    def failed(self, failure: FailedCall, *, probe: bool) -> None:
        if self.state is BreakerState.CLOSED:
            while self._failed and failure.at_s - self._failed[0].at_s > WINDOW_S:
                self._failed.popleft()
            if not self._failed:
                self._failing_since_s = failure.at_s
            self._failed.append(failure)
            if self._is_too_many():
                self.open(failure.at_s)
        elif probe and self.state is BreakerState.PROBING:
            self.open(failure.at_s)

    def unknown(self, now_s: float, *, probe: bool) -> None:
        if probe and self.state is BreakerState.PROBING:
            self.state = BreakerState.OPEN
            self._until_s = now_s

    def open(self, now_s: float) -> None:
        step_s = self._step_s
        self._step_s = min(OPEN_MOST_S, 2 * step_s)
        self.state = BreakerState.OPEN
        self.down_since_s = min(self.down_since_s, now_s)
        self._until_s = now_s + self._rng.uniform(step_s / 2, step_s)

    def _is_too_many(self) -> bool:
        latest = list(self._failed)[-UNREACHED:]
        if len(latest) == UNREACHED and all(failure.is_unreached for failure in latest):
            return True
        for_s = self._failed[-1].at_s - self._failing_since_s
        if for_s < OVERLOADED_S and all(failure.is_overload for failure in self._failed):
            return False
        return len(self._failed) == FAILURES and len({failure.request for failure in self._failed}) >= REQUESTS


@dataclass(slots=True)
class ProviderPause:
    """The pause of one provider, or its last one."""

    reason: str
    error: str
    since_s: float
    by_call: bool
    every_s: float = field(init=False)
    until_s: float = field(init=False)
    contradicted: int = 0
    """How many pauses in a row, up to this one, came soon after a call of ours had succeeded."""
    ended_s: float = -inf
    probed_s: float = -inf
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a request waits for the provider."""
    waiting: asyncio.Timeout | None = None
    """The wait for the next probe."""
    asking: list[asyncio.Future[bool]] = field(default_factory=list)
    """Who wants to know how the next probe ends."""

    def __post_init__(self) -> None:
        self.every_s = self._spaced(FIRST_PROBE_S)
        self.until_s = self.since_s + self.every_s

    @property
    def next_s(self) -> float:
        """When the provider is probed, if a request waits for it."""
        first_s, next_s = self.since_s + self._spaced(FIRST_PROBE_S), self.probed_s + self._spaced(WANTED_EVERY_S)
        return min(self.until_s, max(first_s, next_s))

    def _spaced(self, seconds: float) -> float:
        return min(PROBE_EVERY_S, seconds * 2.0 ** min(6, max(0, self.contradicted - 1)))


async def _never(route: Route, by_call: bool) -> None:
    raise TransientError("nothing probes")


class Pauses:
    """The paused providers of this process, by name. Its tasks end with `aclose`."""

    def __init__(self, probe: Probe = _never) -> None:
        self._probe = probe
        self._pauses: dict[str, ProviderPause] = {}
        self._past: dict[str, ProviderPause] = {}
        self.well: dict[str, Route] = {}
        self._wanted: dict[str, Route] = {}
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._background = Background()

    def wait_s(self, route: Route, now_s: float) -> float:
        if (pause := self._pauses.get(route.provider)) is None:
            return 0.0
        self._wanted[route.provider] = route
        pause.wanted.set()
        return max(LOOK_S, pause.next_s - now_s)

    def since_s(self, route: Route) -> float | None:
        pause = self._pauses.get(route.provider)
        return None if pause is None else pause.since_s

    def reasons(self) -> Mapping[str, str]:
        return {name: pause.reason for name, pause in self._pauses.items()}

    def figures(self, now_s: float) -> Mapping[str, Mapping[str, str | float]]:
        return {
            name: {
                "reason": pause.reason,
                "error": pause.error,
                "for_s": round(now_s - pause.since_s, 1),
                "probe_in_s": round(max(0.0, pause.until_s - now_s), 1),
            }
            for name, pause in self._pauses.items()
        }

    async def judge(self, route: Route, error: ProviderError) -> ProviderError:
        if not isinstance(error, AccountError) or error.otherwise is None:
            return error
        if self.since_s(route) is None:
            if (check := self._checks.get(route.provider)) is None:
                check = self._background.begin(self._check(route), name=f"check {route.provider}")
                self._checks[route.provider] = check
            if await asyncio.shield(check) and (otherwise := error.take_otherwise()) is not None:
                otherwise.rate, otherwise.request_id = error.rate, error.request_id
                return otherwise
        return error

    def pause(self, route: Route, error: AccountError) -> ProviderChange | None:
        name, now_s = route.provider, asyncio.get_running_loop().time()
        if name in self._pauses:
            return None
        by_call, contradicted = error.otherwise is not None or error.status in (402, 429), 0
        if (last := self._past.get(name)) is not None and now_s - last.ended_s < AGAIN_S:
            by_call, contradicted = True, last.contradicted + last.by_call
        pause = ProviderPause(error.reason, error.brief, now_s, by_call, contradicted)
        self._pauses[name], self._wanted[name] = pause, route
        fields = {"provider": name, "reason": pause.reason, "error": pause.error}
        log.error(signals.PROVIDER_PAUSED, **fields)
        self._background.detached(self._until_well(name, pause), name=f"probe {name}")
        return ProviderChange("paused", fields)

    async def probe_now(self, name: str) -> bool | None:
        """Whether a paused provider can be called again, by a probe that begins now, or as soon as the one that runs
        has failed; None: it is not paused."""
        if (pause := self._pauses.get(name)) is None:
            return None
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        pause.asking.append(told)
        if pause.waiting is not None:
            pause.waiting.reschedule(asyncio.get_running_loop().time())
        return await told

    async def aclose(self) -> None:
        await self._background.finish(within_s=0)

    async def _check(self, route: Route) -> bool:
        """Whether a call of our own succeeds. It calls a model that has answered before, if there is one, because the
        route's model may be what the provider does not have."""
        try:
            return await self._is_well(self.well.get(route.provider, route), by_call=True)
        finally:
            del self._checks[route.provider]

    async def _until_well(self, name: str, pause: ProviderPause) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            if not pause.asking:
                await self._until_next_probe(pause)
            asking, pause.asking = pause.asking, []
            pause.wanted.clear()
            pause.probed_s = clock()
            routes = dict.fromkeys((self.well.get(name, self._wanted[name]), self._wanted[name]))
            is_well = any([await self._is_well(route, by_call=pause.by_call, pause=pause) for route in routes])
            for told in (*asking, *(pause.asking if is_well else ())):
                if not told.done():  # else who asked has gone
                    told.set_result(is_well)
            if is_well:
                break
            pause.every_s = min(PROBE_EVERY_S, 2 * pause.every_s)
            pause.until_s = clock() + pause.every_s
        pause.ended_s = clock()
        self._past[name] = self._pauses.pop(name)
        log.warning(signals.PROVIDER_RESUMED, provider=name, paused_s=round(clock() - pause.since_s, 1))

    async def _until_next_probe(self, pause: ProviderPause) -> None:
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout_at(pause.until_s) as pause.waiting:
                    await pause.wanted.wait()
                    await asyncio.sleep(pause.next_s - asyncio.get_running_loop().time())
            finally:
                pause.waiting = None

    async def _is_well(self, route: Route, *, by_call: bool, pause: ProviderPause | None = None) -> bool:
        try:
            await self._probe(route, by_call)
        except AccountError as error:
            if pause is not None:  # perhaps another one by now
                pause.reason, pause.error = error.reason, error.brief
            return False
        except ProviderError as failed:  # whatever else it refuses or fails at, it takes the key
            return failed.status != 0
        except Exception as error:  # a provider that nothing probes any more would stay paused for ever
            log.exception(signals.HANDLER_FAILED, where="probe", error=type(error).__name__)
            return False
        return True


@dataclass(eq=False)
class Breakers:
    """Says which providers may be called: the circuit breakers of this process, and its paused providers. A change is
    logged, and returned to the caller, who publishes it."""

    _: KW_ONLY
    pauses: Pauses = field(default_factory=Pauses)
    brake: Brake = field(default_factory=Brake)
    rng: random.Random = field(default_factory=random.Random)
    models: Collection[str] | None = None
    """Those that `states` names; all others are `other` there. None: it names all."""

    def __post_init__(self) -> None:
        self._all: dict[tuple[str, str], Breaker] = {}
        self._closed = Breaker(self.rng)
        """The breaker of all other providers and models, which never changes."""

    def wait_s(self, route: Route, now_s: float) -> float:
        """The seconds until a call of this route may be made, as far as its breaker knows, or until its paused provider
        is probed; 0 if it may be made now."""
        if self.brake.pauses and self.brake.of_route(route) is not None:
            return LOOK_S
        return self.pauses.wait_s(route, now_s) or self._known(route).wait_s(now_s)

    def least_wait_s(self, routes: Iterable[Route]) -> float:
        now_s = asyncio.get_running_loop().time()
        return min((self.wait_s(route, now_s) for route in routes), default=0.0)

    def usable(self, routes: Sequence[Route]) -> Sequence[Route]:
        now_s = asyncio.get_running_loop().time()
        return [route for route in routes if self.wait_s(route, now_s) <= 0] or routes

    def down_s(self, route: Route, now_s: float) -> float:
        since_s = self.pauses.since_s(route)
        return max(0.0, now_s - (self._known(route).down_since_s if since_s is None else since_s))

    def hindrance(self, routes: Sequence[Route]) -> str | None:
        if self.least_wait_s(routes) <= 0:
            return None
        paused = self.pauses.reasons()

        def why(route: Route) -> str:
            if (pause := self.brake.of_route(route)) is not None:
                return pause.description
            return f"{route.provider}: {paused.get(route.provider, 'its last calls failed')}"

        return "; ".join(dict.fromkeys(map(why, routes)))

    def last_failure(self, routes: Sequence[Route]) -> ProviderFailure | None:
        """Of the first of these routes whose breaker is open."""
        found = (self._known(route) for route in routes)
        return next(
            (breaker.last for breaker in found if breaker.state is not BreakerState.CLOSED and breaker.last), None
        )

    def enter(self, route: Route, now_s: float, *, request: str) -> Permit | None:
        if self.pauses.wait_s(route, now_s) > 0 or (self.brake.pauses and self.brake.of_route(route) is not None):
            return None
        breaker = self._known(route)
        if breaker.state is BreakerState.CLOSED:
            return Permit(route, request)
        if breaker.wait_s(now_s) > 0:
            return None
        breaker.probe(now_s)
        return Permit(route, request, is_probe=True, change=_changed(route, breaker, now_s))

    def answered(self, permit: Permit, now_s: float) -> ProviderChange | None:
        self.pauses.well[permit.route.provider] = permit.route
        return self._works(permit, now_s)

    def _works(self, permit: Permit, now_s: float) -> ProviderChange | None:
        breaker = self._all.pop(_key(permit.route), self._closed)
        if breaker.state is BreakerState.CLOSED:
            return None
        breaker.state = BreakerState.CLOSED
        return _changed(permit.route, breaker, now_s)

    def failed(self, permit: Permit, error: ProviderError, now_s: float, *, timeout_s: float) -> ProviderChange | None:
        match error.means.trips:
            case Trips.NO:
                return self._works(permit, now_s)
            case Trips.ACCOUNT:
                self.unknown(permit, now_s)
                return self.pauses.pause(permit.route, error) if isinstance(error, AccountError) else None
            case Trips.IN_TIME if timeout_s < FAIR_S:
                self.unknown(permit, now_s)
                return None
            case Trips.YES | Trips.IN_TIME | Trips.UNREACHED as trips:
                failure = FailedCall(
                    now_s,
                    permit.request,
                    is_unreached=trips is Trips.UNREACHED,
                    is_overload=error.means.says is Kind.OVERLOADED,
                )
            case never:
                assert_never(never)
        route = permit.route
        breaker = self._of(route)
        was = breaker.state
        breaker.error = error.brief
        breaker.last = None if error.failure is None else replace(error.failure, error="", request_id=None)
        breaker.failed(failure, probe=permit.is_probe)
        return None if breaker.state is was else _changed(route, breaker, now_s, error)

    def unknown(self, permit: Permit, now_s: float) -> None:
        self._known(permit.route).unknown(now_s, probe=permit.is_probe)

    def states(self, now_s: float) -> Mapping[str, Mapping[str, str | float]]:
        """Those that are not closed. Whether a provider that nobody has called for `WINDOW_S` still fails is not known:
        the next call is a probe, but its breaker is not told as open any more."""
        found: dict[str, Mapping[str, str | float]] = {}
        for (provider, model), breaker in self._all.items():
            if breaker.state is not BreakerState.CLOSED and not breaker.is_idle(now_s):
                shown = model if self.models is None or model in self.models else OTHER
                retry_in_s = round(breaker.wait_s(now_s), 1)
                found[f"{provider} {shown}"] = {
                    "state": breaker.state.value,
                    "retry_in_s": retry_in_s,
                    "error": breaker.error,
                }
        return found

    def _known(self, route: Route) -> Breaker:
        return self._all.get(_key(route), self._closed)

    def _of(self, route: Route) -> Breaker:
        if (found := self._all.get(_key(route))) is None:
            if len(self._all) >= REMEMBERED:
                closed = (key for key, breaker in self._all.items() if breaker.state is BreakerState.CLOSED)
                del self._all[next(closed, next(iter(self._all)))]
            found = self._all[_key(route)] = Breaker(self.rng)
        return found


def _changed(route: Route, breaker: Breaker, now_s: float, error: ProviderError | None = None) -> ProviderChange:
    fields = {
        "provider": route.provider,
        "model": route.model,
        "state": breaker.state.value,
        "error": None if error is None else error.brief,
        "retry_in_s": None if error is None else round(breaker.wait_s(now_s), 1),
    }
    log.log(WARNING if breaker.state is BreakerState.OPEN else INFO, signals.BREAKER_CHANGED, **fields)
    return ProviderChange("breaker", {name: value for name, value in fields.items() if value is not None})


def _key(route: Route) -> tuple[str, str]:
    return (route.provider, route.model)
