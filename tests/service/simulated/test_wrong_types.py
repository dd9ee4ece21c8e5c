"""A value of a wrong type in a request is an error 400 of the API that is simulated, or ignored; never a fault."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from service.simulated import messages, openai
from service.simulated.faults import Refusal
from service.simulated.messages import Asked, echo

TURNS = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
FUNCTION = {"name": "look", "parameters": {"type": "object", "required": ["at"], "properties": {"at": {}}}}
SCHEMA = {"name": "place", "schema": FUNCTION["parameters"]}
CHAT: dict[str, Any] = {
    "model": "gpt-5.5",
    "messages": TURNS,
    "tools": [{"type": "function", "function": FUNCTION}],
    "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 9,
    "max_tokens": 9,
    "n": 2,
    "stream": True,
    "metadata": {"a": "b"},
    "temperature": 0.5,
}
RESPONSE: dict[str, Any] = {
    "model": "gpt-5.5",
    "input": TURNS,
    "tools": [{"type": "function", **FUNCTION}],
    "text": {"format": {"type": "json_schema", **SCHEMA}},
    "max_output_tokens": 20,
    "instructions": "x",
    "metadata": {"a": "b"},
    "background": True,
    "reasoning": {"effort": "low"},
}
EMBEDDINGS: dict[str, Any] = {"model": "text-embedding-3-small", "input": ["a", "b"], "dimensions": 8, "user": "u"}
MESSAGES: dict[str, Any] = {
    "model": "claude-opus-5-5",
    "max_tokens": 9,
    "messages": TURNS,
    "system": [{"type": "text", "text": "x"}],
    "tools": [{"name": "look", "input_schema": FUNCTION["parameters"]}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "tool_choice": {"type": "auto"},
    "stream": True,
}
ALL: list[tuple[Callable[[bytes], Asked], dict[str, Any]]] = [
    (openai.read_chat, CHAT),
    (openai.read_response, RESPONSE),
    (openai.read_embeddings, EMBEDDINGS),
    (messages.read_request, MESSAGES),
]
WRONG: list[Any] = [None, True, -1, 0, 1.5, "x", [], [1], ["x"], [{}], [[]], {}, {"x": 1}, {"type": 1}, 10**12]


def changed(value: Any) -> Iterator[Any]:
    """The value with each of its parts replaced by each wrong one."""
    yield from WRONG
    if isinstance(value, dict):
        for name, part in value.items():
            yield from ({**value, name: other} for other in changed(part))
            yield {key: part for key, part in value.items() if key != name}
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in changed(part))


def asked_of(read: Callable[[bytes], Asked], fields: Any) -> Asked | None:
    try:
        return read(json.dumps(fields).encode())
    except Refusal:
        return None


@pytest.mark.parametrize(("read", "whole"), ALL, ids=["chat", "responses", "embeddings", "messages"])
def test_a_value_of_a_wrong_type_is_refused_or_answered(read: Callable[[bytes], Asked], whole: dict[str, Any]) -> None:
    answered = refused = 0
    for fields in changed(whole):
        if (asked := asked_of(read, fields)) is None:
            refused += 1
            continue
        output = echo(asked, output_tokens=None)
        json.dumps(asked.dialect.write(asked, output, id="1"), allow_nan=False)
        if read is not openai.read_embeddings:
            asked.dialect.events(asked, output, id="1", deltas=2)
        answered += 1
    assert answered
    assert refused


IN_OPENAIS_WORDS: list[tuple[Callable[[bytes], Asked], dict[str, Any], dict[str, Any], str, str]] = [
    (openai.read_chat, CHAT, {"tools": True}, "Invalid type for 'tools': expected an array, ", "invalid_type"),
    (openai.read_chat, CHAT, {"response_format": 1}, "Invalid type for 'response_format': ", "invalid_type"),
    (openai.read_chat, CHAT, {"background": True}, "Unknown parameter: 'background'.", "unknown_parameter"),
    (openai.read_chat, CHAT, {"n": 129}, "Invalid 'n': integer above ", "integer_above_max_value"),
    (openai.read_chat, CHAT, {"max_tokens": -1}, "Invalid 'max_tokens': integer below ", "integer_below_min_value"),
    (openai.read_response, RESPONSE, {"max_output_tokens": 2}, "Invalid 'max_output", "integer_below_min_value"),
    (openai.read_embeddings, EMBEDDINGS, {"dimensions": "x"}, "Invalid type for 'dimensions': ", "invalid_type"),
    (openai.read_embeddings, EMBEDDINGS, {"background": True}, "Unknown parameter: 'backg", "unknown_parameter"),
]


@pytest.mark.parametrize(("read", "whole", "wrong", "message", "code"), IN_OPENAIS_WORDS)
def test_the_error_is_in_openais_words(
    read: Callable[[bytes], Asked], whole: dict[str, Any], wrong: dict[str, Any], message: str, code: str
) -> None:
    with pytest.raises(Refusal) as raised:
        read(json.dumps({**whole, **wrong}).encode())
    _, body = openai.error(raised.value)
    error = json.loads(body)["error"]
    assert error["message"].startswith(message)
    assert (error["param"], error["code"]) == (next(iter(wrong)), code)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tools": True}, "tools: Input should be a valid list"),
        ({"tools": [1]}, "tools.0: Input should be a valid dictionary"),
        ({"stream": "x"}, "stream: Input should be a valid boolean"),
        ({"thinking": 1}, "thinking: Input should be a valid dictionary"),
    ],
)
def test_the_error_is_in_anthropics_words(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as raised:
        messages.read_request(json.dumps({**MESSAGES, **wrong}).encode())
    assert raised.value.message == message
