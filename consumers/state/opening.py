"""Opens the store that a URL names.

sqlite:///state/lane.sqlite            relative to the working folder
sqlite:////var/lib/lane.sqlite         absolute
redis://:password@host:6379/0          rediss:// with TLS

The client library of Redis is imported only if the URL needs it, because it takes 4 MiB of memory.
"""

from pathlib import Path
from urllib.parse import unquote

from consumers.state.following import FollowedStore
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.store import SqliteStore

SQLITE = "sqlite:///"


def open_store(url: str, *, namespace: str, spec: StoreSpec) -> FollowedStore:
    """Returns the store at this URL; the caller opens it with `async with`. The settings have checked the URL before,
    so a ValueError is a bug."""
    if url.startswith(SQLITE):
        return SqliteStore(Path(unquote(url.removeprefix(SQLITE))), namespace=namespace, spec=spec)
    if url.startswith(("redis://", "rediss://")):
        from consumers.state.redis.store import RedisStore

        return RedisStore(url, namespace=namespace, spec=spec)
    raise ValueError("a store's URL begins with sqlite:///, redis:// or rediss://")


async def redis_risks(url: str) -> list[str]:
    """Returns the reasons why the Redis at `url`, with its settings, could lose acknowledged writes. The list is empty
    if there are none, or if the settings cannot be read."""
    from consumers.state.redis.client import RedisClient

    client = RedisClient(url)
    try:
        return await client.risks()
    finally:
        await client.aclose()
