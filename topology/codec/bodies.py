"""Reads what Lanekeeper has to know of a request's body, in each dialect: `READERS`. All other fields go to the
provider, which checks them; its answer is read in `consumers/dialects`."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from lanekeeper.contract.names import (
    ANTHROPIC_MESSAGES,
    DIALECT,
    OPENAI_CHAT,
    OPENAI_EMBEDDINGS,
    OPENAI_RESPONSES,
    STREAM,
)
from lanekeeper.contract.problems import RequestProblem, invalid_request
from topology.codec.file_ids import MAY_NAME, named_in
from topology.codec.media import NO_MEDIA, Media, count, count_parts
from topology.lanes import LaneSpec


class Content(NamedTuple):
    """The fields of `Request` that come from the body."""

    body: bytes
    model: str
    max_tokens: int
    states_stream: bool = False
    media: Media = NO_MEDIA
    user: str = ""
    files: tuple[str, ...] = ()
    is_fast: bool = False
    other_models: tuple[str, ...] = ()


# ---- anthropic.messages ----------------------------------------------------------------------------------------------


def _text_or_blocks(content: Any) -> Any:
    """The blocks are not checked, because pydantic would copy them one by one."""
    if not isinstance(content, str | list):
        raise PydanticCustomError("text_or_blocks", "Input should be a string or an array")
    return content


TextOrBlocks = Annotated[Any, AfterValidator(_text_or_blocks)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
MaxTokens = Annotated[int, Field(ge=0, le=10_000_000)]  # 0 only fills the prompt cache


class Turn(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(strict=True)
    role: str
    content: TextOrBlocks


class MessagesBody(BaseModel):
    """The body of `POST /v1/messages`: only the fields that Lanekeeper needs are checked. All others go to the
    provider, which checks them."""

    model_config = ConfigDict(strict=True)
    messages: Annotated[list[Any], Field(min_length=1)]
    """Each is like `Turn`; converting them would take 4 µs for each."""
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None
    system: TextOrBlocks | None = None


class PromptBody(BaseModel):
    """The short form: one `prompt` in place of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: Annotated[str, Field(min_length=1)]
    system: str | None = None
    model: ModelName | None = None
    max_tokens: MaxTokens | None = None
    stream: bool | None = None


def _read_messages(raw: bytes, found: object, stream: bool, lane: LaneSpec) -> Content:
    checked = check(found)
    assert isinstance(found, dict)
    _check_stream(checked.stream, stream)
    model = checked.model or lane.model
    max_tokens = lane.max_tokens if checked.max_tokens is None else checked.max_tokens
    others = models_beside(found)
    for each in (model, *others):
        _check_model(each, lane)
    body = _provider_body(raw, found, checked, model=model, max_tokens=max_tokens, rewrite=lane.models is not None)
    return Content(
        body,
        model,
        max_tokens,
        states_stream="stream" in checked.model_fields_set,
        media=_with_escapes(count(found), body),
        user=_user_of(found),
        files=named_in(found) if MAY_NAME.search(raw) else (),
        is_fast=found.get("speed") == "fast",
        other_models=others,
    )


