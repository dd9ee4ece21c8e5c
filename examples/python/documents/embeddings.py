"""A handler that takes many at once: the embeddings of texts, from an endpoint in the style of OpenAI's or Voyage's.

    [handlers.embeddings]
    run = "documents.embeddings:embed"
    many = true

The endpoint is set in the worker's environment:

    EMBEDDINGS_URL=https://api.voyageai.com/v1/embeddings EMBEDDINGS_MODEL=voyage-3.5 EMBEDDINGS_KEY=…

Each request is `{"text": "…"}`. What several requests ask at the same time is one call of the endpoint.
"""

import os
from typing import Any

import aiohttp

from lanekeeper import Rejected


async def embed(asked: list[Any]) -> list[Any]:
    """For each input an embedding, or the exception with which that request ends."""
    texts = [one["text"] if isinstance(one, dict) and isinstance(one.get("text"), str) else None for one in asked]
    found = iter(await embeddings([text for text in texts if text is not None]))
    wrong = Rejected('the input is {"text": "…"}')
    return [wrong if text is None else {"embedding": next(found)} for text in texts]


async def embeddings(texts: list[str]) -> list[list[float]]:
    """An exception fails the whole call; each request is then tried by itself."""
    if not texts:
        return []
    headers = {"Authorization": f"Bearer {os.environ['EMBEDDINGS_KEY']}"}
    body = {"model": os.environ["EMBEDDINGS_MODEL"], "input": texts}
    async with (
        aiohttp.ClientSession() as session,
        session.post(os.environ["EMBEDDINGS_URL"], json=body, headers=headers) as answer,
    ):
        if answer.status in (400, 413, 422):
            raise Rejected(f"the endpoint answered {answer.status}")
        answer.raise_for_status()
        data = (await answer.json())["data"]
    return [one["embedding"] for one in sorted(data, key=lambda one: one["index"])]
