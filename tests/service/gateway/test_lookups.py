"""`count_tokens` and `models`: Anthropic's own SDK, unmodified, against the gateway and against the API itself."""

import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from service.config.settings import ModelsSettings
from service.gateway.access import hash_of
from tests.support.faulty_api import FaultyAPI
from tests.support.gate import Alone
from tests.support.web_server import web_server

ASKED: dict[str, Any] = {"model": "claude-sonnet-5-5", "messages": [{"role": "user", "content": "hello 🦊"}]}
HAIKU, SONNET = "claude-haiku-5-5", "claude-sonnet-5-5"
KEYS = {hash_of("few"): {"tenant": "crm", "models": [SONNET, HAIKU]}, hash_of("all"): {"tenant": "shop"}}
TLS = ssl.create_default_context()
"""One for all clients, because making it takes longer than most of these tests."""
Ask = Callable[[AsyncAnthropic], Awaitable[Any]]


def sdk(url: str, key: str = "any") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key=key, max_retries=0, http_client=DefaultAsyncHttpxClient(verify=TLS))


async def get(url: str, **headers: str) -> tuple[int, Any, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.get(url, headers=named) as got:
        return got.status, await got.json(), got.headers


async def ids(client: AsyncAnthropic, **asked: Any) -> list[str]:
    """All models, over all pages."""
    return [each.id async for each in client.models.list(**asked)]


async def retrieved(client: AsyncAnthropic) -> Any:
    return await client.models.retrieve(SONNET)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.messages.count_tokens(**ASKED, tools=[{"name": "look", "input_schema": {}}]),
        lambda client: client.beta.messages.count_tokens(**ASKED, betas=["token-counting-2024-11-01"]),
        lambda client: client.models.list(limit=5),
        lambda client: client.beta.models.list(),
        retrieved,
    ],
    ids=["count_tokens", "beta count_tokens", "models", "beta models", "model"],
)
async def test_the_answer_is_the_same(ask: Ask) -> None:
    async with (
        FaultyAPI() as api,
        Alone(provider=api.base_url) as made,
        sdk(made.url) as ours,
        sdk(api.base_url) as own,
    ):
        assert (await ask(ours)).to_dict() == (await ask(own)).to_dict()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.messages.count_tokens(model=SONNET, messages=[]),
        lambda client: client.messages.count_tokens(**ASKED, extra_body={"temperature": 1}),
        lambda client: client.models.retrieve("claude-nobody"),
    ],
    ids=["messages", "parameter", "model"],
)
async def test_an_error_of_the_provider_is_the_same(ask: Ask) -> None:
    async def error(client: AsyncAnthropic) -> Any:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(client)
        assert isinstance(caught.value.body, dict)
        return type(caught.value), caught.value.status_code, caught.value.body["error"]

    async with (
        FaultyAPI() as api,
        Alone(provider=api.base_url) as made,
        sdk(made.url) as ours,
        sdk(api.base_url) as own,
    ):
        assert await error(ours) == await error(own)


async def test_the_bytes_are_the_providers_and_the_key_of_the_call_does_not_reach_it() -> None:
    seen: list[Any] = []
    version = {"anthropic-version": "2025-05-05"}

    async def answer(request: web.BaseRequest) -> web.Response:
        seen.append((request.method, request.path_qs, request.headers["anthropic-version"], await request.read()))
        assert request.headers["authorization"] == "Bearer sk-secret"
        return web.Response(
            body=b'{"input_tokens" : 7,\n "more": "\xc3\xa4"}', headers={"request-id": "req_7", "set-cookie": "a=b"}
        )

    async with web_server(answer) as at, Alone(provider=at) as made, aiohttp.ClientSession() as session:
        asked = session.post(f"{made.url}/v1/messages/count_tokens?beta=true", data=b'{"any": "body"}', headers=version)
        async with asked as got:
            assert await got.read() == b'{"input_tokens" : 7,\n "more": "\xc3\xa4"}'
            assert (got.headers["request-id"], got.headers.get("set-cookie")) == ("req_7", None)
    assert seen == [("POST", "/v1/messages/count_tokens?beta=true", "2025-05-05", b'{"any": "body"}')]