def models_beside(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The models that a body names besides its own: those that the provider asks if that one declines (`fallbacks`; at
    OpenRouter `models`), and those of tools, such as advisors and OpenAI's makers of images."""
    asking = [*_list(body.get("fallbacks")), *_list(body.get("tools"))]
    named = [*(each.get("model") for each in asking if isinstance(each, dict)), *_list(body.get("models"))]
    return tuple(dict.fromkeys(model for model in named if isinstance(model, str)))


def user_hash(user_id: str) -> str:
    """A `metadata.user_id` as it is counted: applications may put names or addresses there."""
    return hashlib.sha256(user_id.encode(errors="replace")).hexdigest()[:16]


def _user_of(body: Mapping[str, Any]) -> str:
    metadata = body.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    return user_hash(user_id) if isinstance(user_id, str) and user_id else ""


def _provider_body(
    raw: bytes,
    found: Mapping[str, object],
    checked: MessagesBody | PromptBody,
    *,
    model: str,
    max_tokens: int,
    rewrite: bool,
) -> bytes:
    """Missing fields are inserted at the beginning. `rewrite` (for a lane that allows only some models): the body is
    encoded again from what was checked, because the provider's parser might read the bytes differently."""
    if isinstance(checked, PromptBody):
        body: dict[str, object] = {
            "model": model,
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": checked.prompt}],
        }
        if checked.system is not None:
            body["system"] = checked.system
        return _encoded(body)
    filled = {"model": model, "max_tokens": max_tokens}
    missing = {key: value for key, value in filled.items() if key not in checked.model_fields_set}
    is_null = any(getattr(checked, key) is None for key in filled.keys() - missing.keys())
    if rewrite or is_null:
        return _encoded({**found, **filled})
    # the object is not empty (it has `messages`), so a comma must follow the inserted fields
    return raw.replace(b"{", _encoded(missing)[:-1] + b",", 1) if missing else raw


def _encoded(body: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, UnicodeEncodeError) as error:
        raise invalid_request(f"body: holds what JSON in UTF-8 cannot say: {error}") from None


def check(found: object) -> MessagesBody | PromptBody:
    """Raises a RequestProblem that names up to five wrong fields and never quotes the prompt."""
    found = _object(found)
    _check_dialect(found, ANTHROPIC_MESSAGES)
    if "prompt" in found and "messages" in found:
        raise invalid_request("body: give `messages` or the short form's `prompt`, not both")
    if "prompt" not in found and "messages" not in found:
        raise invalid_request("body: `messages` is missing (or `prompt`, the short form)")
    if "prompt" in found and (more := found.keys() - PromptBody.model_fields.keys()):
        known = ", ".join(name for name in PromptBody.model_fields if name != "stream")
        others = ", ".join(sorted(name[:40] for name in more)[:5])
        raise invalid_request(
            f"body: the short form has four fields ({known}), found also {others}; for the others write `messages`"
        )
    try:
        if "prompt" in found:
            return PromptBody.model_validate(found)
        checked = MessagesBody.model_validate(found)
    except ValidationError as error:
        raise _problem(error) from None
    for number, turn in enumerate(checked.messages):
        if type(turn) is dict and type(turn.get("role")) is str and type(turn.get("content")) in (str, list):
            continue
        try:
            Turn.model_validate(turn)
        except ValidationError as error:
            raise _problem(error, "messages", number) from None
    return checked


# ---- OpenAI's --------------------------------------------------------------------------------------------------------

Choices = Annotated[int, Field(ge=1, le=128)]
Bound = Annotated[int, Field(le=10_000_000)]
"""Of the output. Local servers take -1 as no bound; where it is wrong, the provider says so."""


class ChatBody(BaseModel):
    """The body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(strict=True)
    messages: Annotated[list[Any], Field(min_length=1)]
    model: ModelName
    max_completion_tokens: Bound | None = None
    max_tokens: Bound | None = None
    n: Choices | None = None
    stream: bool | None = None


class ResponsesBody(BaseModel):
    """The body of `POST /v1/responses`."""

    model_config = ConfigDict(strict=True)
    model: ModelName
    input: TextOrBlocks | None = None
    max_output_tokens: Bound | None = None
    stream: bool | None = None
    background: bool | None = None


class EmbeddingsBody(BaseModel):
    """The body of `POST /v1/embeddings`."""

    model_config = ConfigDict(strict=True)
    model: ModelName
    input: Annotated[TextOrBlocks, Field(min_length=1)]


def _read_chat(raw: bytes, found: object, stream: bool, lane: LaneSpec) -> Content:
    body = _openai_body(found, OPENAI_CHAT)
    try:
        checked = ChatBody.model_validate(body)
    except ValidationError as error:
        raise _problem(error) from None
    _check_stream(checked.stream, stream)
    bound = checked.max_tokens if checked.max_completion_tokens is None else checked.max_completion_tokens
    most = _most(bound, lane) * (checked.n or 1)
    parts = [part for turn in checked.messages if isinstance(turn, dict) for part in _list(turn.get("content"))]
    return _openai_content(raw, body, checked.model, most, count_parts(parts), lane)


def _read_responses(raw: bytes, found: object, stream: bool, lane: LaneSpec) -> Content:
    body = _openai_body(found, OPENAI_RESPONSES)
    try:
        checked = ResponsesBody.model_validate(body)
    except ValidationError as error:
        raise _problem(error) from None
    _check_stream(checked.stream, stream)
    if checked.background:
        raise invalid_request("body: background is true; leave it out: every request waits, and its result is kept")
    most = _most(checked.max_output_tokens, lane)
    items = [item for item in _list(checked.input) if isinstance(item, dict)]
    parts = [part for item in items for key in ("content", "output") for part in _list(item.get(key))]
    return _openai_content(raw, body, checked.model, most, count_parts(parts), lane)


def _most(bound: int | None, lane: LaneSpec) -> int:
    return lane.max_tokens if bound is None or bound < 0 else bound


def _read_embeddings(raw: bytes, found: object, stream: bool, lane: LaneSpec) -> Content:
    body = _openai_body(found, OPENAI_EMBEDDINGS)
    try:
        checked = EmbeddingsBody.model_validate(body)
    except ValidationError as error:
        raise _problem(error) from None
    if stream:
        raise invalid_request(f"header {STREAM}: embeddings are not streamed")
    return _openai_content(raw, body, checked.model, 0, NO_MEDIA, lane)


def _openai_body(found: object, dialect: str) -> dict[str, Any]:
    body = _object(found)
    _check_dialect(body, dialect)
    if body.get("model") is None:
        raise invalid_request("body: `model` is missing; a lane's own model is one of Anthropic's")
    return body


def _openai_content(
    raw: bytes, found: Mapping[str, Any], model: str, max_tokens: int, media: Media, lane: LaneSpec
) -> Content:
    """Without a bound of its own, a request is taken to have the lane's `max_tokens`; nothing is added to the body."""
    others = models_beside(found)
    for each in (model, *others):
        _check_model(each, lane)
    user = found.get("safety_identifier") or found.get("user")
    return Content(
        raw if lane.models is None else _encoded(found),
        model,
        max_tokens,
        states_stream="stream" in found,
        media=_with_escapes(media, raw),
        user=user_hash(user) if isinstance(user, str) and user else "",
        other_models=others,
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


# ---- all dialects ----------------------------------------------------------------------------------------------------

_MARKS: Final[Mapping[str, frozenset[str]]] = {
    OPENAI_CHAT: frozenset({"max_completion_tokens", "stream_options", "response_format", "logit_bias", "logprobs"}),
    OPENAI_RESPONSES: frozenset({"instructions", "max_output_tokens", "previous_response_id", "reasoning"}),
    OPENAI_EMBEDDINGS: frozenset({"encoding_format", "dimensions"}),
    ANTHROPIC_MESSAGES: frozenset({"system", "stop_sequences", "anthropic_version"}),
}
"""Fields that one dialect alone has."""
_OPENAI_ROLES: Final = frozenset({"developer", "tool", "function"})
_OPENAI_PARTS: Final = frozenset({"image_url", "input_audio"})
_ANTHROPIC_PARTS: Final = frozenset({"tool_use", "tool_result"})
_SHOWN: Final[Mapping[str, str]] = {
    ANTHROPIC_MESSAGES: "POST /v1/messages",
    OPENAI_CHAT: "POST /v1/chat/completions",
    OPENAI_RESPONSES: "POST /v1/responses",
    OPENAI_EMBEDDINGS: "POST /v1/embeddings",
}


def _looks_like(body: Mapping[str, Any]) -> tuple[str, str]:
    """The dialect that a body certainly is in, and by what; two empty texts if it could be in several."""
    if "messages" in body:
        for turn in _list(body["messages"]):
            if not isinstance(turn, dict):
                continue
            role = turn.get("role")
            if isinstance(role, str) and role in _OPENAI_ROLES:
                return OPENAI_CHAT, f"a message of the role {role}"
            if "tool_calls" in turn:
                return OPENAI_CHAT, "a message with tool_calls"
            for part in _list(turn.get("content")):
                kind = part.get("type") if isinstance(part, dict) else None
                if not isinstance(kind, str):
                    continue
                if kind in _OPENAI_PARTS:
                    return OPENAI_CHAT, f"a part of the type {kind}"
                if kind in _ANTHROPIC_PARTS:
                    return ANTHROPIC_MESSAGES, f"a block of the type {kind}"
        possible: tuple[str, ...] = (OPENAI_CHAT, ANTHROPIC_MESSAGES)
    elif "input" in body:
        possible = (OPENAI_RESPONSES, OPENAI_EMBEDDINGS)
    else:
        return "", ""
    found = {dialect: sorted(_MARKS[dialect] & body.keys()) for dialect in possible}
    named = [(dialect, marks[0]) for dialect, marks in found.items() if marks]
    return (named[0][0], f"its field {named[0][1]}") if len(named) == 1 else ("", "")


def _check_dialect(body: Mapping[str, Any], stated: str) -> None:
    """Raises RequestProblem if the body is certainly in another dialect than the request says."""
    dialect, why = _looks_like(body)
    if dialect and dialect != stated:
        raise invalid_request(
            f"body: looks like {dialect} ({_SHOWN[dialect]}) by {why}, and is sent as {stated}: "
            f"send it with the header {DIALECT}: {dialect}, or to that path"
        )


def _check_stream(stated: bool | None, stream: bool) -> None:
    if stated is not None and stated != stream:
        raise invalid_request(f"body: stream is {str(stated).lower()}, but header {STREAM} says {str(stream).lower()}")


def _check_model(model: str, lane: LaneSpec) -> None:
    if lane.models is not None and model not in lane.models:
        raise RequestProblem(
            "forbidden_model",
            f"model {model[:80]!r} is not allowed in lane {lane.name}; allowed: {', '.join(sorted(lane.models))}",
        )


def _with_escapes(media: Media, body: bytes) -> Media:
    """Some encoders write \\/ for the slashes, of which base64 has many."""
    return media._replace(bytes=media.bytes + body.count(b"\\/")) if media.bytes else media


def _object(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise invalid_request(f"body: found {_kind(found)}, allowed is a JSON object")
    return found


def _problem(error: ValidationError, *place: str | int) -> RequestProblem:
    wrong = [
        f"{'.'.join(str(step)[:40] for step in (*place, *one['loc']))}: {one['msg']} (found {_kind(one['input'])})"
        for one in error.errors(include_url=False, include_context=False)[:5]
    ]
    return invalid_request(f"body: {'; '.join(wrong)}")


def _kind(value: object) -> str:
    """Numbers, booleans and null as JSON; other values, which may contain a prompt, by their type."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)[:40]
    kinds: dict[type, str] = {str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), "something else")


KNOWN_FIELDS: Final = frozenset(
    name for body in (MessagesBody, PromptBody, ChatBody, ResponsesBody, EmbeddingsBody) for name in body.model_fields
)
READERS: Final[Mapping[str, Callable[[bytes, object, bool, LaneSpec], Content]]] = {
    ANTHROPIC_MESSAGES: _read_messages,
    OPENAI_CHAT: _read_chat,
    OPENAI_RESPONSES: _read_responses,
    OPENAI_EMBEDDINGS: _read_embeddings,
}
"""By dialect: reads a body (as bytes, and parsed) that is streamed or not, in a lane. Each raises a RequestProblem that
names what is wrong."""
