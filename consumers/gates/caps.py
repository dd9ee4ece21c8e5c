"""The caps gate: before the call of a request, it counts the request's estimated use against the daily caps; after the
call, it replaces the estimate by the real use (`consumers/spending.py`)."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from consumers.clock import NowMs, now_ms
from consumers.job import Attempted, Decoded, Job, Route
from consumers.limits.base import Amounts
from consumers.outcomes import Answered, Deferred, Outcome, ended
from consumers.providers.breakers import Breakers
from consumers.spending import MILLION, Hold, Over, Price, Prices, Spending, Spent
from consumers.state.base import StoreUnavailable
from topology.codec.decoding import Request

SPREAD_MS = 60_000
"""If a daily cap is used up, requests are deferred to the next day (UTC), and come back at random times within this
time after its beginning."""
TAKE_WITHIN_S = 10.0
"""How long a request may wait until its estimate is counted against its caps."""
STORE_AWAY_MS = 1000
"""The deferral if the store that counts the caps is unavailable."""
Estimate = Callable[[Job, Request, Route], Amounts]


@dataclass(slots=True, eq=False)
class CapsGate:
    """Lets a request pass if its lane and its tenant have enough left of their daily caps (limits of requests, tokens
    and dollars, set by the operator). `estimate`: `BudgetGate.amounts`. `publish`: `Lifecycle.publish`."""

    spending: Spending
    breakers: Breakers
    _: KW_ONLY
    prices: Prices
    estimate: Estimate
    now_ms: NowMs = now_ms
    rng: random.Random = field(default_factory=random.Random)
    publish: Callable[..., None]
    _held: dict[Job, Hold] = field(default_factory=dict, init=False)

    async def enter(self, job: Job, decoded: Decoded) -> Outcome | None:
        tenant = job.identity.tenant
        bounds = self.spending.bounds(job.lane_name, tenant)
        if not bounds or job.stopped is not None:
            return None
        route = self.breakers.usable(decoded.chain.routes)[0]
        price = self.prices.of(route.model)
        if price is None and any(bound.what == "usd" for bound in bounds):
            return ended(
                "forbidden_model",
                f"model {route.model[:80]!r} has no price, and what is spent here is capped in dollars; "
                f"allowed: {', '.join(sorted(self.prices.models))}",
            )
        try:
            wanted = _spent(self.estimate(job, decoded.request, route), price)
            async with asyncio.timeout(TAKE_WITHIN_S):
                found = await self.spending.take(bounds, wanted, publish=partial(self.publish, job))
        except (StoreUnavailable, TimeoutError):  # while a cap cannot be checked, no provider is called
            return Deferred(delay_ms=STORE_AWAY_MS, reason="store")
        if isinstance(found, Over):
            return self._over(job, decoded.request, found)
        self._held[job] = found
        return None

    async def leave(self, job: Job, decoded: Decoded, outcome: Outcome | None) -> None:
        """Correct what `enter` counted against the caps. After an answer, the amounts that the call used are counted.
        After a failure nothing is counted, unless the failed call may have to be paid for: then the estimate stays
        counted. In each case, earlier calls of the same attempt that failed and may have to be paid for are counted
        too."""
        hold, attempted = self._held.pop(job, None), job.attempted
        used = Spent()
        if isinstance(outcome, Answered):
            usage = None if attempted is None else attempted.usage
            tokens = 0.0 if usage is None else usage.input_tokens + usage.output_tokens
            used = Spent(1, tokens, (attempted and attempted.cost_usd) or 0.0)
            self.spending.count(job.lane_name, job.identity.tenant, used)
        elif hold is not None and attempted is not None and _may_be_paid(attempted):
            used = hold.spent
        for model, amounts in () if attempted is None else attempted.lost:
            _, tokens, usd = _spent(amounts, self.prices.of(model))
            used = Spent(used.requests, used.tokens + tokens, used.usd + usd)
        if hold is not None:
            self.spending.correct(hold, used)

    def _over(self, job: Job, request: Request, over: Over) -> Outcome:
        """The request is deferred to the next day, or refused if its deadline is before that or its estimate exceeds
        the whole cap."""
        left_ms = request.deadline_ms - self.now_ms()
        wait_ms = round(1000 * over.resets_in_s)
        if wait_ms >= left_ms or over.wanted > over.bound.limit:
            return ended("deadline_exceeded", f"{over}; the next day begins in {wait_ms} ms, and {left_ms} ms are left")
        delay_ms = min(wait_ms + round(self.rng.uniform(0, SPREAD_MS)), left_ms)
        return Deferred(delay_ms=delay_ms, reason=over.bound.reason)


def _may_be_paid(attempted: Attempted) -> bool:
    """Whether a call that gave no answer may have to be paid for: it is unknown what it used, or it used output
    tokens."""
    return attempted.usage is None or attempted.usage.output_tokens > 0


def _spent(amounts: Amounts, price: Price | None) -> Spent:
    usd = 0.0
    if price is not None:
        usd = (amounts.input_tokens * price.input + amounts.output_tokens * price.output) / MILLION
    return Spent(1, amounts.input_tokens + amounts.output_tokens, usd)
