import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from consumers.providers.anthropic import AnthropicProvider
from tests.support.faulty_api import FaultyAPI
from tests.support.web_server import Handler, web_server
from topology.codec.decoding import Published, Request

KEY = "sk-ant-a-secret-key"

AskedFor = Callable[..., Request]
Answering = Callable[[Handler], AbstractAsyncContextManager[AnthropicProvider]]


@pytest.fixture
async def api() -> AsyncIterator[FaultyAPI]:
    async with FaultyAPI() as running:
        yield running


@pytest.fixture
async def provider(api: FaultyAPI) -> AsyncIterator[AnthropicProvider]:
    adapter = AnthropicProvider.at(api.base_url, api_key=KEY)
    yield adapter
    await adapter.aclose()


@pytest.fixture
def asked() -> AskedFor:
    """A request by its prompt and further fields of its body."""

    def make(
        prompt: str = "hello",
        *,
        beta: str | None = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
        **more: Any,
    ) -> Request:
        fields = {
            "model": "claude-haiku-5-5",
            "max_tokens": 500,
            "messages": [{"role": "user", "content": prompt}],
            **more,
        }
        return Request(
            id=uuid.uuid4().hex,
            lane="normal",
            body=json.dumps(fields).encode() if raw is None else raw,
            model=fields["model"],
            max_tokens=fields["max_tokens"],
            stream=False,
            provider_headers=headers or ({} if beta is None else {"anthropic-beta": beta}),
            published=Published(0, "sender"),
            due_ms=None,
            deadline_ms=0,
        )

    return make


@pytest.fixture
def answering() -> Answering:

    @asynccontextmanager
    async def run(handler: Handler) -> AsyncIterator[AnthropicProvider]:
        async with web_server(handler) as url:
            adapter = AnthropicProvider.at(url, api_key=KEY, max_answer_bytes=1_000_000)
            try:
                yield adapter
            finally:
                await adapter.aclose()

    return run
