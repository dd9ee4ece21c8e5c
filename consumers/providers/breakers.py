"""The circuit breakers of a process, one for each provider and model that has failed (`breaker.py`).

A response that refuses the request (most of those with HTTP 4xx, such as 429) does not count as a failure, because the
provider works. A timeout counts only if the call had enough time, so that requesters with short deadlines do not block
a provider for others.

A process holds a lease in the store while its breaker is open. Another process that counts a few failures sees the
lease, and opens its own breaker too, although it has counted fewer failures than it would need to open its breaker
alone. Only the owner of the lease makes the trial call (the probe). While the store is unavailable, the breakers of the
processes are independent.
"""

import asyncio
import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from logging import INFO, WARNING
from typing import Any, assert_never

from consumers.chain import Route
from consumers.failures import ProviderError, Trips
from consumers.providers.breaker import Breaker, Failure, State
from consumers.state.base import Leases, StoreUnavailable
from lanekeeper.telemetry import logs, signals

FAIR_S = 5.0
"""A call that timed out counts as a failure of the provider only if its timeout was at least this many seconds."""
STORE_WITHIN_S = 1.0
"""A circuit breaker waits for an answer of the store for at most this many seconds; after that it treats the store as
unavailable."""
REMEMBERED = 1000
"""The maximum number of circuit breakers that a process keeps. There is a limit, because requests can name any number
of models."""
log = logs.logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a circuit breaker's state. It is published as the life-cycle event `breaker` of the request whose
    call caused the change."""

    provider: str
    model: str
    state: str
    error: str | None = None
    retry_in_s: float | None = None

    def figures(self) -> dict[str, Any]:
        """The fields of the life-cycle event `breaker`, which reports this change."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Permit:
    """A circuit breaker's permission to make one call. After the call, the caller passes the permit to `answered`,
    `failed` or `unknown`."""

    route: Route
    request: str
    is_probe: bool = False
    change: Change | None = None
    """The change of the circuit breaker, from open to probing, if this permit has caused it; otherwise None."""


