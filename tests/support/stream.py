"""Anthropic's stream as a client reads it (their documentation), nothing of ours."""

import json
from typing import Any


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The Message that these events make."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "citations_delta":
                        block["citations"].append(delta["citation"])
                    case "input_json_delta":
                        arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop":
                if event["index"] in arguments:
                    message["content"][event["index"]]["input"] = json.loads(arguments[event["index"]])
            case "message_delta":
                message.update(event["delta"])
                message["usage"].update(event["usage"])
    return message
