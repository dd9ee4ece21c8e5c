"""The gateway as Claude Code's gateway protocol wants it. docs/sdks.md lists its statements."""

import json
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from service.gateway.access import hash_of
from tests.support.brokers import Vhost
from tests.support.gate import Alone, gate
from tests.support.malicious import Asked, MaliciousProvider, Piece, error_body, head
from tests.support.serving import serving
from topology.codec.headers import PROVIDER_HEADER_BYTES

MESSAGES = "/v1/messages?beta=true"
ATTRIBUTION = "x-anthropic-billing-header: cc_version=2.1.332.bd3; cc_entrypoint=sdk-cli;"
ASKED: dict[str, Any] = {
    "model": "claude-opus-5-5",
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "system", "content": [{"type": "text", "text": "in the middle of the conversation"}]},
    ],
    "system": [{"type": "text", "text": ATTRIBUTION}, {"type": "text", "text": "Be brief."}],
    "tools": [
        {"name": "Later", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True, "strict": True},
        {"name": "Now", "input_schema": {"type": "object"}, "eager_input_streaming": True},
    ],
    "metadata": {"user_id": '{"device_id":"0","session_id":"1"}'},
    "max_tokens": 64000,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium", "format": {"type": "json_schema"}, "task_budget": {"total": 1}},
    "of_next_year": {"b": 1.50, "a": [None]},
    "stream": True,
}
FORWARDED = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": f"claude-code-20250219,interleaved-thinking-2025-05-14,oauth-2025-04-20,{'of-next-year,' * 200}x",
    "anthropic-workspace-id": "wrkspc_1",
    "anthropic-of-next-year": "1, 2;  3",
}
CONSUMED = {
    "x-claude-code-session-id": "s",
    "x-claude-code-agent-id": "a",
    "x-claude-code-parent-agent-id": "p",
    "x-claude-code-of-next-year": "n",
    "x-app": "cli",
}
KEY = "lane-developer"
CREDENTIALS = (
    {"authorization": f"Bearer {KEY}"},
    {"x-api-key": KEY},
    {"authorization": f"Bearer {KEY}", "x-api-key": KEY},
)


async def asked(
    url: str, path: str, body: bytes | None = None, method: str = "", **headers: str
) -> tuple[int, Any, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method or ("GET" if body is None else "POST"), url + path, data=body, headers=named, allow_redirects=False
        ) as got,
    ):
        return got.status, got.headers, await got.read()


async def test_the_body_and_all_headers_of_anthropics_are_forwarded_as_they_came(vhost: Vhost) -> None:
    raw = json.dumps(ASKED, indent=1).encode()
    user = urlsplit(vhost.amqp_url).username
    async with (
        serving(vhost, speakers=(user,)) as worker,
        gate(worker, keys={hash_of(KEY): {"tenant": "crm"}}) as url,
    ):
        status, _, events = await asked(url, MESSAGES, raw, **FORWARDED, **CONSUMED, x_api_key=KEY)

        assert (status, b"message_stop" in events) == (200, True)
        (call,) = worker.api.calls
        assert call.body == raw
        arrived = {name.lower(): value for name, value in call.headers.items()}
        assert {name: arrived[name] for name in FORWARDED} == FORWARDED
        assert not CONSUMED.keys() & arrived.keys()
        assert KEY not in str(arrived)


async def test_a_streams_events_come_while_the_provider_still_writes(vhost: Vhost) -> None:
    said = {**ASKED, "tools": [], "messages": [{"role": "user", "content": "[[latency: 60s]] " + "many words " * 9}]}
    async with (
        serving(vhost) as worker,
        gate(worker) as url,
        aiohttp.ClientSession() as session,
        session.post(url + MESSAGES, json=said, headers=FORWARDED) as got,
    ):
        await got.content.readuntil(b"content_block_delta")

        assert worker.api.running == 1


