"""A gateway in the test's own process: before the lanes of a worker (`gate`), or without a broker (`Alone`); and an
application's calls of it.

async with serving(vhost) as worker, gate(worker) as url:
    …                               an HTTP client, or the vendor's own with `base_url=url`
async with Alone(keys=KEYS) as made:
    …                               the same with `made.url`"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import aiohttp
from pydantic import SecretStr

from consumers.replies import Replies
from consumers.state import open_store
from consumers.state.store import Store
from lanekeeper import Client
from service.config.settings import GatewaySettings, Settings
from service.gateway.app import Gateway, client_for
from service.gateway.server import Server

SETTINGS = Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"))


def opened(settings: Settings) -> Store:
    """The store of its workers, opened as another process does it."""
    return open_store(settings.store, namespace=settings.namespace, spec=settings.store_spec())


class HasSettings(Protocol):
    settings: Settings


@asynccontextmanager
async def gate(
    worker: Settings | HasSettings, *, port: int = 0, replies: Replies | None = None, **spec: Any
) -> AsyncIterator[str]:
    """Its URL. `port`: 0 is any free one; `replies`: of a worker that gives it the parts of streams without the broker,
    as in `serve`; `spec`: settings of the gateway."""
    settings = worker if isinstance(worker, Settings) else worker.settings
    made = settings.model_copy(update={"gateway": GatewaySettings(port=port, **spec)})
    async with client_for(made) as client, opened(made) as store:
        routes = Gateway(made, client, store)
        if replies is not None and client.amqp is not None:
            replies.here = client.amqp.direct
        async with Server(routes.reasons, host=made.gateway.host, port=port, paths=routes) as server:
            yield server.url


class Alone:
    """A gateway whose client is not connected, or the one that `client` makes. `folder`: of its store, if it needs one;
    `provider`: where it looks up models; `settings`: other sections than the gateway's."""

    def __init__(
        self,
        *,
        client: Callable[[Settings], Client] = client_for,
        folder: Path | None = None,
        provider: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> None:
        made = SETTINGS.model_copy(update={"gateway": GatewaySettings(port=0, **spec), **(settings or {})})
        if folder is not None:
            made = made.model_copy(update={"store_url": SecretStr(f"sqlite:///{folder}/store.sqlite")})
        if provider is not None:
            first = {"anthropic_base_url": SecretStr(provider), "anthropic_api_key": SecretStr("sk-secret")}
            made = made.model_copy(update=first)
        self.store = opened(made)
        self._open = AsyncExitStack()
        self._has_folder = folder is not None
        self.routes = Gateway(made, client(made), self.store)
        self.server = Server(self.routes.reasons, host=made.gateway.host, port=0, paths=self.routes)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def __aenter__(self) -> Self:
        if self._has_folder:
            await self._open.enter_async_context(self.store)
        await self._open.enter_async_context(self.server)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def post(self, body: Any, path: str = "/v1/messages", **headers: str) -> tuple[int, dict[str, Any]]:
        """The status and the error of a call that is refused."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=body, headers=named) as got,
        ):
            found = await got.json()
            assert found["type"] == "error"
            assert got.headers["request-id"] == found["request_id"]
            return got.status, found["error"]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Any
    body: Any

    def __getitem__(self, field: str) -> Any:
        return self.body[field]


async def call(method: str, url: str, body: Any = None, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    given: dict[str, Any] = {"data" if isinstance(body, bytes) else "json": body}
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=named, **given) as got:
        return Answer(got.status, got.headers, await got.json())


async def submit(url: str, prompt: str = "hello", *, stream: bool = False, **headers: str) -> Answer:
    body = {"model": "claude-sonnet-5-5", "max_tokens": 50, "messages": [{"role": "user", "content": prompt}]}
    return await call("POST", f"{url}/v1/requests", {**body, "stream": True} if stream else body, **headers)


@dataclass(frozen=True)
class SentEvent:
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
