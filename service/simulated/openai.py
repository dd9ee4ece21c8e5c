"""OpenAI's API, simulated: reads requests for chat completions, responses and embeddings, and makes their answers,
whole or as the events of a stream. The model is the one of `messages.py`: it echoes the prompt."""

import json
import math
import time
from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import shake_128
from typing import Any, Final

from service.simulated.buckets import RateLimitBucket
from service.simulated.faults import Refusal, parse_script
from service.simulated.messages import AnswerFormat, Asked, Output, cut, is_schema, tokens_of

CHAT_PATH: Final = "/v1/chat/completions"
RESPONSES_PATH: Final = "/v1/responses"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
KNOWN_MODELS: Final = ("gpt-5.5", "gpt-5.4-mini", "gpt-4o", "gpt-4o-mini", "text-embedding-3-small")
DIMENSIONS: Final = 1536
_ERRORS: Final[Mapping[int, tuple[str, str | None]]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    402: ("insufficient_quota", "insufficient_quota"),
    403: ("invalid_request_error", None),
    429: ("requests", "rate_limit_exceeded"),
    500: ("server_error", None),
    503: ("server_error", None),
    504: ("server_error", None),
    529: ("server_error", None),
}
_OVERLOADED: Final = "The engine is currently overloaded, please try again later"


def error(refusal: Refusal) -> tuple[int, bytes]:
    """Status and body of an error in OpenAI's format, which has no 402 and no 529."""
    status, message = refusal.status, refusal.message
    type, code = _ERRORS.get(status, ("invalid_request_error", None))
    if status == 402:
        status = 429
    elif status == 529:
        status, message = 503, _OVERLOADED
    elif status == 429 and "tokens" in message:
        type = "tokens"
    about = {"message": message, "type": type, "param": None, "code": code, **(refusal.details or {})}
    return status, json.dumps({"error": about}).encode()


def invalid(message: str, *, param: str | None, code: str | None = None) -> Refusal:
    """The error 400 for an invalid request."""
    return Refusal(400, message, outcome="invalid", details={"param": param, "code": code})


def unknown_model(model: str) -> Refusal:
    """The error 404 for an unknown model."""
    message = f"The model `{model[:100]}` does not exist or you do not have access to it."
    return Refusal(404, message, outcome="unknown_model", details={"code": "model_not_found"})


def model_info(model: str) -> dict[str, Any]:
    """The JSON answer of the simulated `GET /v1/models/{id}`."""
    return {"id": model, "object": "model", "created": 1_767_225_600, "owned_by": "system"}


def limit_headers(requests: RateLimitBucket, tokens: RateLimitBucket) -> dict[str, str]:
    """As OpenAI sends them."""
    found = {}
    for name, bucket in (("requests", requests), ("tokens", tokens)):
        found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
        found[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level())))
        found[f"x-ratelimit-reset-{name}"] = _duration(bucket.full_in_s())
    return found


