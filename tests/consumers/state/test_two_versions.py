"""Processes of two versions of Lanekeeper share one Redis: neither blocks the other, and no grant is lost."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from consumers.limits import learned
from consumers.limits.account import Account
from consumers.limits.base import Amounts, BucketHeaders, Feedback, Kind, RateHeaders
from consumers.limits.budgets import Budgets
from consumers.state.redis.client import RedisClient, Script
from consumers.state.redis.shared_turns import FORM, shared_budgets
from lanekeeper.telemetry import signals
from tests.support.budget import ACCOUNT, spec
from tests.support.redis import RedisServer

pytestmark = pytest.mark.slow

ONE = Amounts(1, 1, 1)
LANES = ("critical", "normal", "batch")
LEARNED_ELSEWHERE = Script(
    """
local account = cmsgpack.unpack(redis.call('GET', KEYS[1]))
account.learned, account.version = ARGV[1], account.version + 1
return redis.call('SET', KEYS[1], cmsgpack.pack(account))
"""
)
"""As a process of another version that keeps accounts in the same form, and has learned something."""
KEPT_ELSEWHERE = Script("return redis.call('SET', KEYS[1], cmsgpack.pack(cjson.decode(ARGV[1])))")
KEPT_AS_IS = Script("return redis.call('SET', KEYS[1], ARGV[1])")
PLAIN = learned.to_json(Account(ACCOUNT, spec(), now_s=0.0).learned())


@pytest.fixture
def namespace() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
async def client(redis: RedisServer) -> AsyncIterator[RedisClient]:
    client = RedisClient(redis.url)
    yield client
    await client.aclose()


@pytest.fixture
async def ours(client: RedisClient, namespace: str) -> AsyncIterator[Budgets]:
    budgets = shared_budgets(client, namespace=namespace, spec=spec(requests=600, burst_s=1.0))
    yield budgets
    await budgets.aclose()


async def one_of_each_lane(budgets: Budgets) -> None:
    async with asyncio.timeout(60):
        for lane in LANES:
            budgets.settle(await budgets.reserve(ACCOUNT, lane=lane, amounts=ONE, until=None), ONE)


def answered(limit: float) -> Feedback:
    return Feedback(
        kind=Kind.ANSWERED, rate=RateHeaders(BucketHeaders(limit=limit), BucketHeaders(), BucketHeaders()), counted=ONE
    )


def unreadable(logs: list[dict[str, object]]) -> int:
    return sum(each["event"] == signals.LEARNED_UNREADABLE for each in logs)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(json.loads(PLAIN) | {"version": learned.VERSION + 1}),
        PLAIN.replace("false", "null"),
        "?",
    ],
)
async def test_what_another_version_has_learned_is_ignored_and_logged_once(
    ours: Budgets, client: RedisClient, namespace: str, text: str
) -> None:
    ours.learn(ACCOUNT, answered(300))
    await one_of_each_lane(ours)

    with capture_logs() as logs:
        for _ in range(3):
            await client.run(LEARNED_ELSEWHERE, [f"{namespace}:budget:{FORM}:{ACCOUNT}"], text)
            await one_of_each_lane(ours)
    assert unreadable(logs) == 1  # type: ignore[arg-type]

    ours.learn(ACCOUNT, answered(200))  # and it keeps learning
    await one_of_each_lane(ours)


@pytest.mark.parametrize(
    "kept",
    [
        {"form": FORM + 1, "budgets": []},
        {"at": 1_000_000, "levels": [1, 1, 1], "learned": "[]", "version": 7},
        {"form": FORM - 1},
        7,
    ],
)
async def test_an_account_stored_in_another_format_starts_again_and_that_is_logged(
    ours: Budgets, client: RedisClient, namespace: str, kept: object
) -> None:
    await one_of_each_lane(ours)
    await client.run(KEPT_ELSEWHERE, [f"{namespace}:budget:{FORM}:{ACCOUNT}"], json.dumps(kept))

    with capture_logs() as logs:
        await one_of_each_lane(ours)
        await one_of_each_lane(ours)
    assert unreadable(logs) == 1  # type: ignore[arg-type]


async def test_a_damaged_account_starts_again(ours: Budgets, client: RedisClient, namespace: str) -> None:
    await one_of_each_lane(ours)
    await client.run(KEPT_AS_IS, [f"{namespace}:budget:{FORM}:{ACCOUNT}"], "\xff\x00 no account")

    await one_of_each_lane(ours)
