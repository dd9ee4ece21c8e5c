import ssl
from collections.abc import AsyncIterator

import pytest
from anthropic import AsyncAnthropic, DefaultAioHttpClient, DefaultAsyncHttpxClient

from tests.support.faulty_api import FaultyAPI


@pytest.fixture
async def api() -> AsyncIterator[FaultyAPI]:
    async with FaultyAPI() as running:
        yield running


@pytest.fixture(scope="session")
def tls() -> ssl.SSLContext:
    """One TLS context for all clients, because making it takes longer than most of these tests."""
    return ssl.create_default_context()


@pytest.fixture(params=["httpx2", "aiohttp"])
async def sdk(request: pytest.FixtureRequest, api: FaultyAPI, tls: ssl.SSLContext) -> AsyncIterator[AsyncAnthropic]:
    """The vendor's client with its defaults, over each of its transports."""
    make = DefaultAioHttpClient if request.param == "aiohttp" else DefaultAsyncHttpxClient
    async with AsyncAnthropic(
        api_key="a-key", base_url=api.base_url, max_retries=0, timeout=10, http_client=make(verify=tls)
    ) as client:
        yield client
