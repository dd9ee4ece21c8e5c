"""Describes the gateway's HTTP interface as an OpenAPI 3.1 document."""

from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import version
from typing import Any

from lanekeeper.contract import names as n
from lanekeeper.contract.identity import ID_PATTERN
from lanekeeper.contract.problems import PROBLEMS
from service.gateway.call_reader import IDEMPOTENCY_KEY, REFUSED_HEADERS
from service.gateway.described import requests
from service.gateway.described.schemas import (
    MESSAGE,
    PATH_ID,
    REPLY_HEADERS,
    TEXT,
    WHOLE,
    Schema,
    content,
    having,
    operation,
    record,
    ref,
)  # fmt: skip
from service.gateway.lookups import COUNT_TOKENS, MODEL, MODELS
from service.gateway.messages import REPLY_HEADERS_SENT
from service.gateway.models_page import PAGE_AT_MOST
from service.gateway.problems import TYPES
from topology.codec import schemas as codec

MESSAGES = "/v1/messages"
OF_THE_GATEWAY = frozenset({408, 500, 502, 503})
"""The HTTP statuses with which the gateway answers, besides the statuses of Anthropic's error types."""
_LOOKUPS = (TYPES.keys() | OF_THE_GATEWAY | {501}) - {405}
_MESSAGES = (TYPES.keys() | OF_THE_GATEWAY | {410, *(problem.status for problem in PROBLEMS.values())}) - {405}
_HEALTH: dict[str, Schema] = {"alive": {"type": "boolean"}}
_READY: dict[str, Schema] = {"ready": {"type": "boolean"}, "reasons": {"type": "object", "additionalProperties": TEXT}}


def openapi(*, lanes: Collection[str]) -> dict[str, Any]:
    """The OpenAPI document of the gateway's HTTP server. `lanes`: the lanes that calls may name."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Lanekeeper",
            "version": version("lanekeeper"),
            "description": "Anthropic's Messages API through lanes of different urgency.",
        },
        "paths": {
            MESSAGES: {"post": _messages(_lane_headers(sorted(lanes)))},
            **requests.paths(parameters=_lane_headers(sorted(lanes))),
            COUNT_TOKENS: {"post": _count_tokens()},
            MODELS: {"get": _models()},
            MODEL: {"get": _model()},
            "/healthz": {"get": _open("alive", "Whether the process is alive.", {200: record(_HEALTH)})},
            "/readyz": {
                "get": _open("ready", "Whether the process accepts work.", dict.fromkeys((200, 503), record(_READY)))
            },
            "/openapi.json": {"get": _open("openapi", "This document.", {200: {"type": "object"}})},
            "/asyncapi.json": {"get": _open("asyncapi", "The contract over AMQP.", {200: {"type": "object"}})},
        },
        "components": {
            "schemas": {
                "Error": _error(),
                "Message": MESSAGE,
                "Request": _request(),
                "Problem": requests.problem(),
                "Status": requests.status(),
            },
            "securitySchemes": {
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _lane_headers(lanes: list[str]) -> list[dict[str, Any]]:
    """The OpenAPI parameters that describe the headers of a call whose body is published to a lane as a request."""
    asked = {name: schema for name, schema in codec.headers().items() if name not in REFUSED_HEADERS}
    return [
        _header(n.LANE_NAME, {"enum": lanes}),
        _header(IDEMPOTENCY_KEY, {"type": "string", "pattern": f"^{ID_PATTERN}$"}),
        *(_header(name, schema) for name, schema in sorted(asked.items())),
        *(_header(name, TEXT) for name in sorted(n.TRACE_CONTEXT)),
    ]


def _messages(parameters: list[dict[str, Any]]) -> dict[str, Any]:
    answer = {
        **_answer("The answer.", ref("Message")),
        "headers": {**_REQUEST_ID, **{name: {"schema": REPLY_HEADERS[name]} for name in REPLY_HEADERS_SENT}},
    }
    answer["content"]["text/event-stream"] = {"schema": TEXT}
    summary = "Anthropic's call, through a lane; the answer is streamed if the body asks for it."
    responses = {"200": answer, **_errors(_MESSAGES)}
    return operation("createMessage", summary, responses, parameters=parameters, body=ref("Request"))


def _count_tokens() -> dict[str, Any]:
    return operation(
        "countTokens",
        "Anthropic's call, passed on to the provider.",
        {"200": _answer("The number of tokens.", having(input_tokens=WHOLE)), **_errors(_LOOKUPS)},
        parameters=[_header(n.ANTHROPIC_BETA, codec.headers()[n.ANTHROPIC_BETA])],
        body={**having(model=TEXT), "required": ["model", "messages"]},
    )


def _models() -> dict[str, Any]:
    limit = {"type": "integer", "minimum": 1, "maximum": PAGE_AT_MOST}
    page = {
        **having(data={"type": "array", "items": _ONE_MODEL}, has_more={"type": "boolean"}),
        "required": ["data", "has_more", "first_id", "last_id"],
    }
    return operation(
        "listModels",
        "The provider's models that the key allows.",
        {"200": _answer("A page of models.", page), **_errors(_LOOKUPS)},
        parameters=[_query("limit", limit), _query("after_id", TEXT), _query("before_id", TEXT)],
    )


def _model() -> dict[str, Any]:
    responses = {"200": _answer("The model.", _ONE_MODEL), **_errors(_LOOKUPS)}
    return operation("getModel", "One model.", responses, parameters=[PATH_ID])


def _open(id: str, summary: str, answers: Mapping[int, Schema]) -> dict[str, Any]:
    """The OpenAPI operation of a path that needs no API key. `answers`: the schema of the answer for each status."""
    responses = {str(status): {"description": summary, **content(schema)} for status, schema in answers.items()}
    return {**operation(id, summary, responses), "security": []}


def _request() -> Schema:
    return {"oneOf": [codec.messages_body(), codec.prompt_body()]}


def _error() -> Schema:
    fields = having(type={"const": "error"}, error=having(type=TEXT, message=TEXT), request_id=TEXT)
    return {**fields, "required": ["type", "error"], "description": "An error as Anthropic's API answers it."}


def _errors(statuses: Iterable[int]) -> dict[str, Any]:
    again = {"retry-after": {"schema": TEXT}, "x-should-retry": {"schema": {"const": "false"}}}
    code = {n.CODE: {"schema": {"enum": list(PROBLEMS)}}}
    return {
        str(status): {
            "description": TYPES.get(status, "api_error"),
            "headers": {**_REQUEST_ID, **again, **code},
            **content(ref("Error")),
        }
        for status in sorted(statuses)
    }


def _answer(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "headers": _REQUEST_ID, **content(schema)}


def _header(name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema}


def _query(name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


_ONE_MODEL: Schema = having(id=TEXT, type=TEXT)
_REQUEST_ID = {"request-id": {"required": True, "schema": TEXT}}
