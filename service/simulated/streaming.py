"""Converts the simulated model's answer to a stream of events like Anthropic's: message_start, content blocks in
pieces, ping, message_delta, message_stop."""

import json
from collections.abc import Iterator
from typing import Any

from service.simulated.messages import Answer, Asked, message, usage

PIECES = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def events(asked: Asked, reply: Answer, *, id: str, deltas: int) -> list[bytes]:
    """The Server-Sent Events that stream an answer as Anthropic does, as bytes. Each content block is cut into up to
    `deltas` pieces."""
    begun = {**message(asked, reply, id=id), "content": [], "stop_reason": None, "usage": usage(asked.input_tokens, 1)}
    found = [event("message_start", message=begun)]
    for index, block in enumerate(reply.blocks):
        found.extend(_block(index, block, deltas=deltas))
    found.append(
        event(
            "message_delta",
            delta={"stop_reason": reply.stop_reason, "stop_sequence": None},
            usage={"output_tokens": reply.output_tokens},
        )
    )
    found.append(event("message_stop"))
    return found


def event(type: str, **fields: Any) -> bytes:
    """One Server-Sent Event of Anthropic's stream format, as bytes."""
    return b"event: %b\ndata: %b\n\n" % (type.encode(), json.dumps({"type": type, **fields}).encode())


def _block(index: int, block: dict[str, Any], *, deltas: int) -> Iterator[bytes]:
    empty = dict(block)
    pieces: list[dict[str, Any]]
    if block["type"] == "tool_use":
        empty["input"] = {}
        pieces = [
            {"type": "input_json_delta", "partial_json": part}
            for part in ["", *_cut(json.dumps(block["input"]), deltas)]
        ]
    else:
        delta, field = PIECES[block["type"]]
        empty[field] = ""
        pieces = [{"type": delta, field: part} for part in _cut(block[field], deltas)]
        if "signature" in block:
            empty["signature"] = ""
            pieces.append({"type": "signature_delta", "signature": block["signature"]})
    yield event("content_block_start", index=index, content_block=empty)
    if index == 0:
        yield event("ping")
    for piece in pieces:
        yield event("content_block_delta", index=index, delta=piece)
    yield event("content_block_stop", index=index)


def _cut(text: str, deltas: int) -> list[str]:
    pieces = min(deltas, len(text))
    return [text[n * len(text) // pieces : (n + 1) * len(text) // pieces] for n in range(pieces)]
