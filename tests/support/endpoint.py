"""An endpoint of webhooks: keeps what is posted to it, and answers as the test says.

async with endpoint() as hook:
    …                       x-lane-webhook: hook.url("/path"); settings `webhooks=hook.settings()`
    await until(lambda: hook.posts)
"""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from aiohttp import web
from pydantic import SecretStr
from standardwebhooks import Webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="
OTHER_SECRET = "whsec_AAAQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="


def secret_of(tenant: str) -> str:
    """The secret of the tests' tenants, for `Endpoint.environment`."""
    return f"whsec_{b64encode(sha256(tenant.encode()).digest()).decode()}" if tenant else SECRET


@dataclass(frozen=True)
class Posted:
    path: str
    headers: dict[str, str]
    body: bytes
    at_s: float

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def verify(self, secret: str = SECRET) -> None:
        """Raises WebhookVerificationError."""
        Webhook(secret).verify(self.body, self.headers)


@dataclass
class Endpoint:
    port: int = 0
    posts: list[Posted] = field(default_factory=list)
    answer: Callable[[Posted], web.Response | float] = lambda posted: web.Response(status=204)
    """What it answers; a number: only after so many seconds."""

    def url(self, path: str = "/hook", *, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def settings(self, **more: Any) -> dict[str, Any]:
        """Settings of a worker that posts here, and tries again quickly."""
        found = {
            "allow_hosts": [f"*:{self.port}"],
            "secrets": [SecretStr(SECRET)],
            "allow_private": True,
            "allow_http": True,
            "first_pause_s": 0.1,
        }
        return {**found, **more}

    def environment(self, *others: "Endpoint", tenants: Iterable[str] = ()) -> dict[str, str]:
        """The same for processes, which may also post to `others`, and for `tenants`."""
        hosts, name = ",".join(f"*:{each.port}" for each in (self, *others)), "LANEKEEPER_WEBHOOKS__TENANTS"
        return {
            **{f"{name}__{each.upper()}__ALLOW_HOSTS": hosts for each in tenants},
            **{f"{name}__{each.upper()}__SECRETS": secret_of(each) for each in tenants},
            "LANEKEEPER_WEBHOOKS__ALLOW_HOSTS": hosts,
            "LANEKEEPER_WEBHOOKS__SECRETS": SECRET,
            "LANEKEEPER_WEBHOOKS__ALLOW_PRIVATE": "true",
            "LANEKEEPER_WEBHOOKS__ALLOW_HTTP": "true",
            "LANEKEEPER_WEBHOOKS__FIRST_PAUSE_S": "0.1",
        }

    def of(self, id: str) -> list[Posted]:
        return [each for each in self.posts if each.id == id]

    async def _post(self, request: web.Request) -> web.Response:
        at_s = asyncio.get_running_loop().time()
        posted = Posted(request.path_qs, dict(request.headers), await request.read(), at_s)
        posted = Posted(posted.path, {name.lower(): value for name, value in posted.headers.items()}, posted.body, at_s)
        self.posts.append(posted)
        answer = self.answer(posted)
        if isinstance(answer, float | int):
            await asyncio.sleep(answer)
            return web.Response(status=204)
        return answer


@asynccontextmanager
async def endpoint() -> AsyncIterator[Endpoint]:
    """One on a free port of this machine."""
    found = Endpoint()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", found._post)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield found
    finally:
        await runner.cleanup()
