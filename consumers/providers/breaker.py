"""Circuit breakers: a provider whose calls fail is left alone a while, then asked by one call. Pure but for the lease.

    closed ──FAILURES in a row, within WINDOW_S──> open ──its time is over──> probing ──answered──> closed
                                                    ^                            │
                                                    └───────── failed: twice as long

One for each provider and model. In a row, not a share: of calls that fail by chance (30 % of 529, say) a retry answers
most, and a breaker that opens on them would only add waiting. What a provider refuses (a 4xx of the request's own, a
429) shows that it is there. A timeout counts only where the call had time: a requester with a short deadline closes no
lane.

Each process finds out for itself, by its own calls, that a provider is down. A probe is one process's at a time, by a
lease in the store; the others stay open meanwhile. Where the store is away each probes by itself.
"""

import random
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import structlog

from consumers.failures import OverloadedError, ProviderError, RejectedError, TransientError
from consumers.providers.routes import Route
from consumers.state.base import Leases, StoreUnavailable
from topology import signals

FAILURES = 30
REQUESTS = 15
"""So many different ones must be among the failures: one that the provider cannot digest closes it to nobody else."""
WINDOW_S = 30.0
OPEN_S = 1.0
OPEN_MOST_S = 30.0
FAIR_S = 5.0
"""A call that was given less time than this says nothing by not being in time."""
PROBE_WITHIN_S = 30.0
"""A probe that takes longer holds nobody back any more."""
LOOK_S = 1.0
"""While another probes."""
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class State(StrEnum):
    """Of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """One provider and model, from its first failure until it answers; times are the event loop's."""

    __slots__ = ("_failed", "_openings", "_rng", "_until_s", "state")

    def __init__(self, rng: random.Random) -> None:
        self.state = State.CLOSED
        self._failed: deque[tuple[float, str]] = deque(maxlen=FAILURES)
        self._openings = 0
        self._until_s = -inf
        self._rng = rng

    def wait_s(self, now_s: float) -> float:
        """Until a call may be made, as far as is known; 0: now."""
        if self.state is State.CLOSED:
            return 0.0
        if self.state is State.PROBING and now_s < self._until_s:
            return min(LOOK_S, self._until_s - now_s)
        return max(0.0, self._until_s - now_s)

    def probe(self, now_s: float) -> None:
        """Its time is over, and the call that is made now is the one that finds out."""
        self.state = State.PROBING
        self._until_s = now_s + PROBE_WITHIN_S

    def hold(self, now_s: float) -> None:
        """Another process finds out."""
        self.state = State.OPEN
        self._until_s = now_s + LOOK_S * self._rng.uniform(0.5, 1.5)

    def failed(self, now_s: float, *, request: str, probe: bool) -> None:
        """Open, where that was the last of too many, or the probe."""
        if self.state is State.CLOSED:
            self._failed.append((now_s, request))
            is_too_many = len(self._failed) == FAILURES and now_s - self._failed[0][0] <= WINDOW_S
            if is_too_many and len({each for _, each in self._failed}) >= REQUESTS:
                self._open(now_s)
        elif probe and self.state is State.PROBING:
            self._open(now_s)

    def unknown(self, now_s: float, *, probe: bool) -> None:
        """The call ended without telling anything: the next one finds out."""
        if probe and self.state is State.PROBING:
            self.state = State.OPEN
            self._until_s = now_s

    def _open(self, now_s: float) -> None:
        step_s = min(OPEN_MOST_S, OPEN_S * 2**self._openings)
        self._openings = min(self._openings + 1, 16)
        self._failed.clear()
        self.state = State.OPEN
        self._until_s = now_s + self._rng.uniform(step_s / 2, step_s)


@dataclass(frozen=True, slots=True)
class Pass:
    """A call may be made; to be given to one of `answered`, `failed`, `unknown`."""

    route: Route
    is_probe: bool


