"""The store, in a SQLite file or in Redis. Its interface is in `store.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from consumers.state.redis_url import is_redis

if TYPE_CHECKING:
    from consumers.state.base import StoreSpec
    from consumers.state.store import Store

SQLITE = "sqlite:///"


def open_store(url: str, *, namespace: str, spec: "StoreSpec") -> "Store":
    """Returns the store at this URL; the caller opens it with `async with`. The settings have checked the URL before,
    so a ValueError is a bug.

    sqlite:///state/lane.sqlite            relative to the working folder
    sqlite:////var/lib/lane.sqlite         absolute
    redis://:password@host:6379/0          see redis_url.py
    """
    if url.startswith(SQLITE):
        from consumers.state.sqlite.store import SqliteStore

        return SqliteStore(Path(unquote(url.removeprefix(SQLITE))), namespace=namespace, spec=spec)
    if is_redis(url):
        from consumers.state.redis.store import RedisStore  # its client library takes 4 MiB of memory

        return RedisStore(url, namespace=namespace, spec=spec)
    raise ValueError("a store's URL is that of a SQLite file or of a Redis")


async def redis_risks(url: str, *, tls: Mapping[str, str]) -> list[str]:
    """Returns the reasons why the Redis at `url`, with its settings, could lose acknowledged writes. The list is empty
    if there are none, or if the settings cannot be read."""
    from consumers.state.redis.client import RedisClient

    client = RedisClient(url, tls=tls)
    try:
        return await client.risks()
    finally:
        await client.aclose()
