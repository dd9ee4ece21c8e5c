"""Faults as the vendor's own client sees them: the exception's class, status and headers."""

from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.support.faulty_api import FaultyAPI

pytestmark = pytest.mark.slow  # two clients wait for each fault

MODEL = "claude-haiku-5-5"
LONG = " and a prompt that is long enough for an answer in several pieces"

REFUSALS: dict[str, tuple[type[anthropic.APIStatusError], int, str]] = {
    "invalid": (anthropic.BadRequestError, 400, "invalid_request_error"),
    "rate_limited": (anthropic.RateLimitError, 429, "rate_limit_error"),
    "server_error": (anthropic.InternalServerError, 500, "api_error"),
    "overloaded": (anthropic.OverloadedError, 529, "overloaded_error"),
}
RETRY_AFTER = {
    "rate_limited": "1",
    "rate_limited retry_after=none": None,
    "overloaded": None,
    "overloaded retry_after=3": "3",
}


async def ask(sdk: AsyncAnthropic, prompt: str, *, streamed: bool, **more: Any) -> anthropic.types.Message:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": [{"role": "user", "content": prompt + LONG}],
        **more,
    }
    if not streamed:
        answer: anthropic.types.Message = await sdk.messages.create(**body)
        return answer
    async with sdk.messages.stream(**body) as stream:
        final: anthropic.types.Message = await stream.get_final_message()
        return final


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fault", REFUSALS)
async def test_an_error_answer_raises_the_class_of_its_status(sdk: AsyncAnthropic, fault: str, streamed: bool) -> None:
    expected, status, type = REFUSALS[fault]

    with pytest.raises(expected) as caught:
        await ask(sdk, f"[[fault: {fault}]]", streamed=streamed)

    error = caught.value
    assert (error.status_code, error.type) == (status, type)
    assert error.request_id == error.response.headers["request-id"]
    assert error.body["request_id"] == error.request_id  # type: ignore[index]
    assert "anthropic-ratelimit-requests-remaining" in error.response.headers


@pytest.mark.parametrize(("fault", "told"), RETRY_AFTER.items())
async def test_retry_after_is_sent_as_requested(sdk: AsyncAnthropic, fault: str, told: str | None) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(sdk, f"[[fault: {fault}]]", streamed=False)

    assert caught.value.response.headers.get("retry-after") == told


async def test_a_counted_fault_affects_only_the_first_calls_of_a_prompt(api: FaultyAPI, sdk: AsyncAnthropic) -> None:
    prompt = "[[fault: overloaded x2]] [[fault: reset x1]] counted"

    for expected in (anthropic.OverloadedError, anthropic.OverloadedError, anthropic.APIConnectionError):
        with pytest.raises(expected):
            await ask(sdk, prompt, streamed=False)

    assert (await ask(sdk, prompt, streamed=False)).stop_reason == "end_turn"
    with pytest.raises(anthropic.OverloadedError):
        await ask(sdk, prompt + " apart", streamed=False)
    assert [call.outcome for call in api.calls] == ["overloaded", "overloaded", "reset", "ok", "overloaded"]


async def test_an_unreadable_marker_is_answered_400(sdk: AsyncAnthropic) -> None:
    for marker in ("[[fault: overloded]]", "[[fault: overloaded 2]]", "[[latency: soon]]", "[[tokens: many]]"):
        with pytest.raises(anthropic.BadRequestError, match="marker in the prompt"):
            await ask(sdk, marker, streamed=False)
