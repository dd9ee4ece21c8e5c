"""What the codec accepts, as JSON Schema: made of the models and bounds that it checks requests by.

What a schema cannot say (one key twice, how deep, how many values) the codec alone refuses.
"""

from typing import Any

from lanekeeper.contract import names as n
from topology.codec.body import MessagesBody, PromptBody, Turn
from topology.codec.headers import ADDRESS, ADDRESS_LENGTH, BETA, BETA_LENGTH, BOUNDS_MS, DIGITS, SHA256, TIME_LENGTH

Schema = dict[str, Any]
BOOLS = (n.STREAM, n.NO_BATCH)


def messages_body() -> Schema:
    """Anthropic's own body; fields that are not named go to the provider as they are."""
    found = MessagesBody.model_json_schema()
    found["properties"]["messages"]["items"] = Turn.model_json_schema()
    return {**found, "not": {"required": ["prompt"]}}


def prompt_body() -> Schema:
    """The short form."""
    return PromptBody.model_json_schema()


def headers() -> dict[str, Schema]:
    """Each header that a requester may set, as its value is meant: an integer, true or false, a text."""
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
    """The same over AMQP, where numbers and booleans may also come as text: some clients can write nothing else."""
    return {name: _or_text(schema) for name, schema in headers().items()}


def _or_text(schema: Schema) -> Schema:
    match schema["type"]:
        case "integer":
            return {"anyOf": [schema, {"type": "string", "pattern": f"^{DIGITS.pattern}$"}]}
        case "boolean":
            return {"enum": [True, False, "true", "false"]}
        case _:
            return schema
