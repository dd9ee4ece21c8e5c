"""Bodies in OpenAI's dialects: what is read of them for the estimate; the provider gets them as they came."""

import json
from base64 import b64encode
from typing import Any

import pytest

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from tests.support.pictures import png
from topology.codec import decoding
from topology.codec.decoding import Request
from topology.lanes import CRITICAL

IMAGE = f"data:image/png;base64,{b64encode(png(512, 512, size=200_000)).decode()}"


def decoded(fields: dict[str, Any], dialect: str = n.OPENAI_CHAT) -> Request:
    body = json.dumps({"model": "gpt-4o", **fields}, indent=1).encode()
    found = Message(body=body, routing_key="critical.tests.x", message_id="r-1", headers={n.DIALECT: dialect})
    request = decoding.decode(found, lane=CRITICAL, request_id="r-1", hop=None, now_ms=1)
    assert request.body == body
    return request


def chat(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_completion_tokens": 100, "n": 5}, 500),
        ({"max_tokens": 100, "n": 5}, 500),
        ({"n": 5}, 5 * CRITICAL.max_tokens),
        ({"max_tokens": -1}, CRITICAL.max_tokens),
        ({"max_completion_tokens": -1, "n": 2}, 2 * CRITICAL.max_tokens),
        ({"max_completion_tokens": 100, "logprobs": True, "top_logprobs": 20}, 100),
    ],
)
def test_each_choice_may_have_so_many_tokens(fields: dict[str, Any], most: int) -> None:
    assert decoded(chat(**fields)).max_tokens == most


def test_calls_of_tools_may_lack_their_ids() -> None:
    called = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "there"}]

    assert decoded({"messages": turns}).max_tokens == CRITICAL.max_tokens


@pytest.mark.parametrize(
    ("fields", "dialect"),
    [
        (chat([{"type": "image_url", "image_url": {"url": IMAGE}}]), n.OPENAI_CHAT),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
            n.OPENAI_RESPONSES,
        ),
    ],
)
def test_an_image_in_a_data_url_is_not_taken_for_text(fields: dict[str, Any], dialect: str) -> None:
    media = decoded(fields, dialect).media

    assert media.bytes == len(IMAGE)
    assert 85 < media.tokens("gpt-4o") < 2_000


@pytest.mark.parametrize(
    ("fields", "dialect"),
    [
        (chat([{"type": ["text"], "text": "hi"}]), n.OPENAI_CHAT),
        ({"messages": [{"role": {}, "content": "hi"}]}, n.OPENAI_CHAT),
        ({"input": [{"role": "user", "content": [{"type": {}}]}]}, n.OPENAI_RESPONSES),
        ({"input": [{"type": [], "output": [{"type": []}]}]}, n.OPENAI_RESPONSES),
        ({"max_tokens": 5, **chat([{"type": ["text"], "text": "hi"}])}, n.ANTHROPIC_MESSAGES),
    ],
)
def test_a_type_that_is_no_text_is_for_the_provider_to_refuse(fields: dict[str, Any], dialect: str) -> None:
    assert decoded(fields, dialect).model == "gpt-4o"


@pytest.mark.parametrize(
    ("fields", "dialect"),
    [
        (chat(models=["gpt-4o", "dear"]), n.OPENAI_CHAT),
        ({"input": "x", "tools": [{"type": "image_generation", "model": "dear"}]}, n.OPENAI_RESPONSES),
    ],
    ids=["OpenRouter's fallbacks", "a tool's model"],
)
def test_other_models_that_a_body_names_are_read(fields: dict[str, Any], dialect: str) -> None:
    assert "dear" in decoded(fields, dialect).other_models
