"""Checks the body of a request, which is either that of Anthropic's Messages API or the short form (one `prompt` in
place of `messages`). Only the fields that Lanekeeper needs are checked.

All other fields go to the provider unchanged, and the provider checks them.
"""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from lanekeeper.contract.problems import RequestProblem, invalid_request

FIELDS_AT_MOST = 1000
"""A body in the short form (`prompt` in place of `messages`) with more fields than this is refused before pydantic
checks it, because pydantic makes an error for each unknown field, which takes time. The short form has five fields."""


MEDIA_AS_TEXT_BYTES = 6400
"""When input tokens are estimated from the bytes of a request, an image or document counts as this many bytes of text:
four for each of the 1,600 tokens that an image has at most, whatever its size."""


def _text_or_blocks(content: Any) -> Any:
    """Check that a message's content is text or a list of blocks. The blocks are not checked, because pydantic would
    copy them one by one."""
    if not isinstance(content, str | list):
        raise PydanticCustomError("text_or_blocks", "Input should be a string or an array")
    return content


TextOrBlocks = Annotated[Any, AfterValidator(_text_or_blocks), WithJsonSchema({"type": ["string", "array"]})]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
MaxTokens = Annotated[int, Field(ge=1, le=10_000_000)]


class Turn(BaseModel):
    """One message of the conversation in a request to Anthropic's Messages API: its role and its content."""

    model_config = ConfigDict(strict=True)
    role: str
    content: TextOrBlocks


class MessagesBody(BaseModel):
    """The JSON body of `POST /v1/messages`. If `model` or `max_tokens` is left out, the lane's default is used."""

    model_config = ConfigDict(strict=True)
    messages: Annotated[list[Any], Field(min_length=1)]
    """The conversation: each item is a dictionary with the fields of `Turn`. It is not converted to `Turn` objects,
    because that would take 4 µs for each."""
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    system: TextOrBlocks | None = None


class PromptBody(BaseModel):
    """The JSON body of a request in the short form: one `prompt` in place of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: Annotated[str, Field(min_length=1)]
    system: str | None = None
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None


def check(found: object) -> MessagesBody | PromptBody:
    """Check a request's parsed JSON body: either Anthropic's Messages format or the short form with `prompt`. Raises a
    RequestProblem that names up to five wrong fields and never quotes the prompt."""
    if not isinstance(found, dict):
        raise invalid_request(f"body: found {_kind(found)}, allowed is a JSON object")
    if "prompt" in found and "messages" in found:
        raise invalid_request("body: give `messages` or the short form's `prompt`, not both")
    if "prompt" not in found and "messages" not in found:
        raise invalid_request("body: `messages` is missing (or `prompt`, the short form)")
    if "prompt" in found and len(found) > FIELDS_AT_MOST:
        raise invalid_request(f"body: {len(found)} fields; {', '.join(PromptBody.model_fields)} are known")
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
    """How many bytes to subtract from a body's length before its input tokens are estimated from the length. These are
    the bytes of images and documents in base64. Of each image or document, `MEDIA_AS_TEXT_BYTES` are not subtracted,
    because they stand for its tokens."""
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
        f"{'.'.join(str(step)[:40] for step in (*place, *one['loc']))}: {one['msg']} (found {_kind(one['input'])})"
        for one in error.errors(include_url=False, include_context=False)[:5]
    ]
    return invalid_request(f"body: {'; '.join(wrong)}")


def _kind(value: object) -> str:
    """Describe a wrong value in an error's text: numbers, booleans and null as JSON; other values, which may contain a
    prompt, only by their type."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)[:40]
    kinds: dict[type, str] = {str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), "something else")
