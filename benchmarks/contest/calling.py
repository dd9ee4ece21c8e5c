"""Calls the provider with Anthropic's own client, without its retries, and returns the figures of the answer."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from anthropic import APIConnectionError, APIStatusError, AsyncAnthropic

CONNECTING_S = 1.0
"""The pause before the next try if no connection could be opened."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The provider's answer. Status 0: there was no connection."""

    status: int
    headers: Mapping[str, str]
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def retry_after_s(self) -> float | None:
        value = self.headers.get("retry-after")
        return None if value is None else float(value)


Call = Callable[[bytes], Awaitable[Reply]]


@asynccontextmanager
async def calling(base_url: str) -> AsyncIterator[Call]:
    """Yields a function that sends a request body to the provider once."""
    async with AsyncAnthropic(api_key="benchmark", base_url=base_url, max_retries=0) as client:

        async def call(body: bytes) -> Reply:
            try:
                response = await client.messages.with_raw_response.create(**json.loads(body))
            except APIStatusError as error:
                return Reply(status=error.status_code, headers=error.response.headers)
            except APIConnectionError:
                return Reply(status=0, headers={})
            usage = json.loads(await _text(response))["usage"]
            return Reply(
                status=200,
                headers=response.headers,
                input_tokens=usage["input_tokens"],
                output_tokens=usage["output_tokens"],
            )

        yield call


async def _text(response: object) -> str:
    http = response.http_response  # type: ignore[attr-defined]
    await http.aread()
    return str(http.text)
