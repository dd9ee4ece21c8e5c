"""A contestant: Lanekeeper's budget gate before the same calls, without broker, store and worker."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contest.calling import CONNECTING_S, Call, Reply, calling
from contest.load import MAX_TOKENS, MODEL, Ask, Asking, Load

from consumers.limits import headers
from consumers.limits.accounts import Budgets
from consumers.limits.base import NOTHING, Amounts, Feedback, Kind
from consumers.limits.estimates import Estimates, UsageClass
from consumers.limits.own_turns import own_accounts
from consumers.limits.spec import BudgetSpec
from topology.lanes import DEFAULT_LANES

ACCOUNT = "benchmark"
_KINDS = {200: Kind.ANSWERED, 429: Kind.RATE_LIMITED, 529: Kind.OVERLOADED}


def spec(load: Load) -> BudgetSpec:
    """The default budget settings, with times and rates scaled by the load's speed. Limits are learned from the
    provider's headers."""
    default = BudgetSpec()
    start = Amounts(*(load.speed * each for each in default.start))
    return BudgetSpec(burst_s=default.burst_s / load.speed, start=start)


@asynccontextmanager
async def gate_alone(base_url: str, load: Load) -> AsyncIterator[Asking]:
    async with calling(base_url) as call:
        yield _gate(call, own_accounts(spec(load)), load)


def _gate(call: Call, budgets: Budgets, load: Load) -> Asking:
    """A function that sends a request through the gate. As many requests of a lane run at a time as a worker has slots
    for it."""
    slots = {lane.name: asyncio.Semaphore(lane.slots) for lane in DEFAULT_LANES}
    default = BudgetSpec()
    estimates = Estimates(
        first_output_tokens=default.first_output_tokens, first_bytes_per_token=default.first_bytes_per_token
    )

    async def ask(ask: Ask) -> None:
        async with slots[ask.lane]:
            while True:
                reply = await _attempt(call, ask, budgets, estimates, load.speed)
                if reply.status == 200:
                    return
                if reply.status == 0:
                    await asyncio.sleep(CONNECTING_S / load.speed)

    return ask


async def _attempt(call: Call, ask: Ask, budgets: Budgets, estimates: Estimates, speed: float) -> Reply:
    """Reserve, call, settle, and learn from the answer, as a worker does."""
    task = UsageClass(ask.lane, "benchmark.budget", MODEL)
    amounts = Amounts(
        1.0, estimates.input_tokens(MODEL, len(ask.body)), estimates.output_tokens(task, max_tokens=MAX_TOKENS)
    )
    reservation = await budgets.reserve(ACCOUNT, lane=ask.lane, amounts=amounts, until=None)
    reply, used, began_s = Reply(status=0, headers={}), reservation.amounts, time.monotonic()
    try:
        reply = await call(ask.body)
        used = Amounts(float(reply.status != 0), reply.input_tokens, reply.output_tokens)
    finally:
        budgets.settle(reservation, used if reply.status else NOTHING)
    rate = headers.read(reply.headers, now_s=time.time())
    after_s = None if reply.retry_after_s is None else reply.retry_after_s / speed
    kind = _KINDS.get(reply.status, Kind.FAILED)
    counted = used._replace(output_tokens=0) if kind is Kind.ANSWERED else NOTHING
    took_s = time.monotonic() - began_s
    budgets.learn(ACCOUNT, Feedback(kind=kind, rate=rate, retry_after_s=after_s, counted=counted, took_s=took_s))
    if reply.status == 200:
        estimates.learn(
            task, body_bytes=len(ask.body), input_tokens=reply.input_tokens, output_tokens=reply.output_tokens
        )
    return reply
