"""The call that every contestant makes, through Anthropic's SDK in its cheapest form: bytes in, bytes out.

Request and answer are not parsed into models, retries and spans are off, and asyncio uses the transport on aiohttp.
Lanekeeper's adapter (`consumers/providers/anthropic.py`) calls the SDK in the same form.
"""

from typing import Any

import httpx2
from anthropic import Anthropic, AsyncAnthropic, DefaultAioHttpClient

_CLIENT: dict[str, Any] = {
    "api_key": "benchmark",
    "max_retries": 0,
    "open_telemetry": False,
    "timeout": httpx2.Timeout(None, connect=5.0),
}


class Calling:
    """Makes calls on asyncio."""

    def __init__(self, base_url: str) -> None:
        self._client = AsyncAnthropic(base_url=base_url, http_client=DefaultAioHttpClient(trust_env=False), **_CLIENT)

    async def __call__(self, body: bytes) -> bytes:
        response = await self._client.post("/v1/messages", cast_to=httpx2.Response, content=body, stream=True)
        try:
            return await response.aread()
        finally:
            await response.aclose()


class BlockingCalling:
    """Makes blocking calls; several threads may use it at once."""

    def __init__(self, base_url: str) -> None:
        self._client = Anthropic(base_url=base_url, **_CLIENT)

    def __call__(self, body: bytes) -> bytes:
        response = self._client.post("/v1/messages", cast_to=httpx2.Response, content=body, stream=True)
        try:
            return response.read()
        finally:
            response.close()
