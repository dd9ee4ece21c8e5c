"""The circuit breakers of a process, one for each provider and model that failed (`breaker.py`).

A request that the provider refuses (a 4xx, a 429) shows that the provider works. A timeout is counted only if the call
was given enough time: a requester with a short deadline must not block a provider for others.

A process that opens a breaker holds a lease in the store while it is open. Another process that meets a few failures
itself finds the lease and opens its own breaker; only one of them probes. While the store is away, each process finds
out by itself.
"""

import asyncio
import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, assert_never

from consumers.chain import Route
from consumers.failures import ProviderError, Trips
from consumers.providers.breaker import Breaker, Failure, State
from consumers.state.base import Leases, StoreUnavailable
from lanekeeper.telemetry import logs, signals

FAIR_S = 5.0
"""The timeout of a call that was given less time than this is not counted."""
STORE_WITHIN_S = 1.0
"""No call waits longer for the store."""
REMEMBERED = 1000
"""How many breakers are kept at most: requesters can name any number of models."""
log = logs.logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How a breaker changed: published as the event `breaker` of the request that caused it."""

    provider: str
    model: str
    state: State
    error: str | None = None
    retry_in_s: float | None = None

    def figures(self) -> dict[str, Any]:
        """The fields of the event `breaker`."""
        found = {"provider": self.provider, "model": self.model, "state": self.state.value}
        return found if self.error is None else {**found, "error": self.error, "retry_in_s": self.retry_in_s}


@dataclass(frozen=True, slots=True)
class Pass:
    """The permission to make one call. After the call, pass it to `answered`, `failed` or `unknown`."""

    route: Route
    request: str
    is_probe: bool = False
    change: Change | None = None
    """How the breaker changed to let this call through."""


class Breakers:
    """All breakers of this process. A change is logged and returned to the caller, who publishes it."""

    def __init__(self, leases: Leases | None = None, *, rng: random.Random | None = None) -> None:
        self._leases = leases
        self._rng = rng or random.Random()
        self._owner = uuid.uuid4().hex
        self._all: dict[tuple[str, str], Breaker] = {}
        """The breakers by provider and model: those that have failed and not answered since."""

    def wait_s(self, route: Route, now_s: float) -> float:
        """Seconds until a call may be made there, as far as is known; 0: now."""
        found = self._all.get(_key(route))
        return 0.0 if found is None else found.wait_s(now_s)

    def least_wait_s(self, routes: Iterable[Route]) -> float:
        """Seconds until one of them may be called, as far as is known; 0: now."""
        if not self._all:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        return min(self.wait_s(each, now_s) for each in routes)

    def callable(self, routes: Sequence[Route]) -> Sequence[Route]:
        """The routes that are not known to fail now; all of them if none is left."""
        if not self._all:
            return routes
        now_s = asyncio.get_running_loop().time()
        return [each for each in routes if self.wait_s(each, now_s) <= 0] or routes

    def down_s(self, route: Route, now_s: float) -> float:
        """For how many seconds no call could be made there; 0: one may be made."""
        found = self._all.get(_key(route))
        return 0.0 if found is None else max(0.0, now_s - found.down_since_s)

    async def enter(self, route: Route, now_s: float, *, request: str) -> Pass | None:
        """Ask to make one call there; None: not now."""
        breaker = self._all.get(_key(route))
        if breaker is None or breaker.state is State.CLOSED:
            return Pass(route, request)
        if breaker.wait_s(now_s) > 0:
            return None
        within_s = breaker.probe(now_s)
        try:
            is_ours = await self._lease(route, for_s=within_s)
        except BaseException:
            breaker.unknown(now_s, probe=True)
            raise
        if not is_ours:  # another process has it open, or probes
            breaker.open(now_s)
            return None
        return Pass(route, request, is_probe=True, change=_changed(route, breaker, now_s))

    async def answered(self, entered: Pass, now_s: float) -> Change | None:
        """The provider answered, even if it refused. Returns how that changed the breaker, if it did."""
        breaker = self._all.pop(_key(entered.route), None)
        was_open = breaker is not None and breaker.state is not State.CLOSED
        change = None
        if breaker is not None and was_open:
            breaker.state = State.CLOSED
            change = _changed(entered.route, breaker, now_s)
        if was_open or entered.is_probe:
            await self._let_go(entered.route)
        return change

    async def failed(self, entered: Pass, error: ProviderError, now_s: float, *, timeout_s: float) -> Change | None:
        """The call failed: counted if the provider caused it. Returns how that changed the breaker, if it did."""
        match error.means.trips:
            case Trips.NO:
                return await self.answered(entered, now_s)
            case Trips.IN_TIME if timeout_s < FAIR_S:
                await self.unknown(entered, now_s)
                return None
            case Trips.YES | Trips.IN_TIME:
                is_unreached = False
            case Trips.UNREACHED:
                is_unreached = True
            case never:
                assert_never(never)
        route = entered.route
        breaker = self._of(route)
        was = breaker.state
        failure = Failure(now_s, entered.request, is_unreached=is_unreached)
        breaker.failed(failure, probe=entered.is_probe)
        if breaker.state is not was:
            change = _changed(route, breaker, now_s, error)
            await self._lease(route, for_s=breaker.wait_s(now_s))
            return change
        if breaker.is_doubted and not await self._lease(route, for_s=0) and breaker.state is State.CLOSED:
            breaker.open(now_s)
            return _changed(route, breaker, now_s, error)
        return None

    async def unknown(self, entered: Pass, now_s: float) -> None:
        """The call was cancelled or had too little time, and so says nothing about the provider."""
        if (breaker := self._all.get(_key(entered.route))) is not None:
            breaker.unknown(now_s, probe=entered.is_probe)
        if entered.is_probe:
            await self._let_go(entered.route)

    def states(self, now_s: float) -> Mapping[str, Mapping[str, str | float]]:
        """The breakers that are not closed, by provider and model: state and seconds until the next probe."""
        return {
            f"{provider} {model}": {"state": each.state.value, "retry_in_s": round(each.wait_s(now_s), 1)}
            for (provider, model), each in self._all.items()
            if each.state is not State.CLOSED
        }

    def _of(self, route: Route) -> Breaker:
        if (found := self._all.get(_key(route))) is None:
            if len(self._all) >= REMEMBERED:
                closed = (key for key, each in self._all.items() if each.state is State.CLOSED)
                del self._all[next(closed, next(iter(self._all)))]
            found = self._all[_key(route)] = Breaker(self._rng)
        return found

    async def _lease(self, route: Route, *, for_s: float) -> bool:
        """Take or renew the lease. False: another process has it."""
        if self._leases is None:
            return True
        try:
            async with asyncio.timeout(STORE_WITHIN_S):
                return await self._leases.hold(_name(route), self._owner, for_s=for_s) is not None
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
        state=breaker.state,
        error=None if error is None else error.brief,
        retry_in_s=None if error is None else round(breaker.wait_s(now_s), 1),
    )
    log.log(
        WARNING if change.state is State.OPEN else INFO,
        signals.BREAKER_CHANGED,
        provider=change.provider,
        model=change.model,
        state=change.state.value,
        error=change.error,
        retry_in_s=change.retry_in_s,
    )
    return change


def _key(route: Route) -> tuple[str, str]:
    return (route.provider, route.model)


def _name(route: Route) -> str:
    return f"breaker {route.provider} {route.model}"
