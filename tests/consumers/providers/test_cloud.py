"""Bedrock, Vertex and Foundry: what their clients send, received by a server that records it.

The houses themselves cannot be reached from here; URL, body and signature are made by the vendor's clients as for them.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from consumers.failures import AccountError, RateLimitedError, RejectedError, TransientError
from consumers.limits.base import NOTHING, Amounts
from consumers.providers import cloud
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.cloud import FrameSplitter, bedrock, foundry, vertex
from tests.support.malicious import MaliciousProvider, redirect
from tests.support.web_server import web_server

from .conftest import AskedFor
from .test_anthropic import MESSAGE, Received
from .test_streams import event

pytestmark = pytest.mark.slow

EVENTS: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {"type": "message", "model": "m", "content": [], "usage": {"input_tokens": 2}},
    },
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]


class Recorder:
    """Answers every request with `answer`, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.answer = web.Response(body=MESSAGE, content_type="application/json")
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/token":
            return web.json_response({"access_token": "googles-token", "expires_in": 3600})
        self.requests.append((request.raw_path, dict(request.headers), json.loads(await request.read())))
        return self.answer


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    found = Recorder()
    async with web_server(found.handle) as found.url:
        yield found


async def test_bedrock_gets_the_model_in_the_url_and_the_version_in_the_body(
    recorder: Recorder, asked: AskedFor
) -> None:
    provider = cloud.bedrock(name="aws", region="eu-central-1", api_key="bedrock-key", base_url=recorder.url)

    got = await provider.stream(asked(beta="a-1,b-2", unknown={"x": 1}), timeout_s=60, parts=None)
    await provider.aclose()

    ((path, headers, body),) = recorder.requests
    assert path == "/model/claude-haiku-5-5/invoke"
    assert headers["Authorization"] == "Bearer bedrock-key"
    assert body.pop("anthropic_version")
    assert body.pop("anthropic_beta") == ["a-1", "b-2"]
    assert body == {"max_tokens": 500, "messages": [{"role": "user", "content": "hello"}], "unknown": {"x": 1}}
    assert (got.body, got.provider) == (MESSAGE, "aws")


@pytest.mark.parametrize(
    ("headers", "fields", "of_bedrock", "of_vertex"),
    [
        ({}, {}, "bedrock-2023-05-31", "vertex-2023-10-16"),
        ({"anthropic-version": "2026-10-21"}, {}, "2026-10-21", "2026-10-21"),
        ({"anthropic-version": "2026-10-21"}, {"anthropic_version": "mine"}, "mine", "mine"),
    ],
)
async def test_a_clouds_version_is_the_bodys_or_the_headers_or_the_settings(
    recorder: Recorder,
    asked: AskedFor,
    headers: dict[str, str],
    fields: dict[str, str],
    of_bedrock: str,
    of_vertex: str,
) -> None:
    for provider in (
        bedrock(name="aws", region="eu-central-1", api_key="k", base_url=recorder.url),
        vertex(name="google", region="eu", project="p", api_key="k", base_url=recorder.url),
    ):
        recorder.answer = web.Response(body=MESSAGE)
        await provider.stream(asked(headers=headers, **fields), timeout_s=60, parts=None)
        await provider.aclose()

    assert [body["anthropic_version"] for _, _, body in recorder.requests] == [of_bedrock, of_vertex]
    assert not any("anthropic-version" in headers for _, headers, _ in recorder.requests)


async def test_bedrocks_stream_is_read_from_amazons_frames(recorder: Recorder, asked: AskedFor) -> None:
    provider = cloud.bedrock(name="aws", region="eu-central-1", api_key="bedrock-key", base_url=recorder.url)
    recorder.answer = web.Response(
        body=b"".join(event(json.dumps(each).encode()) for each in EVENTS),
        content_type="application/vnd.amazon.eventstream",
    )
    received = Received()

    got = await provider.stream(asked(), timeout_s=60, parts=received)
    await provider.aclose()

    assert recorder.requests[0][0] == "/model/claude-haiku-5-5/invoke-with-response-stream"
    assert "stream" not in recorder.requests[0][2]
    assert received.kinds == ["message_start", "message_delta", "message_stop"]
    assert (got.stop_reason, got.usage.output_tokens) == ("end_turn", 3)


@pytest.mark.parametrize(
    ("status", "error"),
    [(429, RateLimitedError), (424, TransientError), (500, TransientError), (403, AccountError), (400, RejectedError)],
)
async def test_amazons_errors_are_classified_by_their_status(
    recorder: Recorder, asked: AskedFor, status: int, error: type[Exception]
) -> None:
    provider = cloud.bedrock(name="aws", region="eu-central-1", api_key="bedrock-key", base_url=recorder.url)
    recorder.answer = web.Response(status=status, body=b'{"message":"said bedrock-key"}')

    with pytest.raises(error) as caught:
        await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()

    assert "bedrock-key" not in str(caught.value)


