"""Every fault as the vendor's own client sees it: the exception's class, status and headers."""

import json
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import AsyncAnthropic

from service.simulated.app import SimulatedAPI
from service.simulated.faults import BROKEN, REFUSED

pytestmark = pytest.mark.slow  # two clients wait for each fault

MODEL = "claude-haiku-5-5"
LONG = " and a prompt that is long enough for an answer in several pieces"

REFUSALS: dict[str, tuple[type[anthropic.APIStatusError], int, str, str | None]] = {
    "invalid": (anthropic.BadRequestError, 400, "invalid_request_error", None),
    "usage_limit": (anthropic.BadRequestError, 400, "invalid_request_error", None),
    "authentication": (anthropic.AuthenticationError, 401, "authentication_error", None),
    "billing": (anthropic.PaymentRequiredError, 402, "billing_error", None),
    "permission": (anthropic.PermissionDeniedError, 403, "permission_error", None),
    "not_found": (anthropic.NotFoundError, 404, "not_found_error", None),
    "too_large": (anthropic.ContentTooLargeError, 413, "request_too_large", None),
    "rate_limited": (anthropic.RateLimitError, 429, "rate_limit_error", None),
    "acceleration": (anthropic.RampLimitExceededError, 429, "rate_limit_error", "ramp_limit_exceeded"),
    "spend_limit": (anthropic.EnforcedSpendLimitReachedError, 429, "rate_limit_error", "enforced_spend_limit_reached"),
    "server_error": (anthropic.InternalServerError, 500, "api_error", None),
    "unavailable": (anthropic.ServiceUnavailableError, 503, "api_error", None),
    "overloaded": (anthropic.OverloadedError, 529, "overloaded_error", None),
}
RETRY_AFTER = {
    "rate_limited": "1",
    "rate_limited retry_after=7": "7",
    "rate_limited retry_after=none": None,
    "acceleration": "1",
    "spend_limit": None,
    "overloaded": None,
    "overloaded retry_after=3": "3",
    "unavailable retry_after=4": "4",
}

AT_ONCE: dict[str, tuple[type[Exception], ...]] = {
    "hang": (anthropic.APITimeoutError,),
    "slow_first_byte": (anthropic.APITimeoutError,),
    "stall": (anthropic.APITimeoutError,),
    "drip": (anthropic.APITimeoutError,),
    "error_mid_stream": (anthropic.OverloadedError,),
    "cut": (json.JSONDecodeError,),
    "truncated": (anthropic.APIConnectionError,),
    "reset": (anthropic.APIConnectionError,),
    "reset at=middle": (anthropic.APIConnectionError,),
    "broken_json": (json.JSONDecodeError,),
    "html": (anthropic.InternalServerError,),
}
STREAMED: dict[str, tuple[type[Exception], ...]] = {
    "hang": (anthropic.APITimeoutError,),
    "slow_first_byte": (anthropic.APITimeoutError,),
    "stall": (httpx2.ReadTimeout,),
    "drip delay=1h": (httpx2.ReadTimeout,),
    "error_mid_stream": (anthropic.APIStatusError,),
    "truncated": (httpx2.RemoteProtocolError, httpx2.ReadError),
    "reset": (httpx2.RemoteProtocolError, httpx2.ReadError),
    "reset at=start": (anthropic.APIConnectionError,),
    "broken_json": (json.JSONDecodeError,),
    "html": (anthropic.InternalServerError,),
}
SLOW = frozenset({"hang", "slow_first_byte", "stall", "drip"})
SILENT = {"cut": True, "unfinished": True, "not_a_message": False}
"""Faults that the vendor's client accepts as an answer; the value: also when streaming."""


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


def impatient(sdk: AsyncAnthropic, fault: str, *, after_s: float = 1) -> AsyncAnthropic:
    """A client that gives up after `after_s` of silence, for faults that are silent."""
    return sdk.with_options(timeout=after_s) if fault.split()[0] in SLOW else sdk