async def test_a_key_lists_its_models_alone_and_reads_no_other() -> None:
    async with FaultyAPI() as api, Alone(provider=api.base_url, keys=KEYS) as made, sdk(made.url, "few") as few:
        assert await ids(few) == [HAIKU, SONNET]
        assert await ids(few, limit=1) == [HAIKU, SONNET]  # over two pages
        assert [each.id for each in (await few.models.list(before_id=SONNET)).data] == [HAIKU]
        assert (await few.models.retrieve(SONNET)).id == SONNET
        with pytest.raises(anthropic.NotFoundError):
            await few.models.retrieve("claude-opus-5-5")
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            await few.models.list(limit=0)
        async with sdk(made.url, "all") as every:
            assert await ids(every, limit=1000) == [each.id for each in (await every.models.list()).data]
            assert len(await ids(every)) > 10


async def test_a_key_counts_tokens_of_its_models_alone() -> None:
    async with FaultyAPI() as api, Alone(provider=api.base_url, keys=KEYS) as made, sdk(made.url, "few") as few:
        assert (await few.messages.count_tokens(**ASKED)).input_tokens
        with pytest.raises(anthropic.PermissionDeniedError, match="not allowed for this caller; allowed: "):
            await few.messages.count_tokens(**{**ASKED, "model": "claude-opus-5-5"})
        twice = b'{"model": "claude-opus-5-5", "model": "claude-sonnet-5-5", "messages": []}'
        headers = {"x-api-key": "few"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{made.url}/v1/messages/count_tokens", data=twice) as got,
        ):
            assert got.status == 400


async def test_a_tenants_models_bound_its_keys() -> None:
    bounded = {"models": ModelsSettings(tenants={"shop": (HAIKU,)})}
    async with (
        FaultyAPI() as api,
        Alone(provider=api.base_url, settings=bounded, keys=KEYS) as made,
        sdk(made.url, "all") as shop,
    ):
        assert await ids(shop) == [HAIKU]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/claude-x", "/v1/models/..%2Fmessages", "/v1/models/%00"])
async def test_without_a_key_of_the_gateway_nothing_is_asked(path: str) -> None:
    async with FaultyAPI() as api, Alone(provider=api.base_url, keys=KEYS) as made:
        status, said, _ = await get(made.url + path)
        assert (status, said["error"]["type"]) == (401, "authentication_error")
        if "%" in path:
            assert (await get(made.url + path, x_api_key="all"))[0] == 404


async def test_beyond_its_share_a_tenant_is_refused_and_another_is_not() -> None:
    async with (
        FaultyAPI() as api,
        Alone(provider=api.base_url, keys=KEYS, lookups_per_min=4) as made,
    ):
        crm = [(await get(f"{made.url}/v1/models", x_api_key="few")) for _ in range(3)]
        assert [status for status, *_ in crm] == [200, 200, 429]
        assert (crm[2][1]["error"]["type"], crm[2][2]["retry-after"]) == ("rate_limit_error", "2")
        assert (await get(f"{made.url}/v1/models", x_api_key="all"))[0] == 200


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (502, b"<html>bad gateway</html>", 502),
        (401, b'{"type": "error", "error": {"type": "authentication_error", "message": "no key sk-secret"}}', 503),
        (302, b"", 502),
    ],
)
async def test_what_is_no_error_of_anthropics_becomes_one_and_names_no_key(status: int, body: bytes, told: int) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(status=status, body=body, headers={"location": "/elsewhere"})

    async with web_server(answer) as at, Alone(provider=at) as made:
        found, said, headers = await get(f"{made.url}/v1/models")
        assert found == told
        assert said["error"]["message"]
        assert headers["request-id"]
        assert "sk-secret" not in json.dumps(said)