async def test_bedrock_without_an_api_key_gets_signed_requests(
    recorder: Recorder, asked: AskedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    provider = cloud.bedrock(name="aws", region="eu-central-1", base_url=recorder.url)

    await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()

    signed = recorder.requests[0][1]["Authorization"]
    assert signed.startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")
    assert "/eu-central-1/bedrock/aws4_request" in signed


async def test_what_was_signed_with_is_in_no_error(
    recorder: Recorder, asked: AskedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token")
    provider = cloud.bedrock(name="aws", region="eu-west-8", base_url=recorder.url)
    recorder.answer = web.Response(status=403, body=b'{"message":"signed: x-amz-security-token:session-token"}')

    with pytest.raises(AccountError) as caught:
        await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()

    assert caught.value.body == '{"message":"signed: x-amz-security-token:***"}'


async def test_missing_credentials_are_the_operators_fault(
    recorder: Recorder, asked: AskedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/not/there")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/not/there")
    provider = cloud.bedrock(name="aws", region="eu-west-9", base_url=recorder.url)

    with pytest.raises(AccountError, match="no credentials were found") as caught:
        await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()

    assert recorder.requests == []
    assert caught.value.spent(Amounts(1, 10, 10)) == NOTHING


@pytest.mark.parametrize(("streamed", "verb"), [(False, "rawPredict"), (True, "streamRawPredict")])
async def test_vertex_gets_project_region_and_model_in_the_url(
    recorder: Recorder, asked: AskedFor, streamed: bool, verb: str
) -> None:
    provider = cloud.vertex(name="gcp", region="europe-west1", project="p-1", api_key="token", base_url=recorder.url)
    if streamed:
        body = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in EVENTS)
        recorder.answer = web.Response(text=body, content_type="text/event-stream")
    received = Received()

    got = await provider.stream(asked(), timeout_s=60, parts=received if streamed else None)
    await provider.aclose()

    ((path, headers, sent),) = recorder.requests
    assert path.endswith(f"/projects/p-1/locations/europe-west1/publishers/anthropic/models/claude-haiku-5-5:{verb}")
    assert headers["Authorization"] == "Bearer token"
    assert sent["anthropic_version"]
    assert "model" not in sent
    assert got.stop_reason == "end_turn"
    assert bool(received.parts) is streamed


async def test_foundry_gets_the_same_bytes_as_anthropic_and_its_own_key(recorder: Recorder, asked: AskedFor) -> None:
    provider = cloud.foundry(name="azure", api_key="foundry-key", base_url=f"{recorder.url}/anthropic")

    await provider.stream(asked(), timeout_s=60, parts=None)
    await provider.aclose()

    ((path, headers, body),) = recorder.requests
    assert path == "/anthropic/v1/messages"
    assert headers["x-api-key"] == headers["api-key"] == "foundry-key"
    assert "Authorization" not in headers
    assert body == json.loads(asked().body)


Made = Callable[[str], AnthropicProvider]
KINDS: dict[str, Made] = {
    "anthropic": lambda url: AnthropicProvider.at(url, api_key="sk-ant-k"),
    "bedrock": lambda url: bedrock(name="b", region="us-east-1", api_key="k", base_url=url),
    "vertex": lambda url: vertex(name="v", region="us-east5", project="p", api_key="k", base_url=url),
    "foundry": lambda url: foundry(name="f", api_key="k", base_url=url),
}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_redirect_is_not_followed_and_is_the_operators_to_mend(kind: str, status: int, asked: AskedFor) -> None:
    async with MaliciousProvider() as inside:
        to = f"{inside.base_url}/v1/messages?token=s3cret"
        async with MaliciousProvider(redirect(to, status=status)) as outside:
            provider = KINDS[kind](outside.base_url)
            with pytest.raises(AccountError) as refused:
                await provider.stream(asked("secret"), timeout_s=60, parts=None)
            await provider.aclose()

    assert len(outside.asked) == 1
    assert inside.asked == []
    assert (refused.value.type, refused.value.status) == ("redirected", 502)
    assert "redirects to 127.0.0.1" in refused.value.detail
    assert "s3cret" not in refused.value.detail


@pytest.mark.parametrize(
    ("region", "url"),
    [
        ("global", "https://aiplatform.googleapis.com/v1"),
        ("eu", "https://aiplatform.eu.rep.googleapis.com/v1"),
        ("us", "https://aiplatform.us.rep.googleapis.com/v1"),
        ("europe-west1", "https://europe-west1-aiplatform.googleapis.com/v1"),
    ],
)
async def test_vertex_has_its_address_by_the_region(region: str, url: str) -> None:
    provider = vertex(name="google", region=region, project="p", api_key="a-token")

    assert str(provider.client.base_url).rstrip("/") == url
    assert (provider.secret, provider.batches) == ("a-token", None)
    assert not provider.api.lists_models
    await provider.aclose()


async def test_bedrock_has_its_address_by_the_region() -> None:
    provider = bedrock(name="aws", region="eu-west-1", api_key="a-key")

    assert str(provider.client.base_url).rstrip("/") == "https://bedrock-runtime.eu-west-1.amazonaws.com"
    assert provider.api.splitter is FrameSplitter
    await provider.aclose()
