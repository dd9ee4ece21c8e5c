"""Reads requests to the simulated model, and makes its answers. The model echoes the prompt, so that each answer shows
to which request it belongs."""

import json
import math
from dataclasses import dataclass
from typing import Any, Final

from service.simulated.errors import invalid
from service.simulated.faults import Script, parse_script

_SAMPLING: Final = ("temperature", "top_p", "top_k")
_FILLING: Final = " and so on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked Messages request to the simulated API, with the parts that the simulated model uses."""

    model: str
    max_tokens: int
    stream: bool
    prompt: str
    """The text of the last user message, including a tool's result."""
    tool: dict[str, Any] | None
    """The tool that the simulated model calls; None if the request has none, or already contains its result."""
    thinking: bool
    input_tokens: int
    estimated_tokens: int
    """The estimated number of input tokens, which is taken from the token bucket when the call starts. It is higher
    than the actual number, `input_tokens`."""
    script: Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The simulated model's answer: its content blocks, and why it ended."""

    blocks: tuple[dict[str, Any], ...]
    stop_reason: str
    output_tokens: int


def read(body: bytes, *, counting: bool = False) -> Asked:
    """Parse and check the JSON body of a Messages request. `counting`: whether it is a request to count tokens, which
    needs no `max_tokens`. Raises `Refusal` (400)."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise invalid("The request body must be a JSON object")
    for name in _SAMPLING:
        if name in fields:
            raise invalid(f"{name}: this parameter is not supported")
    for name in ("model", "messages") if counting else ("model", "max_tokens", "messages"):
        if name not in fields:
            raise invalid(f"{name}: Field required")
    max_tokens = fields.get("max_tokens", 1)
    if type(max_tokens) is not int or max_tokens < 1:
        raise invalid("max_tokens: Input should be a valid integer greater than or equal to 1")
    if not isinstance(fields["model"], str):
        raise invalid("model: Input should be a valid string")
    last = _last_user_message(fields["messages"])
    prompt, is_result = _text(last["content"])
    tools = fields.get("tools") or []
    return Asked(
        model=fields["model"],
        max_tokens=max_tokens,
        stream=fields.get("stream") is True,
        prompt=prompt,
        tool=tools[0] if tools and not is_result and isinstance(tools[0], dict) else None,
        thinking=isinstance(fields.get("thinking"), dict) and fields["thinking"].get("type") != "disabled",
        input_tokens=tokens_of(len(body)),
        estimated_tokens=tokens_of(len(body)) * 4 // 3,
        script=parse_script(prompt),
    )


def answer(asked: Asked, *, output_tokens: int | None) -> Answer:
    """Make the simulated model's answer: the text `echo: ` and the last user message, filled up to `output_tokens` and
    cut at `max_tokens`. If the request has a tool and does not contain the tool's result yet, the answer is a call of
    that tool."""
    blocks: list[dict[str, Any]] = []
    if asked.thinking:
        blocks.append({"type": "thinking", "thinking": f"They said: {asked.prompt[:200]}", "signature": "c2ltdWxhdGVk"})
    if asked.tool is not None:
        schema = asked.tool.get("input_schema") or {}
        argument = next(iter(schema.get("required") or schema.get("properties") or ()), "echo")
        blocks.append(
            {
                "type": "tool_use",
                "id": "toolu_simulated",
                "name": asked.tool.get("name", "tool"),
                "input": {argument: asked.prompt},
            }
        )
        return Answer(blocks=tuple(blocks), stop_reason="tool_use", output_tokens=tokens_of(len(asked.prompt)))
    text = f"echo: {asked.prompt}"
    length = asked.script.tokens or output_tokens
    if length is not None:
        text = (text + _FILLING * (length * 4 // len(_FILLING) + 1))[: max(len(text), length * 4)]
    cut = tokens_of(len(text)) > asked.max_tokens
    if cut:
        text = text[: asked.max_tokens * 4]
    blocks.append({"type": "text", "text": text})
    return Answer(
        blocks=tuple(blocks), stop_reason="max_tokens" if cut else "end_turn", output_tokens=tokens_of(len(text))
    )


def message(asked: Asked, reply: Answer, *, id: str) -> dict[str, Any]:
    """The simulated answer (`reply`) to a request (`asked`) as the JSON of an Anthropic Message."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": list(reply.blocks),
        "stop_reason": reply.stop_reason,
        "stop_sequence": None,
        "usage": usage(asked.input_tokens, reply.output_tokens),
    }


def usage(input_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A call's token counts, as in a Message's `usage`."""
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


def tokens_of(characters: int) -> int:
    """The number of tokens that the simulated API counts for a text of this many characters: one for each four
    characters, and at least one."""
    return max(1, math.ceil(characters / 4))


def _last_user_message(messages: Any) -> dict[str, Any]:
    if not isinstance(messages, list) or not messages:
        raise invalid("messages: at least one message is required")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise invalid(f"messages.{index}.role: Input should be 'user' or 'assistant'")
        if not isinstance(message.get("content"), (str, list)):
            raise invalid(f"messages.{index}.content: Input should be a valid string or list")
    found: dict[str, Any] | None = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if found is None:
        raise invalid("messages: the first message must use the user role")
    return found


def _text(content: Any) -> tuple[str, bool]:
    """The text in a message's content, and whether it contains a tool's result."""
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
