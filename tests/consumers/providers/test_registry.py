"""One call: the provider's name for the model, the price, and what is learned from the response."""

import json
from typing import get_args

import pytest
from anthropic.types import StopReason
from anthropic.types.beta import BetaRefusalStopDetails, BetaStopReason

from consumers.dialects.answers import Answer
from consumers.failures import OverloadedError, RateLimitedError
from consumers.job import Route
from consumers.limits.base import Amounts, Feedback, Kind
from consumers.prices import Prices, Usage
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.registry import CATEGORIES, STOP_REASONS, CallFigures, Registry
from lanekeeper.telemetry.tracing import Tracing
from service.simulated.app import SimulatedOptions
from tests.support.faulty_api import FaultyAPI

from .conftest import AskedFor

MODEL = "claude-haiku-5-5"
HERE = Route(provider="anthropic", model=MODEL, name=MODEL, account="anthropic/haiku")


@pytest.fixture
def heard() -> list[tuple[str, Feedback]]:
    return []


@pytest.fixture
def registry(provider: AnthropicProvider, heard: list[tuple[str, Feedback]]) -> Registry:
    def learn(account: str, told: Feedback) -> None:
        heard.append((account, told))

    return Registry(provider, tracing=Tracing(), prices=Prices(), learn=learn)


async def keep_nothing(_: bytes) -> None: ...


async def test_the_provider_is_asked_for_the_model_under_its_own_name(
    registry: Registry, api: FaultyAPI, asked: AskedFor
) -> None:
    api.configure(SimulatedOptions(models=frozenset({"eu.haiku-v1:0"})))
    route = Route(provider="anthropic", model=MODEL, name="eu.haiku-v1:0", account="anthropic/haiku")

    got = await registry.call(route, asked(), timeout_s=60, parts=None)

    sent = json.loads(api.calls[0].body)
    assert sent.pop("model") == "eu.haiku-v1:0"
    assert {**sent, "model": MODEL} == json.loads(asked().body)
    cost_usd = (got.usage.input_tokens * 0.10 + got.usage.output_tokens * 0.50) / 1e6
    assert got.cost_usd == pytest.approx(cost_usd)
    await registry.call(route, asked(), timeout_s=60, parts=None)
    assert registry.calls["anthropic", "anthropic/haiku", MODEL].usd == pytest.approx(2 * cost_usd)


async def test_limits_in_a_response_are_learned_for_its_account(
    registry: Registry, heard: list[tuple[str, Feedback]], asked: AskedFor
) -> None:
    with pytest.raises(RateLimitedError):
        await registry.call(HERE, asked("[[fault: rate_limited retry_after=60]]"), timeout_s=60, parts=None)
    got = await registry.call(HERE, asked(), timeout_s=60, parts=None)

    (first, refused), (second, answered) = heard
    assert (first, refused.kind, refused.retry_after_s) == (HERE.account, Kind.RATE_LIMITED, 60)
    assert (second, answered.kind) == (HERE.account, Kind.ANSWERED)
    assert refused.rate is not None
    assert refused.rate.requests.limit == 1_000_000
    assert got.rate is not None
    assert got.rate.input_tokens.limit == 1_000_000_000


async def test_limits_are_learned_also_from_a_failure_in_the_middle_of_a_stream(
    registry: Registry, asked: AskedFor
) -> None:
    with pytest.raises(OverloadedError) as caught:
        await registry.call(HERE, asked("a story [[fault: error_mid_stream]]"), timeout_s=60, parts=keep_nothing)

    assert caught.value.rate is not None


def test_tokens_read_from_the_cache_do_not_count_against_the_limits() -> None:
    usage = Usage(input_tokens=1, output_tokens=2, cache_creation_input_tokens=4, cache_read_input_tokens=8)
    answer = Answer(body=b"", model="m", provider="p", usage=usage, cost_usd=0.5)
    calls = CallFigures()
    for _ in range(2):
        calls.count(answer)

    assert answer.counted == Amounts(1, 5, 2)
    assert (calls.inputs.sum, calls.outputs.sum) == (26, 4)
    assert (calls.uncached, calls.cache_write, calls.cache_read, calls.usd) == (2, 8, 16, 1)
    assert answer.saved_usd == 0


def test_the_stop_reasons_and_categories_that_the_installed_sdk_declares_are_known() -> None:
    category = BetaRefusalStopDetails.model_fields["category"].annotation
    categories = {each for part in get_args(category) for each in get_args(part)}

    assert len(categories) >= 5
    assert {*get_args(BetaStopReason), *get_args(StopReason)} <= STOP_REASONS
    assert categories <= CATEGORIES
