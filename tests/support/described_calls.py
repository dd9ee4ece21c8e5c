"""Compares answers over HTTP with `/openapi.json`, and calls a gateway so that it refuses.

api = Described(document)
await api.call(session, url, "get", "/v1/requests/{id}", 404, id="nobody")
api.unseen                           what is documented and was not answered yet
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator
from pydantic import SecretStr

from service.config.copies import with_provider
from service.config.gateway_section import GatewaySettings
from service.config.settings import Settings
from service.gateway import bodies
from service.gateway.access import Access, hash_of
from service.gateway.app import Gateway, client_for
from service.gateway.server import Server
from tests.support.gate import opened

KEY = "lane-key"
KEYS = {hash_of(KEY): {"tenant": "crm", "lanes": ["normal"]}}
SAID = {"model": "claude-sonnet-5-5", "messages": [{"role": "user", "content": "hello"}]}
DOCUMENTS = frozenset({"/openapi.json", "/asyncapi.json"})
"""The same for everybody, so they may be cached."""
LOOKUPS = frozenset({"/v1/messages/count_tokens", "/v1/models", "/v1/models/{id}"})
Status = tuple[str, str, int]
"""Method, path and status."""


@dataclass
class Described:
    """The document, and what of it was answered."""

    document: dict[str, Any]
    seen: set[Status] = field(default_factory=set)

    @property
    def unseen(self) -> set[Status]:
        return {
            (method, path, int(status)) for method, path, found in self.operations() for status in found["responses"]
        } - self.seen

    def operations(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        for path, methods in self.document["paths"].items():
            for method, found in methods.items():
                yield method, path, found

    async def call(
        self,
        session: aiohttp.ClientSession,
        url: str,
        method: str,
        path: str,
        status: int,
        *,
        id: str = "r-1",
        **how: Any,
    ) -> str:
        """Call it, and compare. Returns the body. Raises AssertionError, ValidationError."""
        if method == "post" and "data" not in how:
            how.setdefault("json", SAID)
        async with session.request(method, url + path.replace("{id}", id), **how) as got:
            text = await got.text()
            assert got.status == status, (method, path, text)
            self._compare(method, path, got, text)
        return text

    def _compare(self, method: str, path: str, got: aiohttp.ClientResponse, text: str) -> None:
        described = self.document["paths"][path][method]["responses"][str(got.status)]
        assert got.headers.get("cache-control") == "no-store" or path in DOCUMENTS, (method, path)
        for name, header in described.get("headers", {}).items():
            assert name in got.headers or not header.get("required"), (method, path, name)
        if (content := described.get("content")) is not None:
            schema = {**content[got.content_type]["schema"], "components": self.document["components"]}
            Draft202012Validator(schema).validate(json.loads(text) if got.content_type.endswith("json") else text)
        self.seen.add((method, path, got.status))


@asynccontextmanager
async def without_a_broker(*, provider: str | None = None, **spec: Any) -> AsyncIterator[str]:
    """A gateway whose client is not connected."""
    settings = Settings(amqp_url=SecretStr("amqp://a:b@127.0.0.1:1/"))
    settings = settings.model_copy(update={"gateway": GatewaySettings(port=0, **spec)})
    if provider is not None:
        settings = with_provider(settings, provider, key="sk-secret")
    routes = Gateway(settings, client_for(settings), opened(settings))
    async with Server(routes.reasons, host=settings.gateway.host, port=0, routes=routes) as server:
        yield f"http://127.0.0.1:{server.port}"


async def refused_without_a_broker(api: Described) -> None:
    """Every refusal that needs neither a lane nor a store, on every path that has it."""
    closed = [(method, path) for method, path, found in api.operations() if found["security"]]
    through_lanes = [(method, path) for method, path in closed if path not in LOOKUPS]
    async with aiohttp.ClientSession(headers={"x-api-key": KEY}) as with_key, aiohttp.ClientSession() as session:
        async with without_a_broker(keys=KEYS) as url:
            await api.call(session, url, "get", "/readyz", 503)
            for method, path in closed:
                await api.call(session, url, method, path, 401)
            async with asyncio.TaskGroup() as group:  # each waits for the broker
                for method, path in through_lanes:
                    group.create_task(api.call(with_key, url, method, path, 503))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Access, "caller", _fails)
                for method, path in closed:
                    await api.call(session, url, method, path, 500)
        async with without_a_broker(host="0.0.0.0") as url:
            for method, path in closed:
                await api.call(session, url, method, path, 403)
        async with without_a_broker() as url:
            for path in ("/v1/messages", "/v1/requests"):
                large = bytes(33 * 1024 * 1024)
                await api.call(session, url, "post", path, 413, data=large, expect100=True)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(bodies, "BODY_WITHIN_S", 0.2)
                    await api.call(session, url, "post", path, 408, data=_stalling(), headers={"content-length": "9"})
            for method, path in closed:
                if path in LOOKUPS:
                    await api.call(session, url, method, path, 501)


async def refused_by_the_provider(api: Described) -> None:
    """Each status of a call that goes to the provider, as the provider says it."""
    status = 0

    async def answer(request: web.Request) -> web.Response:
        error = {"type": "error", "error": {"type": "some_error", "message": "no"}, "request_id": "r"}
        return web.json_response(error, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        provider = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with without_a_broker(provider=provider) as url, aiohttp.ClientSession() as session:
            for method, path, status in sorted(each for each in api.unseen if each[1] in LOOKUPS and each[2] >= 400):
                await api.call(session, url, method, path, status)
    finally:
        await runner.cleanup()


def _fails(self: Access, request: web.BaseRequest) -> None:
    raise ZeroDivisionError


async def _stalling() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(60)