REJECTIONS = (
    (400, "thinking: Input tag 'adaptive' found using 'type' does not match any of the expected tags"),
    (400, "messages.1.content.0: Invalid `signature` in `thinking` block"),
    (400, "messages.1.role: Input should be 'user' or 'assistant'"),
    (400, "context_management: Extra inputs are not permitted"),
    (400, "tools.0.custom.defer_loading: Extra inputs are not permitted"),
    (400, "prompt is too long: 1000001 tokens > 1000000 maximum"),
    (404, "model: claude-nobody"),
    (413, "Request exceeds the maximum size"),
)


async def test_the_providers_rejections_are_forwarded_word_for_word(vhost: Vhost) -> None:
    def rejected(call: Asked) -> list[Piece]:
        status, message = REJECTIONS[int(json.loads(call.body)["messages"][0]["content"])]
        return [head(status, body=error_body(message))]

    async with (
        MaliciousProvider(rejected) as provider,
        serving(vhost, base_url=provider.base_url) as worker,
        gate(worker) as url,
    ):
        for number, (status, message) in enumerate(REJECTIONS):
            for stream in (False, True):
                said = {**ASKED, "stream": stream, "messages": [{"role": "user", "content": str(number)}]}
                found = await asked(url, MESSAGES, json.dumps(said).encode())
                assert (found[0], found[2]) == (status, error_body(message)), message
        assert len(provider.asked) == 2 * len(REJECTIONS)


async def test_a_credential_counts_in_either_header_on_every_path_and_other_headers_do_no_harm(vhost: Vhost) -> None:
    own = {"X-Team": "blue", "x-lane-name": "critical"}  # ANTHROPIC_CUSTOM_HEADERS, which come with every call
    body = json.dumps(ASKED).encode()
    user = urlsplit(vhost.amqp_url).username
    async with (
        serving(vhost, speakers=(user,)) as worker,
        gate(worker, keys={hash_of(KEY): {"tenant": "crm"}}) as url,
    ):
        for path, given in ((MESSAGES, body), ("/v1/messages/count_tokens", body), ("/v1/models?limit=1000", None)):
            for credential in CREDENTIALS:
                assert (await asked(url, path, given, **FORWARDED, **credential, **own))[0] == 200, (path, credential)
            assert (await asked(url, path, given, **FORWARDED, **own))[0] == 401
        assert [call.outcome for call in worker.api.calls] == ["ok"] * len(CREDENTIALS)


async def test_a_header_of_eight_kibibytes_is_forwarded() -> None:
    def listed(call: Asked) -> list[Piece]:
        return [head(body=b'{"data": []}')]

    async with MaliciousProvider(listed) as provider, Alone(provider=provider.base_url) as made:
        status, _, _ = await asked(made.url, "/v1/models", anthropic_beta="b" * PROVIDER_HEADER_BYTES)
        refused, _, why = await asked(made.url, "/v1/models", anthropic_beta="b" * (PROVIDER_HEADER_BYTES + 1))

        assert (status, refused) == (200, 400), why
        assert [len(each.headers["anthropic-beta"]) for each in provider.asked] == [PROVIDER_HEADER_BYTES]


async def test_model_discovery_is_answered_directly_and_never_with_a_redirect() -> None:
    def moved(call: Asked) -> list[Piece]:
        return [head(301, body=b"", location="https://elsewhere.example/v1/models")]

    async with MaliciousProvider(moved) as provider, Alone(provider=provider.base_url) as made:
        status, headers, _ = await asked(made.url, "/v1/models?limit=1000")

        assert status >= 400
        assert "location" not in headers


async def test_startup_traffic_is_answered_at_once() -> None:
    async with Alone(keys={hash_of(KEY): {"tenant": "crm"}}) as made:
        for method, path in (("HEAD", "/"), ("GET", "/inference-profiles?type=SYSTEM_DEFINED")):
            began = time.monotonic()
            status, _, _ = await asked(made.url, path, method=method)
            assert status < 500
            assert time.monotonic() - began < 3
