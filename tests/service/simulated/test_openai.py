"""The simulated OpenAI API, as OpenAI's own client reads it."""

import ssl
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import BaseModel

from service.simulated.app import SimulatedOptions
from tests.support.faulty_api import FaultyAPI

pytestmark = pytest.mark.slow  # the client's models take seconds to build
MODEL = "gpt-5.5"
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "required": ["at"], "properties": {"at": {}}}},
}


@pytest.fixture
async def sdk(api: FaultyAPI, tls: ssl.SSLContext) -> AsyncIterator[AsyncOpenAI]:
    http = DefaultAsyncHttpxClient(verify=tls)
    url = f"{api.base_url}/v1"
    async with AsyncOpenAI(api_key="a-key", base_url=url, max_retries=0, timeout=10, http_client=http) as client:
        yield client


def said(prompt: str) -> Any:
    return [{"role": "user", "content": prompt}]


class Place(BaseModel):
    at: str


async def test_a_function_is_called_until_its_result_comes_and_a_schema_is_followed(sdk: AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(model=MODEL, messages=said("where"), tools=[TOOL]) as stream:
        called = (await stream.get_final_completion()).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls is not None
    assert called.message.tool_calls[0].function.arguments == '{"at": "where"}'
    result: Any = {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "there"}
    messages: Any = [*said("where"), called.message.to_dict(), result]
    answer = await sdk.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "echo: there"

    parsed = await sdk.chat.completions.parse(model=MODEL, messages=said("here"), response_format=Place)
    assert parsed.choices[0].message.parsed == Place(at="here")
    of_response = await sdk.responses.parse(model=MODEL, input="here", text_format=Place)
    assert of_response.output_parsed == Place(at="here")


async def test_models_are_listed_in_the_format_of_whose_client_asks(sdk: AsyncOpenAI) -> None:
    assert MODEL in [model.id async for model in sdk.models.list()]
    assert (await sdk.models.retrieve(MODEL)).object == "model"
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("nobody")
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.chat.completions.create(model="nobody", messages=said("x"))
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("fault", "error", "status"),
    [
        ("invalid", openai.BadRequestError, 400),
        ("rate_limited", openai.RateLimitError, 429),
        ("server_error", openai.InternalServerError, 500),
        ("overloaded", openai.InternalServerError, 503),
        ("billing", openai.RateLimitError, 429),
    ],
)
async def test_faults_are_errors_in_openais_format(
    sdk: AsyncOpenAI, fault: str, error: type[openai.APIStatusError], status: int
) -> None:
    with pytest.raises(error) as caught:
        await sdk.chat.completions.create(model=MODEL, messages=said(f"[[fault: {fault}]]"))
    assert (caught.value.status_code, caught.value.code) == (
        status,
        {"rate_limited": "rate_limit_exceeded", "billing": "insufficient_quota"}.get(fault),
    )


async def test_an_error_can_come_in_the_middle_of_a_stream(sdk: AsyncOpenAI) -> None:
    chunks = await sdk.chat.completions.create(
        model=MODEL, messages=said("[[fault: error_mid_stream]] words"), stream=True
    )
    with pytest.raises(openai.APIError):
        _ = [chunk async for chunk in chunks]
    events = await sdk.responses.create(model=MODEL, input="[[fault: error_mid_stream]] words", stream=True)
    assert [event.type async for event in events][-1] == "error"


async def test_a_limit_counts_both_kinds_of_tokens_of_each_model_and_is_in_the_headers(
    sdk: AsyncOpenAI, api: FaultyAPI
) -> None:
    api.configure(SimulatedOptions(requests_per_minute=60, input_tokens_per_minute=600, output_tokens=300))
    raw = await sdk.chat.completions.with_raw_response.create(model=MODEL, messages=said("x"))

    assert raw.headers["x-ratelimit-limit-requests"] == "60"
    assert raw.headers["x-ratelimit-remaining-requests"] == "59"
    assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
    await sdk.chat.completions.create(model=MODEL, messages=said("x"))
    with pytest.raises(openai.RateLimitError) as caught:
        await sdk.chat.completions.create(model=MODEL, messages=said("x"))
    await sdk.chat.completions.create(model="gpt-4o", messages=said("x"))
    assert (caught.value.type, caught.value.response.headers["x-ratelimit-remaining-tokens"]) == ("tokens", "0")


async def test_a_call_without_a_key_or_with_a_broken_body_is_refused(sdk: AsyncOpenAI, api: FaultyAPI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.post("/chat/completions", cast_to=object, body={"model": MODEL})
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")
    api.configure(SimulatedOptions(api_key="another"))
    with pytest.raises(openai.AuthenticationError):
        await sdk.models.list()
