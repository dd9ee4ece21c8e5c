"""Message Batches that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from consumers.state.base import Completion
from consumers.state.groups import Member
from lanekeeper.contract.problems import ProviderFailure, RequestProblem
from service.gateway.access import hash_of
from service.gateway.batches import BatchLines
from tests.support.gate import Alone, call

MODEL = "claude-haiku-5-5"
KEYS = {hash_of("lane-haiku"): {"tenant": "a", "models": [MODEL]}}


def asked(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": prompt}]}


BODY = json.dumps(
    {"requests": [{"custom_id": f"r-{number}", "params": asked(f"hello {number}")} for number in range(9)]}
)


WRONG: list[tuple[str, int, str]] = [
    ("", 400, "not valid JSON"),
    ("[]", 400, "not valid JSON"),
    ("{", 400, "not valid JSON"),
    (BODY + "x", 400, "not valid JSON"),
    (BODY[:-2], 400, "not valid JSON"),
    (BODY.replace("hello 7", 'hel"lo 7'), 400, "requests.7: The request body is not valid JSON"),
    (BODY.replace("50", "5O"), 400, "requests.0.params"),
    ("{}", 400, "requests: at least one"),
    ('{"requests": []}', 400, "requests: at least one"),
    ('{"requests": [1]}', 400, "requests.0"),
    ('{"requests": [], "requests": []}', 400, "requests: Input should be"),
    (BODY.replace('"r-7"', '"r-3"'), 400, "requests.7.custom_id: r-3 is duplicated"),
    (BODY.replace('"r-7"', '"r 7"'), 400, "requests.7.custom_id"),
    (BODY.replace('"custom_id": "r-7", ', ""), 400, "requests.7.custom_id"),
    (BODY.replace('"r-7"', '"r-7", "when": 1'), 400, "requests.7.when: Extra inputs"),
    (BODY.replace("hello 7", "x" * 40_000_000), 413, "requests.7"),
    (BODY.replace('"hello 7"', "[" * 300_000), 413, "requests.7"),
    (BODY.replace('[{"role": "user", "content": "hello 7"}]', "[]"), 400, "requests.7.params"),
    (BODY.replace('"hello 7"', '"hello 7"}], "stream": true, "x": [{"y": 1'), 400, "requests.7.params: stream"),
    (BODY.replace(MODEL, "claude-opus-5-5").replace("claude-opus-5-5", MODEL, 7), 403, "requests.7.params: model"),
]


@pytest.mark.slow
async def test_a_wrong_batch_is_refused_as_a_whole(tmp_path: Path) -> None:
    async with Alone(folder=tmp_path, keys=KEYS) as gateway:
        for body, status, says in WRONG:
            got = await call("POST", f"{gateway.url}/v1/messages/batches", body.encode(), x_api_key="lane-haiku")

            assert (got.status, got["type"]) == (status, "error"), (body[:100], got.body)
            assert says in got["error"]["message"]
        listed = await call("GET", f"{gateway.url}/v1/messages/batches", x_api_key="lane-haiku")
        assert listed["data"] == []


def test_an_error_with_half_a_character_is_one_line_of_the_results() -> None:
    """So it is where the provider quotes a text that it has cut; it must not take the other results with it."""
    said = r'{"type":"error","error":{"type":"invalid_request_error","message":"no \ud83d"}}'
    failure = ProviderFailure(status=400, type="invalid_request_error", error=said, request_id=None)
    document = RequestProblem("provider_rejected", "400: no", provider=failure).document(request="b.r-1", attempts=1)
    end = Completion(status="error", code="provider_rejected", body=document, ended_ms=1)

    line = BatchLines().of(Member(1, "b.r-1", end))

    assert isinstance(line, bytes)
    assert json.loads(line) == {"custom_id": "r-1", "result": {"type": "errored", "error": json.loads(said)}}
