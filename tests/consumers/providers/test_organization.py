"""The limits of an organization, read from the Admin API before the first call."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from consumers.decoding import Parsing
from consumers.dialects.anthropic import read_rate
from consumers.job import Chain, Route
from consumers.limits.base import Amounts, BucketHeaders, BudgetSpec, RateHeaders
from consumers.limits.budgets import Budgets, own_budgets
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.organization import read_limits
from lanekeeper.telemetry import signals
from service.config.settings import Settings
from service.simulated.app import SimulatedAPI, SimulatedOptions
from service.simulated.batches import BatchOptions
from service.simulated.buckets import RateLimitBucket
from service.simulated.messages import KNOWN_MODELS, limit_line
from service.worker import assembly
from tests.support.budget import PLENTY
from tests.support.settings import load
from tests.support.virtual_time import virtually

ADMIN = "sk-ant-admin01-secret"
SONNET, OLDER = "anthropic/sonnet-5-5", "anthropic/sonnet-5"
OPTIONS = SimulatedOptions(
    requests_per_minute=120,
    input_tokens_per_minute=PLENTY,
    output_tokens_per_minute=PLENTY,
    batches=BatchOptions(enqueued=700),
)


class AdminAPI(SimulatedAPI):
    """With the limits of its organization."""

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/v1/organizations/rate_limits":
            return await super()._handle(request)
        if not request.headers.get("authorization", "").startswith("Bearer sk-ant-admin"):
            return web.json_response(status=403, data={"type": "error", "error": {"type": "permission_error"}})
        options, lines = self.options, defaultdict[str, list[str]](list)
        for model in sorted(KNOWN_MODELS):
            lines[limit_line(model)].append(model)
        limits = {
            "requests_per_minute": options.requests_per_minute,
            "input_tokens_per_minute_cache_aware": options.input_tokens_per_minute,
            "output_tokens_per_minute": options.output_tokens_per_minute,
        }
        batches = {"enqueued_batch_requests": options.batches.enqueued}
        found = [_group({"type": "model_group", "display_name": line}, lines[line], limits) for line in lines]
        found.append(_group({"type": "batch"}, None, batches))
        return web.json_response({"data": found, "next_page": None})


def _group(group: dict[str, str], models: list[str] | None, limits: dict[str, int]) -> dict[str, Any]:
    values = [{"type": type, "value": value} for type, value in limits.items()]
    return {"id": "rl", "type": "rate_limit", "group": {"id": "rlg", **group}, "models": models, "limits": values}


def settings(api: SimulatedAPI, **env: str) -> Settings:
    given = {
        "ANTHROPIC_API_KEY": "sk-ant-key",
        "ANTHROPIC_BASE_URL": api.base_url,
        "LANEKEEPER_BUDGET__ADMIN_KEY": ADMIN,
    }
    return load(env={**given, **env})


async def started(found: Settings) -> tuple[Budgets, dict[str, int]]:
    providers = assembly.open_providers(found, parsing=Parsing())
    budgets = own_budgets(found.budget_spec())
    limits = await assembly.read_all_limits(found, providers, budgets)
    for provider in providers:
        await provider.aclose()
    return budgets, {name: each.requests for name, each in limits.items()}


async def test_limits_are_known_before_the_first_call() -> None:
    async with AdminAPI(OPTIONS) as api:
        budgets, batches = await started(settings(api))

    account = budgets.queue(SONNET).account
    assert account.per_minute() == (120, PLENTY, PLENTY)
    assert not any(account.guessed)
    assert batches == {"anthropic": 700}


async def test_the_operators_lower_limit_still_holds() -> None:
    async with AdminAPI(OPTIONS) as api:
        budgets, batches = await started(
            settings(api, LANEKEEPER_BUDGET__REQUESTS_PER_MIN="30", LANEKEEPER_BUDGET__BATCH_REQUESTS="5")
        )

    assert budgets.queue(SONNET).account.per_minute().requests == 30
    assert batches == {"anthropic": 5}


async def test_without_an_admin_key_nothing_is_asked() -> None:
    async with AdminAPI(OPTIONS) as api:
        with capture_logs() as logs:
            budgets, _ = await started(settings(api, LANEKEEPER_BUDGET__ADMIN_KEY=""))

    assert all(budgets.queue(SONNET).account.guessed)
    assert logs == []


@pytest.mark.parametrize("key", ["sk-ant-no-admin", "\U0001f511"])
async def test_a_key_that_may_not_read_them_costs_one_log_line_without_the_key(key: str) -> None:
    async with AdminAPI(OPTIONS) as api:
        provider = AnthropicProvider.at(api.base_url, api_key="sk-ant-key")
        with capture_logs() as logs:
            found = await read_limits(provider.client, name="anthropic", admin_key=key)
        await provider.aclose()

    assert (dict(found.models), found.batch_requests) == ({}, None)
    assert [each["event"] for each in logs] == [signals.LIMITS_UNREAD]
    assert key not in str(logs)


@pytest.mark.slow
def test_two_models_of_different_lines_each_use_all_of_their_own_limit() -> None:
    """Two lines with 120 requests a minute each: at least 98 % of both, in virtual time."""

    async def used() -> dict[str, float]:
        told = RateHeaders(BucketHeaders(limit=120), BucketHeaders(limit=PLENTY), BucketHeaders(limit=PLENTY))
        loop, budgets = asyncio.get_running_loop(), own_budgets(BudgetSpec())
        budgets.announce({SONNET: told, OLDER: told})
        judges = {each: RateLimitBucket(120, burst_s=60, clock=loop.time) for each in (SONNET, OLDER)}

        async def flood(account: str) -> int:
            answered, ends_s = 0, loop.time() + 600
            while loop.time() < ends_s:
                reservation = await budgets.reserve(account, lane="normal", amounts=Amounts(1, 10, 10), until=None)
                assert judges[account].wait_s(1) == 0
                judges[account].take(1)
                answered += 1
                budgets.settle(reservation, Amounts(1, 10, 10))
            return answered

        counts = await asyncio.gather(*map(flood, judges))
        return {account: count / 1200 for account, count in zip(judges, counts, strict=True)}

    parts = virtually(used())
    assert min(parts.values()) >= 0.98, parts


def test_fast_mode_has_an_account_and_headers_of_its_own() -> None:
    route = Route(provider="anthropic", model="m", name="m", account="anthropic/opus-5-5")
    headers = {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-input-tokens-limit": "400000",
        "anthropic-fast-input-tokens-limit": "20000",
        "anthropic-fast-input-tokens-remaining": "19000",
        "anthropic-fast-output-tokens-limit": "4000",
    }

    assert Chain((route,)).in_fast_mode().routes[0].account == "anthropic/opus-5-5-fast"
    assert read_rate(headers, now_s=0.0) == (
        BucketHeaders(limit=60),
        BucketHeaders(limit=20_000, remaining=19_000),
        BucketHeaders(limit=4000),
    )
