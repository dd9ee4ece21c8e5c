"""Reads requests to the simulated model, and makes its answers, whole or as the events of a stream. The model echoes
the prompt, so that each answer shows to which request it belongs. `openai.py` does the same in OpenAI's formats."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from service.simulated.faults import PromptMarkers, error_body, event, invalid, parse_script
from topology.codec import media

KNOWN_MODELS: Final = (
    "claude-fable-5-2",
    "claude-fable-5-1",
    "claude-fable-5",
    "claude-mythos-5-2",
    "claude-mythos-5-1",
    "claude-mythos-5",
    "claude-opus-5-5",
    "claude-opus-5",
    "claude-opus-4-8",
    "claude-opus-4-7",
    "claude-opus-4-6",
    "claude-opus-4-5",
    "claude-sonnet-5-5",
    "claude-sonnet-5",
    "claude-sonnet-4-6",
    "claude-sonnet-4-5",
    "claude-haiku-5-5",
    "claude-haiku-4-5",
)
_SAMPLING: Final = ("temperature", "top_p", "top_k")
WITHOUT_SAMPLING: Final = "2026-10-21"
"""From this version on, `temperature`, `top_p` and `top_k` are errors."""
_TYPES: Final[Mapping[str, tuple[type | tuple[type, ...], str]]] = {
    "system": ((str, list), "string or list"),
    "tools": (list, "list"),
    "stop_sequences": (list, "list"),
    "tool_choice": (dict, "dictionary"),
    "thinking": (dict, "dictionary"),
    "metadata": (dict, "dictionary"),
    "stream": (bool, "boolean"),
}
"""Of the optional fields."""
_FILLING: Final = " and so on"
_PIECES: Final = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


_LINE: Final = re.compile(r"(fable|mythos)-\d|(?:opus|sonnet|haiku)-(?:4|5-5|5)|fable|mythos|opus|sonnet|haiku")


def limit_line(model: str) -> str:
    """The line of models that share one rate limit with this model, such as `opus-5-5` or `sonnet-4`."""
    found = _LINE.search(model)
    return "other" if found is None else found[0]


def model_info(model: str) -> dict[str, Any]:
    """The JSON answer of the simulated `GET /v1/models/{id}`."""
    return {
        "type": "model",
        "id": model,
        "display_name": model.replace("-", " ").title(),
        "created_at": "2026-01-01T00:00:00Z",
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": 200_000,
        "max_tokens": 128_000,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked request, with the parts that the simulated model uses."""

    dialect: "AnswerFormat"
    model: str
    max_tokens: int
    stream: bool
    prompt: str
    tool: dict[str, Any] | None
    thinking: bool
    input_tokens: int
    estimated_tokens: int
    """What is taken from the bucket of input tokens at the start; more than `input_tokens`, as Anthropic's estimate."""
    script: PromptMarkers
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The whole request, where an answer tells more of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The formats of answers: whole (`write`), as the events of a stream, and an error in its middle."""

    write: Callable[..., dict[str, Any]]
    events: Callable[..., list[bytes]]
    error_event: Callable[..., bytes]
    id_prefix: str = ""
    is_openai: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the simulated model has written."""

    blocks: tuple[dict[str, Any], ...]
    stop_reason: str
    tokens: int
    stop_details: dict[str, Any] | None = None


