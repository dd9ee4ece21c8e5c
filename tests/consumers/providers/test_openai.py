"""How OpenAI's API, Azure's and servers that behave like them are called, and what their answers become."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from consumers.failures import AccountError, ProviderError, RejectedError, TransientError
from consumers.providers.extras import ExtraMissing
from consumers.providers.openai import OpenAIProvider
from consumers.providers.transport import http_client
from lanekeeper.contract import names as n
from tests.support.web_server import Handler, web_server
from topology.codec.decoding import Request, unpublished

KEY = "sk-openai-secret"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
WHOLE = {
    "object": "chat.completion",
    "model": "gpt-4o",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": USAGE,
}


class Server:
    """Answers each call with `answer`, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Handler = whole(WHOLE)
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((str(request.rel_url), headers, await request.read()))
        return await self.answer(request)


def whole(fields: Any, *, status: int = 200) -> Handler:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(fields, status=status, headers={"x-request-id": "req_1"})

    return answer


def stream_of(*lines: str) -> Handler:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for line in lines:
            await response.write(f"{line}\n\n".encode())
        return response

    return answer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    async with web_server(found.handle) as found.url:
        yield found


def asking(dialect: str = n.OPENAI_CHAT, **more: Any) -> Request:
    return replace(unpublished("hello", model="gpt-4o", max_tokens=20, dialect=dialect), **more)


async def called(provider: OpenAIProvider, request: Request | None = None) -> Any:
    try:
        return await provider.stream(request or asking(), timeout_s=5, parts=None)
    finally:
        await provider.aclose()


async def streamed(server: Server) -> tuple[list[bytes], Any]:
    provider = OpenAIProvider.at(name="oai", base_url=f"{server.url}/v1", api_key=KEY)
    parts: list[bytes] = []

    async def part(event: bytes) -> None:
        parts.append(event)

    try:
        return parts, await provider.stream(asking(stream=True), timeout_s=5, parts=part)
    finally:
        await provider.aclose()


async def test_openais_own_api_gets_key_organization_and_project(server: Server) -> None:
    provider = OpenAIProvider.at(
        name="oai", base_url=f"{server.url}/v1/", api_key=KEY, organization="org-1", project="proj_1"
    )
    request = asking()
    answer = await called(provider, request)

    path, headers, body = server.asked[0]
    assert (path, body) == ("/v1/chat/completions", request.body)
    assert headers["authorization"] == f"Bearer {KEY}"
    assert (headers["openai-organization"], headers["openai-project"]) == ("org-1", "proj_1")
    assert headers["content-type"] == "application/json"
    assert (answer.request_id, answer.stop_reason, answer.usage.input_tokens) == ("req_1", "stop", 3)


@pytest.mark.parametrize(
    ("api_version", "dialect", "path"),
    [
        (None, n.OPENAI_CHAT, "/openai/v1/chat/completions"),
        (None, n.OPENAI_EMBEDDINGS, "/openai/v1/embeddings"),
        ("2024-10-21", n.OPENAI_CHAT, "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21"),
        ("2025-04-01-preview", n.OPENAI_RESPONSES, "/openai/responses?api-version=2025-04-01-preview"),
    ],
)
async def test_azure_is_called_by_deployment(server: Server, api_version: str | None, dialect: str, path: str) -> None:
    made = {"output": [], "status": "completed", "data": [{}], **WHOLE}
    server.answer = whole(made)
    provider = OpenAIProvider.azure(name="az", base_url=server.url, api_key=KEY, api_version=api_version)
    await called(provider, asking(dialect))

    assert server.asked[0][0] == path
    assert server.asked[0][1]["api-key"] == KEY
    assert "authorization" not in server.asked[0][1]


def test_azure_without_a_key_needs_microsofts_package() -> None:
    with pytest.raises(ExtraMissing, match="azure-identity"):
        OpenAIProvider.azure(name="az", base_url="https://r.openai.azure.com")


async def test_a_server_of_ones_own_needs_no_key_and_may_get_the_lanes_rank(server: Server) -> None:
    provider = OpenAIProvider.at(name="vllm", base_url=f"{server.url}/v1", sends_priority=True)
    await called(provider, asking(rank=2))

    _, headers, body = server.asked[0]
    assert "authorization" not in headers
    assert json.loads(body)["priority"] == 2


async def test_a_tools_own_priority_does_not_take_the_place_of_the_lanes_rank(server: Server) -> None:
    provider = OpenAIProvider.at(name="vllm", base_url=f"{server.url}/v1", sends_priority=True)
    tool = {"type": "function", "function": {"name": "ticket", "parameters": {"properties": {"priority": {}}}}}
    fields = json.loads(asking().body)
    for more in ({"tools": [tool]}, {"priority": 7}):
        await provider.stream(asking(rank=2, body=json.dumps({**fields, **more}).encode()), timeout_s=5, parts=None)
    await provider.aclose()

    assert [json.loads(body)["priority"] for _, _, body in server.asked] == [2, 7]


