"""One call: the provider's name for the model, the price, and what is learned from the response."""

import json

import pytest

from consumers.failures import OverloadedError, RateLimitedError
from consumers.job import Route
from consumers.limits.base import Feedback, Kind
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.registry import Registry, asking_for
from consumers.spending import Prices
from lanekeeper.telemetry.tracing import Tracing
from service.simulated.app import SimulatedAPI, SimulatedOptions

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
    registry: Registry, api: SimulatedAPI, asked: AskedFor
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


def test_if_the_models_name_is_the_same_the_bytes_are_unchanged(asked: AskedFor) -> None:
    request = asked()

    assert asking_for(request, request.model) is request


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


async def test_the_time_to_the_first_token_is_counted_once_for_each_stream(registry: Registry, asked: AskedFor) -> None:
    counted: list[tuple[bool, int]] = []

    async def parts(event: bytes) -> None:
        counted.append(
            (
                b'"content_block_' in event,
                sum(registry.calls["anthropic", "anthropic/haiku", MODEL].first_tokens.counts),
            )
        )

    await registry.call(HERE, asked("a story"), timeout_s=60, parts=parts)

    assert counted[0] == (False, 0), "the start of a message is no token"
    assert {count for has_content, count in counted if has_content} == {1}
    assert counted[-1][1] == 1
