"""A handler that computes: cuts a text into parts of whole paragraphs. It runs in a process of its own, one of as many
as the machine has cores, so that it delays no other request.

    [handlers.chunk]
    run = "documents.parts:chunk"
    kind = "cpu"
"""

from typing import Any

from lanekeeper import Rejected

CHARACTERS = 2000


def chunk(document: Any) -> list[str]:
    """The input is `{"text": "…"}`, perhaps with the most `characters` of a part."""
    if not isinstance(document, dict) or not isinstance(text := document.get("text"), str):
        raise Rejected('the input is no document: {"text": "…"}')
    most = int(document.get("characters", CHARACTERS))
    parts: list[str] = []
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        if parts and len(parts[-1]) + len(paragraph) + 2 <= most:
            parts[-1] += "\n\n" + paragraph
        else:
            parts += [paragraph[begin : begin + most] for begin in range(0, len(paragraph), most)]
    return parts
