"""JSON Schemas of the requests that the codec accepts, made from the models and limits that the codec checks.

A schema cannot express duplicate keys, the depth of nesting, or the number of values; only the codec checks these.
"""

from typing import Any

from lanekeeper.contract import names as n
from topology.codec.body import MessagesBody, PromptBody, Turn
from topology.codec.headers import ADDRESS, ADDRESS_LENGTH, BETA, BETA_LENGTH, BOUNDS_MS, DIGITS, SHA256, TIME_LENGTH

Schema = dict[str, Any]
BOOLS = (n.STREAM, n.NO_BATCH)


def messages_body() -> Schema:
    """The JSON Schema of a request's body in the format of Anthropic's Messages API. Other fields are allowed, and go
    to the provider unchanged."""
    found = MessagesBody.model_json_schema()
    found["properties"]["messages"]["items"] = Turn.model_json_schema()
    return {**found, "not": {"required": ["prompt"]}}


def prompt_body() -> Schema:
    """The JSON Schema of a request's body in the short form, which has one `prompt` in place of `messages`."""
    return PromptBody.model_json_schema()


def headers() -> dict[str, Schema]:
    """The JSON Schema of each header that a requester may set; integers and booleans must not be given as text."""
    found: dict[str, Schema] = {
        name: {"type": "integer", "minimum": low, "maximum": high} for name, (low, high) in BOUNDS_MS.items()
    }
    found |= {name: {"type": "boolean"} for name in BOOLS}
    found[n.AT] = {"type": "string", "format": "date-time", "maxLength": TIME_LENGTH}
    found[n.TENANT] = {"type": "string"}
    found[n.BODY] = {"type": "string", "maxLength": ADDRESS_LENGTH, "pattern": f"^{ADDRESS.pattern}$"}
    found[n.BODY_SHA256] = {"type": "string", "pattern": f"^{SHA256.pattern}$"}
    found[n.ANTHROPIC_BETA] = {"type": "string", "maxLength": BETA_LENGTH, "pattern": f"^{BETA.pattern}$"}
    return found


def amqp_headers() -> dict[str, Schema]:
    """The JSON Schema of each header that a requester may set over AMQP. Integers and booleans may be given as text,
    because some clients can only send text."""
    return {name: _or_text(schema) for name, schema in headers().items()}


def _or_text(schema: Schema) -> Schema:
    match schema["type"]:
        case "integer":
            return {"anyOf": [schema, {"type": "string", "pattern": f"^{DIGITS.pattern}$"}]}
        case "boolean":
            return {"enum": [True, False, "true", "false"]}
        case _:
            return schema
