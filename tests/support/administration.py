"""What an administrator does to a broker by hand, for tests: calls of the management API beyond those that we use."""

import json
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from topology.broker.management import Management


async def call(management: Management, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Call `/api/<path>` with the credentials of `management`; the answer's JSON, or None. Raises on any error."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method,
            URL(f"{management.url.rstrip('/')}/api/{path}", encoded=True),
            json=body,
            headers={"authorization": aiohttp.encode_basic_auth(management.user, management.password)},
            raise_for_status=True,
        ) as answer,
    ):
        text = await answer.read()
        return json.loads(text) if text else None


async def delete_user(management: Management, name: str) -> None:
    await call(management, "DELETE", f"users/{quote(name, safe='')}")


async def set_policy(management: Management, name: str, pattern: str, definition: dict[str, Any]) -> None:
    """A policy for queues of the virtual host whose name matches."""
    await call(
        management,
        "PUT",
        f"policies/{quote(management.vhost, safe='')}/{name}",
        {"pattern": pattern, "definition": definition, "apply-to": "queues"},
    )
