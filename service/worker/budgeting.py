"""Creates the parts of a worker that call providers and limit these calls: the providers, their budgets, the daily
caps, and the gates (checks before a call) that use them."""

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from consumers.gates.budget import BudgetGate
from consumers.gates.caps import CapsGate
from consumers.gates.route import RouteGate
from consumers.job import now_ms
from consumers.lifecycle import Lifecycle
from consumers.limits.accounts import Budgets
from consumers.limits.estimates import Estimates
from consumers.limits.own_turns import own_accounts
from consumers.limits.spec import BudgetSpec
from consumers.providers.base import Provider
from consumers.providers.breakers import Breakers
from consumers.providers.registry import Registry
from consumers.providers.routes import Routes
from consumers.spending import Spending
from consumers.state.base import Store
from lanekeeper.telemetry.tracing import Tracing
from service.config.settings import Settings

HELD_FROM_S = 0.5
"""A lane counts as waiting for a provider's budget once one of its requests has waited for that budget for this many
seconds."""


@dataclass(frozen=True, slots=True)
class Budgeting:
    """The parts of a worker that limit its calls to providers: budgets and daily caps, the gates that enforce them, and
    the registry that makes the calls."""

    budgets: Budgets
    breakers: Breakers
    spending: Spending
    prices_as_of: str
    registry: Registry
    routes: Routes
    route_gate: RouteGate
    caps_gate: CapsGate
    budget_gate: BudgetGate

    def waiting_for(self) -> Mapping[str, str]:
        """The lanes whose requests wait for a provider's budget, each with the limit that they wait for, such as `rpm`
        (requests per minute). Lanes whose requests have all waited for less than `HELD_FROM_S` are left out."""
        return {
            lane: waiting.reason
            for lanes in self.budgets.waiting().values()
            for lane, waiting in lanes.items()
            if waiting.oldest_s >= HELD_FROM_S
        }


def open_budgeting(
    settings: Settings,
    providers: Sequence[Provider],
    *,
    store: Store,
    lifecycle: Lifecycle,
    tracing: Tracing,
    rng: random.Random,
    stack: AsyncExitStack,
) -> Budgeting:
    """Create the parts of a worker that limit its calls to providers; `stack` closes them."""
    spec, prices = settings.budget_spec(), settings.prices.table()
    budgets = _budgets(settings, spec, stack)
    breakers, spending = Breakers(store), Spending(store, settings.caps.spec())
    budget_gate = BudgetGate(
        budgets,
        breakers,
        Estimates(first_output_tokens=spec.first_output_tokens, first_bytes_per_token=spec.first_bytes_per_token),
        spec=spec,
        now_ms=now_ms,
        rng=rng,
        on_wait=lambda job, wait: lifecycle.publish(
            job,
            "deferred",
            delay_ms=round(1000 * wait.seconds),
            reason=wait.reason,
            **({} if wait.is_known else {"guessed": True}),
        ),
    )
    return Budgeting(
        budgets=budgets,
        breakers=breakers,
        spending=spending,
        prices_as_of=prices.as_of,
        registry=Registry(*providers, tracing=tracing, prices=prices, learn=budgets.learn),
        routes=Routes(settings.routes_spec()),
        route_gate=RouteGate(breakers, now_ms=now_ms, rng=rng),
        caps_gate=CapsGate(
            spending,
            breakers,
            prices=prices,
            estimate=budget_gate.amounts,
            now_ms=now_ms,
            rng=rng,
            publish=lifecycle.publish,
        ),
        budget_gate=budget_gate,
    )


def _budgets(settings: Settings, spec: BudgetSpec, stack: AsyncExitStack) -> Budgets:
    """The providers' budgets. If the store is in Redis, all processes that use this store share the budgets; otherwise
    the budgets belong to this process alone."""
    if not settings.store.startswith(("redis://", "rediss://")):
        return own_accounts(spec)

    # Imported here, because these modules take 4 MiB of memory, which a worker with a SQLite store can save.
    from consumers.state.redis.client import RedisClient
    from consumers.state.redis.shared_turns import shared_accounts

    client = RedisClient(settings.store)
    stack.push_async_callback(client.aclose)
    shared = shared_accounts(client, namespace=settings.namespace, spec=spec)
    stack.push_async_callback(shared.aclose)
    return shared
