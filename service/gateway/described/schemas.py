"""Schemas that OpenAPI and AsyncAPI share: problem documents, the provider's answers, headers of replies."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from lanekeeper.contract import names as n
from lanekeeper.contract.problems import PROBLEMS
from topology.codec.published import Clock

Schema = dict[str, Any]
SECURITY: list[dict[str, list[str]]] = [{"key": []}, {"bearer": []}, {}]
"""The security requirement of the documents: callers need an API key, unless no keys are configured."""
TEXT: Schema = {"type": "string"}
TIME: Schema = {"type": "string", "format": "date-time"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
PATH_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def having(**fields: Schema) -> Schema:
    """The JSON Schema of an object with these fields, which may have further fields."""
    return {"type": "object", "required": list(fields), "properties": fields}


MESSAGE: Schema = {
    **having(type={"const": "message"}, content={"type": "array"}, stop_reason=TEXT),
    "description": "Anthropic's Message, as the provider sent it.",
}
EVENT: Schema = {**having(type=TEXT), "description": "One event of Anthropic's stream."}
REPLY_HEADERS: Mapping[str, Schema] = {
    n.STATUS: {"enum": ["ok", "error"]},
    n.PART: {"enum": ["event", "restart"]},
    n.SEQ: WHOLE,
    n.REQUEST_ID: TEXT,
    n.LANE_NAME: TEXT,
    n.MODEL: TEXT,
    n.PROVIDER: TEXT,
    n.ATTEMPT: WHOLE,
    n.WAIT_MS: WHOLE,
    n.RUN_MS: WHOLE,
    n.WAIT_FROM: {"enum": list(get_args(Clock))},
    n.REPLAYED: {"type": "boolean"},
    n.BODY: TEXT,
    n.BODY_SHA256: TEXT,
    n.CONTROL: {"enum": ["accepted", "pending", "error"]},
}
DEAD_HEADERS: Mapping[str, Schema] = {
    n.DEAD_CODE: {"enum": list(PROBLEMS)},
    n.DEAD_DETAIL: TEXT,
    n.DEAD_AT: TIME,
    n.ATTEMPT: WHOLE,
    n.ROUTING_KEY: TEXT,
    n.ERRORS: {"type": "array", "items": TEXT, "maxItems": 5},
    n.USER_ID: TEXT,
    n.EXPIRATION: TEXT,
}


def problem() -> Schema:
    """The JSON Schema of a problem document (RFC 9457) whose code is in the contract's table of errors."""
    fields: dict[str, Schema] = {
        "type": TEXT,
        "title": TEXT,
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": TEXT,
        "code": {"enum": list(PROBLEMS)},
        "request": TEXT,
        "attempts": WHOLE,
        "retryable": {"type": "boolean"},
    }
    kinds = [
        {
            "properties": {
                "type": {"const": f"urn:lanekeeper:problem:{row.code.replace('_', '-')}"},
                "title": {"const": row.title},
                "code": {"const": row.code},
                "retryable": {"const": row.retryable},
                # a request that the provider has rejected has the status that the provider answered
                **({} if row.code == "provider_rejected" else {"status": {"const": row.status}}),
            }
        }
        for row in PROBLEMS.values()
    ]
    return {**record(fields), "oneOf": kinds}


def record(fields: Mapping[str, Schema], *, optional: Iterable[str] = ()) -> Schema:
    """The JSON Schema of an object with these fields and no others; all are required, except those in `optional`."""
    required = [name for name in fields if name not in set(optional)]
    return {"type": "object", "properties": dict(fields), "required": required, "additionalProperties": False}


def headers(fields: Mapping[str, Schema], *, required: Iterable[str] = (), prefix: str = "x-lane-") -> Schema:
    """The JSON Schema of a message's headers. Of the headers that begin with `prefix`, only those in `fields` are
    allowed; headers that do not begin with it are all allowed."""
    allowed: Schema = {"anyOf": [{"enum": sorted(fields)}, {"not": {"pattern": f"^{prefix}"}}]}
    return {"type": "object", "properties": dict(fields), "required": list(required), "propertyNames": allowed}


def ref(name: str) -> Schema:
    """A reference to the schema `name` in the document's `components`."""
    return {"$ref": f"#/components/schemas/{name}"}


def operation(
    id: str, summary: str, responses: Mapping[str, Any], *, parameters: Sequence[Any] = (), body: Schema | None = None
) -> dict[str, Any]:
    """An OpenAPI operation that needs an API key. `body`: the schema of the call's JSON body."""
    found = {"operationId": id, "summary": summary, "security": SECURITY, "responses": responses}
    found |= {"parameters": parameters} if parameters else {}
    return found if body is None else {**found, "requestBody": {"required": True, **content(body)}}


def content(schema: Schema) -> dict[str, Any]:
    """The value of OpenAPI's field `content` for a JSON body with this schema."""
    return {"content": {"application/json": {"schema": schema}}}
