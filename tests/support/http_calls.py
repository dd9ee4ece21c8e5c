"""Calls of `/v1/requests` as an application makes them."""

from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Any
    body: Any

    def __getitem__(self, field: str) -> Any:
        return self.body[field]


async def call(method: str, url: str, json: Any = None, **headers: str) -> Answer:
    """One call; `headers` with `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.request(method, url, json=json, headers=named) as got:
        return Answer(got.status, got.headers, await got.json())


async def submit(url: str, prompt: str = "hello", *, stream: bool = False, **headers: str) -> Answer:
    """Submit a request for `prompt`."""
    body = {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": prompt}]}
    return await call("POST", f"{url}/v1/requests", {**body, "stream": True} if stream else body, **headers)
