"""A handler that waits: asks a model server on this machine for the embedding of a text. It runs in the worker's event
loop, so it is an `async def`, and awaits what takes time.

    [handlers.embed]
    run = "documents.vectors:embed"

`model` stands in for the server (such as one of text-embeddings-inference): a real handler would keep one HTTP client,
and await `client.post(…)` there. An exception is a failed attempt, and is tried again; `Rejected` is not.
"""

import asyncio
import hashlib
from typing import Any

from lanekeeper import Rejected

DIMENSIONS = 16


async def embed(asked: Any) -> dict[str, Any]:
    """The input is `{"text": "…"}`."""
    if not isinstance(asked, dict) or not isinstance(text := asked.get("text"), str):
        raise Rejected('the input is {"text": "…"}')
    return {"embedding": await model(text), "model": "stand-in"}


async def model(text: str) -> list[float]:
    """Counts words instead of understanding them: texts with the same words are near each other."""
    await asyncio.sleep(0.01)
    vector = [0.0] * DIMENSIONS
    for word in text.lower().split():
        vector[hashlib.blake2b(word.encode()).digest()[0] % DIMENSIONS] += 1.0
    length = sum(value * value for value in vector) ** 0.5 or 1.0
    return [round(value / length, 4) for value in vector]