class Breakers:
    """All of this process."""

    def __init__(self, leases: Leases | None = None, *, rng: random.Random | None = None) -> None:
        self._leases = leases
        self._rng = rng or random.Random()
        self._owner = uuid.uuid4().hex
        self._all: dict[tuple[str, str], Breaker] = {}
        """Those that have failed and not answered since: few, whatever models requests name."""

    def wait_s(self, route: Route, now_s: float) -> float:
        """Until a call may be made there, as far as is known; 0: now."""
        found = self._all.get(_key(route))
        return 0.0 if found is None else found.wait_s(now_s)

    async def enter(self, route: Route, now_s: float) -> Pass | None:
        """None: no call may be made there now."""
        breaker = self._all.get(_key(route))
        if breaker is None or breaker.state is State.CLOSED:
            return Pass(route, is_probe=False)
        if breaker.wait_s(now_s) > 0:
            return None
        breaker.probe(now_s)
        leased = False
        try:
            leased = await self._leased(route)
        finally:
            if not leased:
                breaker.hold(now_s)
        if not leased:
            return None
        self._tell(route, breaker, now_s)
        return Pass(route, is_probe=True)

    async def answered(self, entered: Pass, now_s: float) -> None:
        """The provider answered, if only to refuse."""
        breaker = self._all.pop(_key(entered.route), None)
        if breaker is not None and breaker.state is not State.CLOSED:
            breaker.state = State.CLOSED
            self._tell(entered.route, breaker, now_s)
        if entered.is_probe:
            await self._let_go(entered.route)

    async def failed(
        self, entered: Pass, error: ProviderError, now_s: float, *, request: str, timeout_s: float
    ) -> None:
        """The call failed: that is counted where it is the provider's doing. A failed probe keeps the lease: nobody
        else need ask."""
        if not _is_its_own(error):
            await self.answered(entered, now_s)
            return
        if error.type == "timeout" and timeout_s < FAIR_S:
            await self.unknown(entered, now_s)
            return
        breaker = self._all.setdefault(_key(entered.route), Breaker(self._rng))
        was = breaker.state
        breaker.failed(now_s, request=request, probe=entered.is_probe)
        if breaker.state is not was:
            self._tell(entered.route, breaker, now_s, error)

    async def unknown(self, entered: Pass, now_s: float) -> None:
        """It was cancelled, or had no time."""
        if (breaker := self._all.get(_key(entered.route))) is not None:
            breaker.unknown(now_s, probe=entered.is_probe)
        if entered.is_probe:
            await self._let_go(entered.route)

    def states(self, now_s: float) -> Mapping[str, Mapping[str, str | float]]:
        """Those that are not closed, by provider and model: state and seconds until the next probe."""
        return {
            f"{provider} {model}": {"state": each.state.value, "retry_in_s": round(each.wait_s(now_s), 1)}
            for (provider, model), each in self._all.items()
            if each.state is not State.CLOSED
        }

    async def _leased(self, route: Route) -> bool:
        if self._leases is None:
            return True
        try:
            return await self._leases.hold(_lease(route), self._owner, for_s=OPEN_MOST_S) is not None
        except StoreUnavailable:
            return True

    async def _let_go(self, route: Route) -> None:
        if self._leases is not None:
            try:
                await self._leases.let_go(_lease(route), self._owner)
            except StoreUnavailable:
                return

    @staticmethod
    def _tell(route: Route, breaker: Breaker, now_s: float, error: ProviderError | None = None) -> None:
        how = log.warning if breaker.state is State.OPEN else log.info
        more = {"error": error.detail, "retry_in_s": round(breaker.wait_s(now_s), 1)} if error is not None else {}
        how(signals.BREAKER_CHANGED, provider=route.provider, model=route.model, state=breaker.state.value, **more)


def _is_its_own(error: ProviderError) -> bool:
    match error:
        case TransientError() | OverloadedError():
            return True
        case RejectedError(status=401):
            return True  # nobody's request is answered with such a key
        case _:
            return False


def _key(route: Route) -> tuple[str, str]:
    return (route.provider, route.model)


def _lease(route: Route) -> str:
    return f"probe {route.provider} {route.model}"