def _duration(seconds: float) -> str:
    """As Go writes it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.3g}s"


# ---- requests --------------------------------------------------------------------------------------------------------


_OF_ALL: Final = {"model": str, "user": str}
_OF_ANSWERS: Final = {
    "tools": list,
    "stream": bool,
    "stream_options": dict,
    "temperature": float,
    "top_p": float,
    "metadata": dict,
    "parallel_tool_calls": bool,
    "store": bool,
    "service_tier": str,
}
_TYPES: Final[Mapping[str, Mapping[str, type]]] = {
    CHAT_PATH: {
        **_OF_ALL,
        **_OF_ANSWERS,
        "messages": list,
        "response_format": dict,
        "n": int,
        "max_tokens": int,
        "max_completion_tokens": int,
        "logit_bias": dict,
        "logprobs": bool,
        "seed": int,
    },
    RESPONSES_PATH: {
        **_OF_ALL,
        **_OF_ANSWERS,
        "background": bool,
        "instructions": str,
        "max_output_tokens": int,
        "previous_response_id": str,
        "reasoning": dict,
        "text": dict,
        "truncation": str,
    },
    EMBEDDINGS_PATH: {**_OF_ALL, "dimensions": int, "encoding_format": str},
}
"""Of the fields that may have one type only. A field that only other paths have is refused, one that none has is
not."""
_LEAST: Final = {"n": 1, "max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 16, "dimensions": 1}
_MOST: Final = {"n": 128, "dimensions": 3072}
_WORDS: Final = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _of_type(type_: type, value: Any, param: str) -> Any:
    if type(value) is type_ or (type_ is float and type(value) is int):
        return value
    told = f"Invalid type for '{param}': expected {_WORDS[type_]}, but got {_WORDS[type(value)]} instead."
    raise invalid(told, param=param, code="invalid_type")


def _part(type_: type, of: Mapping[str, Any], name: str, param: str) -> Any:
    """A field of one type, or None."""
    return None if of.get(name) is None else _of_type(type_, of[name], f"{param}.{name}" if param else name)


def read_chat(body: bytes) -> Asked:
    """Raises `Refusal` (400)."""
    fields = _fields(body, CHAT_PATH, "messages")
    if not (said := fields["messages"]):
        raise invalid("Invalid 'messages': empty array.", param="messages", code="empty_array")
    for index, message in enumerate(said):
        _of_type(dict, message, f"messages[{index}]")
    format = _part(dict, _part(dict, fields, "response_format", "") or {}, "json_schema", "response_format") or {}
    return _asked(
        CHAT,
        fields,
        said,
        function=_function(fields, lambda tool, at: _part(dict, tool, "function", at)),
        schema=_schema(format, "schema", "response_format.json_schema"),
        max_tokens=fields.get("max_completion_tokens") or fields.get("max_tokens"),
    )


def read_response(body: bytes) -> Asked:
    """Raises `Refusal` (400)."""
    fields = _fields(body, RESPONSES_PATH, "input")
    given = fields["input"]
    said = [{"role": "user", "content": given}] if isinstance(given, str) else _of_type(list, given, "input")
    for index, item in enumerate(said):
        _of_type(dict, item, f"input[{index}]")
    format = _part(dict, fields.get("text") or {}, "format", "text") or {}
    return _asked(
        RESPONSES,
        fields,
        said,
        function=_function(fields, lambda tool, at: tool if tool.get("type") == "function" else None),
        schema=_schema(format, "schema", "text.format"),
        max_tokens=fields.get("max_output_tokens"),
    )


def _function(
    fields: Mapping[str, Any], of_tool: Callable[[dict[str, Any], str], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """The first function among the tools."""
    found = None
    for index, tool in enumerate(fields.get("tools") or ()):
        at = f"tools[{index}]"
        function = of_tool(_of_type(dict, tool, at), at)
        if function is not None and found is None:
            _part(str, function, "name", at)
            _schema(function, "parameters", at)
            found = function
    return found


def _schema(of: Mapping[str, Any], name: str, param: str) -> dict[str, Any] | None:
    schema: dict[str, Any] | None = _part(dict, of, name, param)
    if schema is not None and not is_schema(schema):
        raise invalid(f"Invalid schema for '{param}'.", param=param, code="invalid_function_parameters")
    return schema


def read_embeddings(body: bytes) -> Asked:
    """Raises `Refusal` (400)."""
    fields = _fields(body, EMBEDDINGS_PATH, "input")
    inputs = _inputs(fields)
    if not inputs or not all(each and isinstance(each, (str, list)) for each in inputs):
        raise invalid("Invalid 'input': expected a string, or a list of them.", param="input")
    said = [{"role": "user", "content": each} for each in inputs if isinstance(each, str)]
    return _asked(EMBEDDINGS, fields, said)


def _inputs(fields: Mapping[str, Any]) -> list[Any]:
    """One for each vector; tokens are numbers."""
    given = fields["input"]
    is_one = isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int))
    return [given] if is_one else given if isinstance(given, list) else []


def _fields(body: bytes, path: str, required: str) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise invalid("We could not parse the JSON body of your request.", param=None)
    for name in ("model", required):
        if name not in fields:
            raise invalid(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    types = _TYPES[path]
    for name, value in fields.items():
        if name in types and (value is not None or name in ("model", required)):
            _check_range(name, _of_type(types[name], value, name))
        elif name not in types and any(name in others for others in _TYPES.values()):
            raise invalid(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
    return fields


def _check_range(name: str, value: Any) -> None:
    if name in _LEAST and value < _LEAST[name]:
        told = f"below minimum value. Expected a value >= {_LEAST[name]}, but got {value} instead."
        raise invalid(f"Invalid '{name}': integer {told}", param=name, code="integer_below_min_value")
    if name in _MOST and value > _MOST[name]:
        told = f"above maximum value. Expected a value <= {_MOST[name]}, but got {value} instead."
        raise invalid(f"Invalid '{name}': integer {told}", param=name, code="integer_above_max_value")


def _asked(
    dialect: AnswerFormat,
    fields: dict[str, Any],
    said: Sequence[Mapping[str, Any]],
    *,
    function: Mapping[str, Any] | None = None,
    schema: dict[str, Any] | None = None,
    max_tokens: int | None = None,
) -> Asked:
    last = said[-1] if said else {}
    is_result = last.get("role") == "tool" or last.get("type") == "function_call_output"
    prompt = _text(last.get("output") or last.get("content"))
    tool = None
    if function is not None and not is_result:
        tool = {"name": function.get("name", "tool"), "input_schema": function.get("parameters") or {}}
    elif schema is not None:
        tool = {"name": "", "input_schema": schema}
    input_tokens = tokens_of(len(json.dumps(fields.get("messages", fields.get("input")))))
    return Asked(
        dialect=dialect,
        model=fields["model"],
        max_tokens=max_tokens or 1_000_000,
        stream=fields.get("stream") is True,
        prompt=prompt,
        tool=tool,
        thinking=False,
        input_tokens=input_tokens,
        estimated_tokens=input_tokens,
        script=parse_script(prompt),
        fields=fields,
    )


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in _objects(content) if isinstance(part.get("text"), str))


def _written(asked: Asked, output: Output) -> tuple[str, tuple[str, str] | None]:
    """The text of an answer, or the name of the function that it calls and the arguments. Structured output is made
    like the arguments of a function."""
    (block,) = output.blocks
    if block["type"] == "text":
        return block["text"], None
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return (arguments, None) if not block["name"] else ("", (block["name"], arguments))


# ---- chat completions and embeddings ---------------------------------------------------------------------------------


def chat(asked: Asked, output: Output, *, id: str) -> dict[str, Any]:
    """The JSON of a chat completion."""
    text, called = _written(asked, output)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if called is not None:
        function = {"name": called[0], "arguments": called[1]}
        message["content"] = None
        message["tool_calls"] = [{"id": "call_simulated", "type": "function", "function": function}]
    choice = {"message": message, "logprobs": None, "finish_reason": _finish_reason(output, called)}
    choices = [{"index": index, **choice} for index in range(_choices(asked))]
    return {**_chat_head(asked, id, "chat.completion"), "choices": choices, "usage": _chat_usage(asked, output)}


def chat_events(asked: Asked, output: Output, *, id: str, deltas: int) -> list[bytes]:
    """The same as a stream, whose last event is `[DONE]`."""
    head = _chat_head(asked, id, "chat.completion.chunk")
    has_usage = bool((asked.fields.get("stream_options") or {}).get("include_usage"))
    extra: dict[str, Any] = {"usage": None} if has_usage else {}
    found = []

    def add(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> None:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        found.append(_data({**head, "choices": [choice], **extra}))

    text, called = _written(asked, output)
    for index in range(_choices(asked)):
        start: dict[str, Any] = {"role": "assistant", "content": "" if called is None else None, "refusal": None}
        if called is not None:
            function = {"name": called[0], "arguments": ""}
            start["tool_calls"] = [{"index": 0, "id": "call_simulated", "type": "function", "function": function}]
        add(index, start)
        for piece in cut(text if called is None else called[1], deltas):
            add(
                index,
                {"content": piece}
                if called is None
                else {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]},
            )
        add(index, {}, _finish_reason(output, called))
    if has_usage:
        found.append(_data({**head, "choices": [], "usage": _chat_usage(asked, output)}))
    return [*found, b"data: [DONE]\n\n"]


def _choices(asked: Asked) -> int:
    n = asked.fields.get("n")
    return n if type(n) is int and 1 <= n <= 128 else 1


def _chat_head(asked: Asked, id: str, kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {
        "id": f"chatcmpl-{id}",
        "object": kind,
        "created": created,
        "model": asked.model,
        "service_tier": "default",
        "system_fingerprint": None,
    }


def _finish_reason(output: Output, called: object) -> str:
    if output.stop_reason == "max_tokens":
        return "length"
    return "stop" if called is None else "tool_calls"


def _chat_usage(asked: Asked, output: Output) -> dict[str, Any]:
    return {
        "prompt_tokens": asked.input_tokens,
        "completion_tokens": output.tokens * _choices(asked),
        "total_tokens": asked.input_tokens + output.tokens * _choices(asked),
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _chat_error_event(type: str, *, nth: int, request_id: str) -> bytes:
    about = {"message": f"{type} in the middle", "type": "server_error", "param": None, "code": None}
    return _data({"error": about})


def _data(content: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(content).encode()


def embeddings(asked: Asked, output: Output, *, id: str) -> dict[str, Any]:
    """The JSON of the answer to `/v1/embeddings`: a vector by the hash of each input."""
    dimensions = asked.fields.get("dimensions") or DIMENSIONS
    packed = asked.fields.get("encoding_format") == "base64"
    data = []
    for index, given in enumerate(_inputs(asked.fields)):
        vector = embedding(given, dimensions)
        data.append(
            {
                "object": "embedding",
                "index": index,
                "embedding": b64encode(vector.tobytes()).decode() if packed else vector.tolist(),
            }
        )
    usage = {"prompt_tokens": asked.input_tokens, "total_tokens": asked.input_tokens}
    return {"object": "list", "data": data, "model": asked.model, "usage": usage}


def embedding(given: object, dimensions: int) -> "array[float]":
    """The vector of an input: always the same, of length one."""
    raw = [byte - 127.5 for byte in shake_128(str(given).encode()).digest(dimensions)]
    length = math.hypot(*raw)
    return array("f", [each / length for each in raw])


# ---- responses -------------------------------------------------------------------------------------------------------


def response(asked: Asked, output: Output, *, id: str, status: str | None = None) -> dict[str, Any]:
    """The JSON of a response. `status`: of one that has not ended, which has no output."""
    fields, is_cut = asked.fields, output.stop_reason == "max_tokens"
    ended = status is None
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status or ("incomplete" if is_cut else "completed"),
        "background": fields.get("background") is True,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut and ended else None,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": fields.get("metadata") or {},
        "model": asked.model,
        "output": [_item(asked, output, id)] if ended else [],
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": fields.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": fields.get("store", True),
        "temperature": fields.get("temperature", 1.0),
        "text": fields.get("text") or {"format": {"type": "text"}},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools") or [],
        "top_p": fields.get("top_p", 1.0),
        "truncation": fields.get("truncation", "disabled"),
        "usage": None
        if not ended
        else {
            "input_tokens": asked.input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked.input_tokens + output.tokens,
        },
        "user": fields.get("user"),
    }


def _item(asked: Asked, output: Output, id: str) -> dict[str, Any]:
    text, called = _written(asked, output)
    status = "incomplete" if output.stop_reason == "max_tokens" else "completed"
    if called is not None:
        name, arguments = called
        about = {"name": name, "arguments": arguments, "call_id": "call_simulated"}
        return {"type": "function_call", "id": f"fc_{id}", "status": status, **about}
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{id}", "status": status, "role": "assistant", "content": [content]}


def response_events(asked: Asked, output: Output, *, id: str, deltas: int) -> list[bytes]:
    """The same as a stream, of numbered events."""
    found: list[bytes] = []

    def add(kind: str, **fields: Any) -> None:
        content = {"type": f"response.{kind}", "sequence_number": len(found), **fields}
        found.append(b"event: response.%b\ndata: %b\n\n" % (kind.encode(), json.dumps(content).encode()))

    begun = response(asked, output, id=id, status="in_progress")
    add("created", response=begun)
    add("in_progress", response=begun)
    whole = response(asked, output, id=id)
    (item,) = whole["output"]
    at: dict[str, Any] = {"item_id": item["id"], "output_index": 0}
    empty = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        add("output_item.added", output_index=0, item={**empty, "arguments": ""})
        for piece in cut(item["arguments"], deltas):
            add("function_call_arguments.delta", **at, delta=piece)
        add("function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
    else:
        (part,) = item["content"]
        at["content_index"] = 0
        add("output_item.added", output_index=0, item={**empty, "content": []})
        add("content_part.added", **at, part={**part, "text": ""})
        for piece in cut(part["text"], deltas):
            add("output_text.delta", **at, delta=piece, logprobs=[])
        add("output_text.done", **at, text=part["text"], logprobs=[])
        add("content_part.done", **at, part=part)
    add("output_item.done", output_index=0, item=item)
    add(whole["status"], response=whole)
    return found


def _response_error_event(type: str, *, nth: int, request_id: str) -> bytes:
    about = {"code": "server_error", "message": f"{type} in the middle", "param": None}
    content = {"type": "error", "sequence_number": nth, **about}
    return b"event: error\ndata: %b\n\n" % json.dumps(content).encode()


CHAT: Final = AnswerFormat(write=chat, events=chat_events, error_event=_chat_error_event)
RESPONSES: Final = AnswerFormat(write=response, events=response_events, error_event=_response_error_event)
EMBEDDINGS: Final = AnswerFormat(write=embeddings, events=chat_events, error_event=_chat_error_event)
READERS: Final[Mapping[str, Callable[[bytes], Asked]]] = {
    CHAT_PATH: read_chat,
    RESPONSES_PATH: read_response,
    EMBEDDINGS_PATH: read_embeddings,
}
"""By the path that is called."""