def test_every_fault_is_tested_here() -> None:
    assert set(REFUSALS) == set(REFUSED)
    assert {name.split()[0] for name in [*AT_ONCE, *STREAMED, *SILENT]} == set(BROKEN)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fault", REFUSALS)
async def test_an_error_answer_raises_the_class_of_its_status_and_code(
    sdk: AsyncAnthropic, fault: str, streamed: bool
) -> None:
    expected, status, type, code = REFUSALS[fault]

    with pytest.raises(expected) as caught:
        await ask(sdk, f"[[fault: {fault}]]", streamed=streamed)

    error = caught.value
    assert (error.status_code, error.type, error.error_code) == (status, type, code)
    assert error.request_id == error.response.headers["request-id"]
    assert error.body["request_id"] == error.request_id  # type: ignore[index]
    assert "anthropic-ratelimit-requests-remaining" in error.response.headers


@pytest.mark.parametrize(("fault", "told"), RETRY_AFTER.items())
async def test_retry_after_is_sent_as_requested(sdk: AsyncAnthropic, fault: str, told: str | None) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(sdk, f"[[fault: {fault}]]", streamed=False)

    assert caught.value.response.headers.get("retry-after") == told


async def test_the_usage_limit_differs_only_by_its_text(sdk: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await ask(sdk, "[[fault: usage_limit]]", streamed=False)

    assert str(caught.value.api_message).startswith("You have reached your specified API usage limits")


@pytest.mark.parametrize("fault", AT_ONCE)
async def test_a_broken_answer_without_streaming_raises(api: SimulatedAPI, sdk: AsyncAnthropic, fault: str) -> None:
    with pytest.raises(AT_ONCE[fault]):
        await ask(impatient(sdk, fault), f"[[fault: {fault}]]", streamed=False)

    await api.until(lambda: api.running == 0)
    assert api.stats()["outcomes"] == {fault.split()[0]: 1}


@pytest.mark.parametrize("fault", STREAMED)
async def test_a_broken_stream_raises(api: SimulatedAPI, sdk: AsyncAnthropic, fault: str) -> None:
    # longer than a busy machine needs for the first byte, after which the client raises another class
    after_s = 5 if STREAMED[fault] == (httpx2.ReadTimeout,) else 1
    with pytest.raises(STREAMED[fault]):
        await ask(impatient(sdk, fault, after_s=after_s), f"[[fault: {fault}]]", streamed=True)

    await api.until(lambda: api.running == 0)
    assert api.stats()["outcomes"] == {fault.split()[0]: 1}


@pytest.mark.parametrize(("fault", "streamed"), [(fault, False) for fault in ("unfinished", "not_a_message")])
async def test_an_incomplete_message_raises_nothing_in_the_vendors_client(
    sdk: AsyncAnthropic, fault: str, streamed: bool
) -> None:
    message = await ask(sdk, f"[[fault: {fault}]]", streamed=streamed)

    assert message.stop_reason is None


@pytest.mark.parametrize("fault", [fault for fault, also_streamed in SILENT.items() if also_streamed])
async def test_a_stream_without_its_end_raises_nothing_in_the_vendors_client(sdk: AsyncAnthropic, fault: str) -> None:
    message = await ask(sdk, f"[[fault: {fault}]]", streamed=True)

    assert message.stop_reason is None


async def test_an_error_in_the_middle_of_a_stream_has_status_200_and_its_type(sdk: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(sdk, "[[fault: error_mid_stream type=rate_limit_error]]", streamed=True)

    assert (caught.value.status_code, caught.value.type) == (200, "rate_limit_error")


@pytest.mark.parametrize("streamed", [False, True])
async def test_slow_and_stalled_answers_arrive_in_the_end(sdk: AsyncAnthropic, streamed: bool) -> None:
    for fault in ("slow_first_byte delay=20ms", "stall delay=20ms", "drip delay=0ms"):
        message = await ask(sdk, f"[[fault: {fault}]]", streamed=streamed)

        assert message.stop_reason == "end_turn"


async def test_a_counted_fault_affects_only_the_first_calls_of_a_prompt(api: SimulatedAPI, sdk: AsyncAnthropic) -> None:
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