def read_request(body: bytes, *, counting: bool = False, version: str = WITHOUT_SAMPLING) -> Asked:
    """`counting`: of tokens, which needs no `max_tokens`. `version`: of the API, which decides about some fields.
    Raises `Refusal` (400)."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise invalid("The request body must be a JSON object")
    for name in _SAMPLING:
        if name in fields and version >= WITHOUT_SAMPLING:
            raise invalid(f"{name}: this parameter is not supported in version {version}")
    for name in ("model", "messages") if counting else ("model", "max_tokens", "messages"):
        if name not in fields:
            raise invalid(f"{name}: Field required")
    max_tokens = fields.get("max_tokens", 1)
    if type(max_tokens) is not int or max_tokens < 0:
        raise invalid("max_tokens: Input should be a valid integer greater than or equal to 0")
    if not isinstance(fields["model"], str):
        raise invalid("model: Input should be a valid string")
    for name, (type_, word) in _TYPES.items():
        if fields.get(name) is not None and not isinstance(fields[name], type_):
            raise invalid(f"{name}: Input should be a valid {word}")
    prompt, is_result = _text(_last_user_message(fields["messages"])["content"])
    tools = fields.get("tools") or []
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools.{index}")
    found = media.count(fields)
    input_tokens = tokens_of(len(body) - found.bytes) + found.tokens(fields["model"])
    return Asked(
        dialect=MESSAGES,
        model=fields["model"],
        max_tokens=max_tokens,
        stream=fields.get("stream") is True,
        prompt=prompt,
        tool=tools[0] if tools and not is_result else None,
        thinking=isinstance(fields.get("thinking"), dict) and fields["thinking"].get("type") != "disabled",
        input_tokens=input_tokens,
        estimated_tokens=input_tokens * 4 // 3,
        script=parse_script(prompt),
    )


def _check_tool(tool: Any, at: str) -> None:
    if not isinstance(tool, dict):
        raise invalid(f"{at}: Input should be a valid dictionary")
    if not isinstance(tool.get("name", ""), str):
        raise invalid(f"{at}.name: Input should be a valid string")
    if "input_schema" in tool and not is_schema(tool["input_schema"]):
        raise invalid(f"{at}.input_schema: JSON schema is invalid")


def is_schema(schema: Any) -> bool:
    """Whether it is a JSON schema, as far as an answer needs it."""
    if not isinstance(schema, dict):
        return False
    required = schema.get("required", [])
    has_names = isinstance(required, list) and all(isinstance(name, str) for name in required)
    return has_names and isinstance(schema.get("properties", {}), dict)


def _last_user_message(messages: Any) -> dict[str, Any]:
    if not isinstance(messages, list) or not messages:
        raise invalid("messages: at least one message is required")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise invalid(f"messages.{index}.role: Input should be 'user', 'assistant' or 'system'")
        if not isinstance(message.get("content"), (str, list)):
            raise invalid(f"messages.{index}.content: Input should be a valid string or list")
    found: dict[str, Any] | None = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if found is None:
        raise invalid("messages: the first message must use the user role")
    return found


def _text(content: Any) -> tuple[str, bool]:
    if isinstance(content, str):
        return content, False
    texts: list[str] = []
    is_result = False
    for block in content:
        if not isinstance(block, dict):
            raise invalid("messages.content: Input should be a list of blocks")
        if block.get("type") == "tool_result":
            is_result = True
            if isinstance(block.get("content"), (str, list)):
                texts.append(_text(block["content"])[0])
        elif isinstance(block.get("text"), str):
            texts.append(block["text"])
    return "\n".join(texts), is_result


def echo(asked: Asked, *, output_tokens: int | None) -> Output:
    """An echo of the last user message, or a call of the request's tool until its result comes."""
    blocks: list[dict[str, Any]] = []
    if asked.thinking:
        blocks.append({"type": "thinking", "thinking": f"They said: {asked.prompt[:200]}", "signature": "c2ltdWxhdGVk"})
    if asked.tool is not None:
        schema = asked.tool.get("input_schema") or {}
        argument = next(iter(schema.get("required") or schema.get("properties") or ()), "echo")
        called = {"name": asked.tool.get("name", "tool"), "input": {argument: asked.prompt}}
        blocks.append({"type": "tool_use", "id": "toolu_simulated", **called})
        return Output(blocks=tuple(blocks), stop_reason="tool_use", tokens=tokens_of(len(asked.prompt)))
    text = f"echo: {asked.prompt}"
    length = asked.script.tokens or output_tokens
    if length is not None:
        text = (text + _FILLING * (length * 4 // len(_FILLING) + 1))[: max(len(text), length * 4)]
    is_cut = tokens_of(len(text)) > asked.max_tokens
    if is_cut:
        text = text[: asked.max_tokens * 4]
    blocks.append({"type": "text", "text": text})
    stop_reason = "max_tokens" if is_cut else "end_turn"
    return Output(blocks=tuple(blocks), stop_reason=stop_reason, tokens=tokens_of(len(text)))


def message(asked: Asked, output: Output, *, id: str, tier: str = "standard") -> dict[str, Any]:
    """The answer as the JSON of an Anthropic Message."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": list(output.blocks),
        "stop_reason": output.stop_reason,
        "stop_sequence": None,
        "stop_details": output.stop_details,
        "usage": {
            "input_tokens": asked.input_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": output.tokens,
            "service_tier": tier,
        },
    }


def events(asked: Asked, output: Output, *, id: str, deltas: int) -> list[bytes]:
    """The answer as the Server-Sent Events of Anthropic's stream; each block is cut into up to `deltas` pieces."""
    whole = message(asked, output, id=id)
    begun = {
        **whole,
        "content": [],
        "stop_reason": None,
        "stop_details": None,
        "usage": {**whole["usage"], "output_tokens": 1},
    }
    found = [event("message_start", message=begun)]
    for index, block in enumerate(output.blocks):
        found.extend(_block(index, block, deltas=deltas))
    ending = {"stop_reason": output.stop_reason, "stop_sequence": None, "stop_details": output.stop_details}
    found.append(event("message_delta", delta=ending, usage={"output_tokens": output.tokens}))
    found.append(event("message_stop"))
    return found


def _block(index: int, block: dict[str, Any], *, deltas: int) -> Iterator[bytes]:
    empty = dict(block)
    pieces: list[dict[str, Any]]
    if block["type"] == "tool_use":
        empty["input"] = {}
        parts = ["", *cut(json.dumps(block["input"]), deltas)]
        pieces = [{"type": "input_json_delta", "partial_json": part} for part in parts]
    else:
        delta, field = _PIECES[block["type"]]
        empty[field] = ""
        pieces = [{"type": delta, field: part} for part in cut(block[field], deltas)]
        if "signature" in block:
            empty["signature"] = ""
            pieces.append({"type": "signature_delta", "signature": block["signature"]})
    yield event("content_block_start", index=index, content_block=empty)
    if index == 0:
        yield event("ping")
    for piece in pieces:
        yield event("content_block_delta", index=index, delta=piece)
    yield event("content_block_stop", index=index)


def cut(text: str, deltas: int) -> list[str]:
    """Up to `deltas` pieces."""
    pieces = min(deltas, len(text))
    return [text[n * len(text) // pieces : (n + 1) * len(text) // pieces] for n in range(pieces)]


def tokens_of(characters: int) -> int:
    """As the simulated API counts."""
    return max(1, math.ceil(characters / 4))


def _error_event(type: str, *, nth: int, request_id: str) -> bytes:
    error = error_body(type, f"{type} in the middle", request_id=request_id)
    return b"event: error\ndata: %b\n\n" % error


MESSAGES: Final = AnswerFormat(
    write=message, events=events, error_event=_error_event, id_prefix="msg_", is_openai=False
)