class Breakers:
    """The circuit breakers of this process, one for each provider and model whose calls fail. A change of a breaker is
    logged, and returned to the caller, who publishes it."""

    def __init__(self, leases: Leases | None = None, *, rng: random.Random | None = None) -> None:
        self._leases = leases
        self._rng = rng or random.Random()
        self._owner = uuid.uuid4().hex
        self._all: dict[tuple[str, str], Breaker] = {}
        """The breakers of those providers and models that have not answered since their last failure."""
        self._closed = Breaker(self._rng)
        """The circuit breaker of all other providers and models: it is closed, has counted no failure, and never
        changes."""

    def wait_s(self, route: Route, now_s: float) -> float:
        """The seconds until a call of this route (a provider and model) may be made, as far as its circuit breaker
        knows; 0 if it may be made now."""
        return self._known(route).wait_s(now_s)

    def least_wait_s(self, routes: Iterable[Route]) -> float:
        """The seconds until a call of the first usable of these routes (providers and models) may be made, as far as
        their circuit breakers know; 0 if one may be made now."""
        now_s = asyncio.get_running_loop().time()
        return min(self.wait_s(route, now_s) for route in routes)

    def usable(self, routes: Sequence[Route]) -> Sequence[Route]:
        """Those of the given routes (providers and models) whose circuit breaker allows a call now; all of them if none
        does."""
        now_s = asyncio.get_running_loop().time()
        return [route for route in routes if self.wait_s(route, now_s) <= 0] or routes

    def down_s(self, route: Route, now_s: float) -> float:
        """For how many seconds the provider of the route has been down, that is, how long ago its circuit breaker was
        opened without being closed since; 0 if it is not down."""
        return max(0.0, now_s - self._known(route).down_since_s)

    async def enter(self, route: Route, now_s: float, *, request: str) -> Permit | None:
        """Ask whether the provider of this route may be called now: return a permit for one call, or None if its
        circuit breaker is open."""
        breaker = self._known(route)
        if breaker.state is State.CLOSED:
            return Permit(route, request)
        if breaker.wait_s(now_s) > 0:
            return None
        within_s = breaker.probe(now_s)
        try:
            is_ours = await self._lease(route, for_s=within_s)
        except BaseException:
            breaker.unknown(now_s, probe=True)
            raise
        if not is_ours:  # the breaker of another process is open, or probes
            breaker.open(now_s)
            return None
        return Permit(route, request, is_probe=True, change=_changed(route, breaker, now_s))

    async def answered(self, permit: Permit, now_s: float) -> Change | None:
        """Report to the circuit breaker that the provider answered, or refused the request: both show that the provider
        works. Returns the change of the breaker, if there is one."""
        breaker = self._all.pop(_key(permit.route), self._closed)
        change = None
        if was_open := breaker.state is not State.CLOSED:
            breaker.state = State.CLOSED
            change = _changed(permit.route, breaker, now_s)
        if was_open or permit.is_probe:
            await self._let_go(permit.route)
        return change

    async def failed(self, permit: Permit, error: ProviderError, now_s: float, *, timeout_s: float) -> Change | None:
        """Report a failed call to the circuit breaker, which counts it if the provider caused the failure. Returns the
        change of the breaker, if there is one."""
        match error.means.trips:
            case Trips.NO:
                return await self.answered(permit, now_s)
            case Trips.IN_TIME if timeout_s < FAIR_S:
                await self.unknown(permit, now_s)
                return None
            case Trips.YES | Trips.IN_TIME:
                is_unreached = False
            case Trips.UNREACHED:
                is_unreached = True
            case never:
                assert_never(never)
        route = permit.route
        breaker = self._of(route)
        was = breaker.state
        failure = Failure(now_s, permit.request, is_unreached=is_unreached)
        breaker.failed(failure, probe=permit.is_probe)
        if breaker.state is not was:
            change = _changed(route, breaker, now_s, error)
            await self._lease(route, for_s=breaker.wait_s(now_s))
            return change
        if breaker.is_doubted and not await self._lease(route, for_s=0) and breaker.state is State.CLOSED:
            breaker.open(now_s)
            return _changed(route, breaker, now_s, error)
        return None

    async def unknown(self, permit: Permit, now_s: float) -> None:
        """Report a call that has not shown whether the provider works: the call was cancelled, or its timeout was too
        short."""
        self._known(permit.route).unknown(now_s, probe=permit.is_probe)
        if permit.is_probe:
            await self._let_go(permit.route)

    def states(self, now_s: float) -> Mapping[str, Mapping[str, str | float]]:
        """For each circuit breaker that is not closed, by provider and model: its state, and the seconds until the next
        probe."""
        return {
            f"{provider} {model}": {"state": breaker.state.value, "retry_in_s": round(breaker.wait_s(now_s), 1)}
            for (provider, model), breaker in self._all.items()
            if breaker.state is not State.CLOSED
        }

    def _known(self, route: Route) -> Breaker:
        return self._all.get(_key(route), self._closed)

    def _of(self, route: Route) -> Breaker:
        if (found := self._all.get(_key(route))) is None:
            if len(self._all) >= REMEMBERED:
                closed = (key for key, breaker in self._all.items() if breaker.state is State.CLOSED)
                del self._all[next(closed, next(iter(self._all)))]
            found = self._all[_key(route)] = Breaker(self._rng)
        return found

    async def _lease(self, route: Route, *, for_s: float) -> bool:
        """Take or renew the lease in the store that a process holds while its circuit breaker for this route (a
        provider and model) is open. Returns False if another process has the lease; True if the store is unavailable.
        """
        if self._leases is None:
            return True
        try:
            async with asyncio.timeout(STORE_WITHIN_S):
                return await self._leases.hold(_name(route), self._owner, for_s=for_s)
        except (StoreUnavailable, TimeoutError):
            return True

    async def _let_go(self, route: Route) -> None:
        if self._leases is not None:
            with suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(STORE_WITHIN_S):
                    await self._leases.let_go(_name(route), self._owner)


def _changed(route: Route, breaker: Breaker, now_s: float, error: ProviderError | None = None) -> Change:
    change = Change(
        provider=route.provider,
        model=route.model,
        state=breaker.state.value,
        error=None if error is None else error.brief,
        retry_in_s=None if error is None else round(breaker.wait_s(now_s), 1),
    )
    log.log(
        WARNING if breaker.state is State.OPEN else INFO,
        signals.BREAKER_CHANGED,
        provider=change.provider,
        model=change.model,
        state=change.state,
        error=change.error,
        retry_in_s=change.retry_in_s,
    )
    return change


def _key(route: Route) -> tuple[str, str]:
    return (route.provider, route.model)


def _name(route: Route) -> str:
    return f"breaker {route.provider} {route.model}"
