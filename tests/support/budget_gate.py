"""A budget gate with two accounts, in virtual time."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from consumers.budget_gate import BudgetGate
from consumers.job import Chain, Job, Route
from consumers.limits.base import AccountCaps, BudgetSpec, Wait
from consumers.limits.budgets import own_budgets
from consumers.limits.estimates import Estimates
from consumers.outcomes import Answered, Outcome
from consumers.providers.breakers import Breakers
from tests.support.jobs import NOW_MS, Bench, decoded, read
from tests.support.virtual_time import virtually
from topology.lanes import CRITICAL, LaneSpec

BODY = json.dumps({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi " * 100}]}).encode()
DONE = Answered(body=b"{}", model="m", provider="one")


ONE = Route(provider="one", model="m", name="m", account="one/m")
TWO = Route(provider="two", model="m2", name="m2", account="two/m2")


class Ground:
    """A gate with two accounts, each with 60 requests a minute."""

    def __init__(self, *routes: Route) -> None:
        self.loop = asyncio.get_running_loop()
        self._began_s = self.loop.time()
        caps = AccountCaps(requests=60, input_tokens=60_000, output_tokens=60_000)
        self.spec = BudgetSpec(accounts={"one/m": caps, "two/m2": caps})
        self.budgets = own_budgets(self.spec)
        self.routes = routes or (ONE,)
        self.told: list[tuple[str, Wait]] = []
        self.gate = BudgetGate(
            self.budgets,
            Breakers(),
            Estimates(first_output_tokens=512, first_bytes_per_token=3.5),
            spec=self.spec,
            now_ms=self.now_ms,
            on_wait=lambda job, wait: self.told.append((job.id, wait)),
        )

    def now_ms(self) -> int:
        return NOW_MS + round(1000 * (self.loop.time() - self._began_s))

    def job(self, lane: LaneSpec = CRITICAL, *, deadline_ms: int | None = None, body: bytes = BODY) -> Job:
        headers = {} if deadline_ms is None else {"x-lane-deadline-ms": deadline_ms}
        key = f"{lane.name}.shop.chat.eu"
        job = Bench().job(lane=lane, body=body, headers=headers, routing_key=key, user_id="shop", reply_to=None)
        return read(job, Chain(self.routes), now_ms=self.now_ms())

    async def spend(self, name: str, requests: int = 0) -> None:
        """Use the whole budget, and this many requests more."""
        account = self.budgets.queue(name).account
        for bucket in account.buckets:
            bucket.savings = [0.0, 0.0, 0.0]
            bucket.level = 0.0
        account.buckets[0].level = -requests

    async def enter(self, job: Job) -> Outcome | None:
        return await self.gate.enter(job, decoded(job))


def story(tell: Callable[[Ground], Awaitable[None]], *routes: Route) -> None:
    async def told() -> None:
        await tell(Ground(*routes))

    virtually(told())