async def test_no_error_tells_a_token_that_is_made_for_a_call(server: Server) -> None:
    async def token() -> str:
        return "eyJ.of-the-machine"

    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        said = f"not valid: {request.headers['authorization']}"
        return web.json_response({"error": {"message": said, "code": "invalid_value"}}, status=400)

    server.answer = echo
    provider = OpenAIProvider(
        http_client(server.url),
        name="az",
        secret="",
        address=lambda path, _: server.url + path,
        headers={},
        token=token,
    )
    with pytest.raises(RejectedError, match="not valid") as caught:
        await called(provider)
    assert "of-the-machine" not in caught.value.detail + caught.value.body


@pytest.mark.parametrize(
    ("answer", "expected", "told"),
    [
        (whole({"error": {"code": 503, "message": f"no instance for {KEY}"}}), TransientError, "503"),
        (whole({"error": {"message": "no", "code": "content_filter"}}, status=400), RejectedError, "content_filter"),
        (whole({"error": {"message": "bad key", "code": "invalid_api_key"}}, status=401), AccountError, "401"),
        (whole({"hello": "world"}), TransientError, "no chat completion"),
        (whole([]), TransientError, "no chat completion"),
    ],
    ids=["200 with an error", "filtered", "key", "other JSON", "no object"],
)
async def test_whatever_is_no_answer_is_an_error_of_a_clear_class(
    server: Server, answer: Handler, expected: type[ProviderError], told: str
) -> None:
    server.answer = answer
    with pytest.raises(expected, match=told) as caught:
        await called(OpenAIProvider.at(name="oai", base_url=f"{server.url}/v1", api_key=KEY))
    assert KEY not in caught.value.detail + caught.value.body


async def test_embeddings_whose_requests_are_cancelled_while_they_gather_leave_nothing(server: Server) -> None:
    provider = OpenAIProvider.at(name="oai", base_url=f"{server.url}/v1", api_key=KEY)
    for number in range(3):
        body = json.dumps({"model": "m", "input": "a", "user": f"u-{number}"}).encode()
        request = asking(n.OPENAI_EMBEDDINGS, body=body, gather_count=8, gather_window_s=0.05)
        with pytest.raises(TransientError, match="within"):
            await provider.stream(request, timeout_s=0.01, parts=None)
    await asyncio.sleep(0.1)

    assert not provider._gatherings
    assert not server.asked
    await provider.aclose()


async def test_a_page_of_html_is_no_answer(server: Server) -> None:
    async def page(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="<html>login</html>", content_type="text/html")

    server.answer = page
    with pytest.raises(AccountError, match="HTML"):
        await called(OpenAIProvider.at(name="oai", base_url=f"{server.url}/v1", api_key=KEY))


def data(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}"


FIRST = data({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "hi"}}], "usage": None})
LAST = data({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None})
COUNTED = data({"id": "c", "choices": [], "usage": USAGE})


async def test_a_stream_is_asked_for_usage_and_becomes_a_whole_answer(server: Server) -> None:
    server.answer = stream_of(": waiting", FIRST, LAST, COUNTED, "data: [DONE]")
    parts, answer = await streamed(server)

    assert json.loads(server.asked[0][2])["stream_options"] == {"include_usage": True}
    assert ["usage" in json.loads(part) for part in parts] == [False, False]
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.is_counted) == (3, 2, True)
    assert json.loads(answer.body)["choices"][0]["message"] == {"role": "assistant", "content": "hi"}


async def test_a_stream_may_lack_done_and_usage(server: Server) -> None:
    server.answer = stream_of(FIRST, LAST)
    _, answer = await streamed(server)
    assert (answer.stop_reason, answer.is_counted) == ("stop", False)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((FIRST,), "without a finish_reason"),
        ((FIRST, data({"error": {"code": 502, "message": "upstream died"}})), "the middle of the stream"),
        ((FIRST, "data: {not json"), "not JSON"),
    ],
    ids=["cut", "error", "broken"],
)
async def test_a_stream_that_breaks_off_is_a_failed_call(server: Server, lines: tuple[str, ...], told: str) -> None:
    server.answer = stream_of(*lines)
    with pytest.raises(TransientError, match=told):
        await streamed(server)


async def test_a_probe_lists_the_models_or_makes_a_small_call(server: Server) -> None:
    provider = OpenAIProvider.at(name="oai", base_url=f"{server.url}/v1", api_key=KEY)
    server.answer = whole({"data": []})
    await provider.probe("gpt-4o", by_call=False)
    server.answer = whole(WHOLE)
    await provider.probe("gpt-4o", by_call=True)
    await provider.aclose()

    assert [path for path, _, _ in server.asked] == ["/v1/models", "/v1/chat/completions"]
