from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic

from service.simulated.app import SimulatedOptions
from tests.support.faulty_api import FaultyAPI

pytestmark = pytest.mark.slow

MODEL = "claude-haiku-5-5"
HEADERS = {"x-api-key": "a-key", "anthropic-version": "2026-10-21"}


def body(prompt: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": prompt}], **more}


@pytest.fixture
async def http(api: FaultyAPI) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(api.base_url, headers=HEADERS) as session:
        yield session


async def test_unknown_models_are_not_found_unless_allowed(sdk: AsyncAnthropic, api: FaultyAPI) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await sdk.messages.create(**{**body(), "model": "claude-next"})
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        await sdk.models.retrieve("claude-next")

    api.configure(SimulatedOptions(models=frozenset({"claude-next"})))
    assert (await sdk.messages.create(**{**body(), "model": "claude-next"})).model == "claude-next"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"model": 3}, "model"),
    ],
)
async def test_an_invalid_request_is_answered_400_with_the_fields_name(
    http: aiohttp.ClientSession, wrong: dict[str, Any], told: str
) -> None:
    async with http.post("/v1/messages", json={**body(), **wrong}) as answer:
        error = await answer.json()

    assert answer.status == 400
    assert error["error"]["type"] == "invalid_request_error"
    assert told in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"]


async def test_requests_without_key_or_version_are_refused(api: FaultyAPI) -> None:
    version = {"anthropic-version": "2026-10-21"}
    cases = [
        ({**version}, 401),
        ({**version, "authorization": "Bearer "}, 401),
        ({**version, "authorization": "Bearer right"}, 200),
        ({**version, "x-api-key": "right"}, 200),
        ({**version, "x-api-key": "wrong"}, 401),
        ({"x-api-key": "right"}, 400),
    ]
    api.configure(SimulatedOptions(api_key="right"))
    async with aiohttp.ClientSession(api.base_url) as session:
        for headers, status in cases:
            async with session.post("/v1/messages", json=body(), headers=headers) as answer:
                assert answer.status == status


async def test_limits_are_in_every_answer_and_enforced_for_each_class_of_models(
    api: FaultyAPI, sdk: AsyncAnthropic
) -> None:
    api.configure(SimulatedOptions(requests_per_minute=2, input_tokens_per_minute=50_000))
    answer = await sdk.messages.with_raw_response.create(**body())
    assert answer.headers["anthropic-ratelimit-requests-remaining"] == "1"
    assert answer.headers["anthropic-ratelimit-input-tokens-limit"] == "50000"
    await sdk.messages.create(**body())

    with pytest.raises(anthropic.RateLimitError) as caught:
        await sdk.messages.create(**body())

    assert 25 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert (await sdk.messages.create(**{**body(), "model": "claude-opus-5-5"})).stop_reason == "end_turn"
