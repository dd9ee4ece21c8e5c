"""The body of a request: Anthropic's own, or the short form; only what we must know of it is looked at.

Whatever else is in it goes to the provider as it came, and is the provider's to judge.
"""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import PydanticCustomError

from topology.contract.problems import RequestProblem

MESSAGES_AT_MOST = 100_000
"""Anthropic's own limit. Without one, and without `FailFast`, a gzip of 8 KiB kept a worker busy for 20 s."""


def _text_or_blocks(content: Any) -> Any:
    """Look at the kind alone: pydantic would copy the blocks, one by one."""
    if not isinstance(content, str | list):
        raise PydanticCustomError("text_or_blocks", "Input should be a string or an array")
    return content


TextOrBlocks = Annotated[Any, AfterValidator(_text_or_blocks)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
MaxTokens = Annotated[int, Field(ge=1, le=10_000_000)]


class Turn(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: TextOrBlocks


class MessagesBody(BaseModel):
    """The JSON body of `POST /v1/messages`; `model` and `max_tokens` may be left to the lane."""

    model_config = ConfigDict(extra="allow", strict=True)
    messages: Annotated[list[Turn], FailFast(), Field(min_length=1, max_length=MESSAGES_AT_MOST)]
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    system: TextOrBlocks | None = None


class PromptBody(BaseModel):
    """The short form."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: Annotated[str, Field(min_length=1)]
    system: str | None = None
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None


def check(found: object) -> MessagesBody | PromptBody:
    """Check what was decoded. Raises RequestProblem that names every wrong field, never what the prompt says."""
    if not isinstance(found, dict):
        raise RequestProblem("invalid_request", f"body: found {_kind(found)}, allowed is a JSON object")
    if "prompt" in found and "messages" in found:
        raise RequestProblem("invalid_request", "body: give `messages` or the short form's `prompt`, not both")
    if "prompt" not in found and "messages" not in found:
        raise RequestProblem("invalid_request", "body: `messages` is missing (or `prompt`, the short form)")
    try:
        return PromptBody.model_validate(found) if "prompt" in found else MessagesBody.model_validate(found)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(str(step)[:40] for step in each['loc'])}: {each['msg']} (found {_kind(each['input'])})"
            for each in error.errors(include_url=False, include_context=False)[:5]
        ]
        raise RequestProblem("invalid_request", f"body: {'; '.join(wrong)}") from None


def _kind(value: object) -> str:
    """What was found, in JSON's words. Strings and objects may hold a prompt: only their kind is told."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)[:40]
    kinds: dict[type, str] = {str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), "something else")
