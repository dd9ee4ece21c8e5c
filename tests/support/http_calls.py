"""Calls of `/v1/requests` as an application makes them."""

import json
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


async def call(method: str, url: str, body: Any = None, **headers: str) -> Answer:
    """One call; `headers` with `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    given: dict[str, Any] = {"data" if isinstance(body, bytes) else "json": body}
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=named, **given) as got:
        return Answer(got.status, got.headers, await got.json())


async def submit(url: str, prompt: str = "hello", *, stream: bool = False, **headers: str) -> Answer:
    """Submit a request for `prompt`."""
    body = {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": prompt}]}
    return await call("POST", f"{url}/v1/requests", {**body, "stream": True} if stream else body, **headers)


@dataclass(frozen=True)
class SentEvent:
    """One Server-Sent Event."""

    id: int
    kind: str
    data: Any


class Reader:
    """Reads a request's events, and keeps the number of the last one."""

    def __init__(self) -> None:
        self.found: list[SentEvent] = []
        self.comments = 0
        self.status = 0

    @property
    def kinds(self) -> list[str]:
        return [each.kind for each in self.found]

    @property
    def text(self) -> str:
        """The text of the answer so far."""
        said = [each.data["delta"].get("text", "") for each in self.found if "delta" in each.data]
        return "".join(said)

    async def read(self, url: str, **headers: str) -> None:
        """Read to the end of the connection, from the last event on."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.found:
            named["Last-Event-ID"] = str(self.found[-1].id)
        async with aiohttp.ClientSession() as session, session.get(url, headers=named) as got:
            self.status = got.status
            fields: dict[str, str] = {}
            async for raw in got.content:
                line = raw.decode().rstrip("\n")
                if not line and "data" in fields:
                    self.found.append(SentEvent(int(fields["id"]), fields["event"], json.loads(fields["data"])))
                    fields = {}
                name, _, value = line.partition(": ")
                if name:
                    fields[name] = value
                self.comments += line.startswith(":")
