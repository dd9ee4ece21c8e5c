"""The body of a request: Anthropic's own, or the short form. Only the fields that we need are checked.

The rest of the body goes to the provider unchanged, and the provider judges it.
"""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from lanekeeper.contract.problems import RequestProblem

FIELDS_AT_MOST = 1000
"""The most fields of the short form, which has five. Each unknown field costs the time of one pydantic error."""


MEDIA_AS_TEXT_BYTES = 6400
"""An image of any size costs up to 1,600 tokens: as many as this much text."""


def _text_or_blocks(content: Any) -> Any:
    """Check only the type: pydantic would copy the blocks one by one."""
    if not isinstance(content, str | list):
        raise PydanticCustomError("text_or_blocks", "Input should be a string or an array")
    return content


TextOrBlocks = Annotated[Any, AfterValidator(_text_or_blocks), WithJsonSchema({"type": ["string", "array"]})]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
MaxTokens = Annotated[int, Field(ge=1, le=10_000_000)]


class Turn(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(strict=True)
    role: str
    content: TextOrBlocks


class MessagesBody(BaseModel):
    """The JSON body of `POST /v1/messages`; `model` and `max_tokens` may be left to the lane."""

    model_config = ConfigDict(strict=True)
    messages: Annotated[list[Any], Field(min_length=1)]
    """Each as `Turn` describes. They are checked without making `Turn` objects, which would take 4 µs each."""
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    system: TextOrBlocks | None = None


class PromptBody(BaseModel):
    """The short form of a request's body."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: Annotated[str, Field(min_length=1)]
    system: str | None = None
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None


def check(found: object) -> MessagesBody | PromptBody:
    """Check a decoded body. Raises a RequestProblem that names every wrong field and never quotes the prompt."""
    if not isinstance(found, dict):
        raise RequestProblem("invalid_request", f"body: found {_kind(found)}, allowed is a JSON object")
    if "prompt" in found and "messages" in found:
        raise RequestProblem("invalid_request", "body: give `messages` or the short form's `prompt`, not both")
    if "prompt" not in found and "messages" not in found:
        raise RequestProblem("invalid_request", "body: `messages` is missing (or `prompt`, the short form)")
    if "prompt" in found and len(found) > FIELDS_AT_MOST:
        raise RequestProblem(
            "invalid_request", f"body: {len(found)} fields; {', '.join(PromptBody.model_fields)} are known"
        )
    try:
        if "prompt" in found:
            return PromptBody.model_validate(found)
        checked = MessagesBody.model_validate(found)
    except ValidationError as error:
        raise _problem(error) from None
    for number, turn in enumerate(checked.messages):
        if _is_turn(turn):
            continue
        try:
            Turn.model_validate(turn)
        except ValidationError as error:
            raise _problem(error, "messages", number) from None
    return checked


def media_bytes(checked: MessagesBody | PromptBody) -> int:
    """Bytes of images and documents in base64, less those of the text that would cost as much as each of them."""
    if isinstance(checked, PromptBody):
        return 0
    blocks = [block for turn in checked.messages if isinstance(turn["content"], list) for block in turn["content"]]
    found = (block["source"] for block in blocks if isinstance(block, dict) and isinstance(block.get("source"), dict))
    sizes = (len(source["data"]) for source in found if isinstance(source.get("data"), str))
    return sum(max(0, size - MEDIA_AS_TEXT_BYTES) for size in sizes)


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), (str, list))


def _problem(error: ValidationError, *place: str | int) -> RequestProblem:
    wrong = [
        f"{'.'.join(str(step)[:40] for step in (*place, *each['loc']))}: {each['msg']} (found {_kind(each['input'])})"
        for each in error.errors(include_url=False, include_context=False)[:5]
    ]
    return RequestProblem("invalid_request", f"body: {'; '.join(wrong)}")


def _kind(value: object) -> str:
    """The value that was found, in JSON's words. For strings and objects, which may contain a prompt, only the type."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)[:40]
    kinds: dict[type, str] = {str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), "something else")
