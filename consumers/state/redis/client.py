"""Calls Redis over a bounded pool of connections, with a time limit for each call, and explains its errors."""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from consumers.state.base import StoreUnavailable
from consumers.state.redis.script import Script

CONNECT_S = 3.0
"""The time limit, in seconds, for connecting to Redis."""
CALL_S = 3.0
"""The time limit, in seconds, for one call of Redis. The wait for a free connection before the call has the same
limit."""
CONNECTIONS = 32
"""The maximum number of connections of one process to Redis."""
SHOWN = 200
"""The maximum number of characters of Redis's error text that our own error text quotes."""
Argument = str | bytes | int | float


class RedisClient:
    """Runs Lua scripts on one Redis. It connects at the first call, and again after an error. `trouble` says why the
    last call failed; None if it succeeded."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
        """The URL without user and password, for logs and error texts."""
        self.trouble: str | None = None
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=CALL_S,  # waiting for a free connection
            socket_connect_timeout=CONNECT_S,
            socket_timeout=CALL_S,
            retry=Retry(NoBackoff(), 0),  # no retries here: the caller decides whether to try again
            protocol=2,  # with `driver_info=None` no greeting is sent, which saves a round trip for each connection
            driver_info=None,
        )
        self._redis: Redis = Redis.from_pool(pool)

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        """Run a Lua script in Redis within the time limit, and return its result. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(CONNECT_S + CALL_S):
                try:
                    value = await self._redis.evalsha(script.sha, len(keys), *keys, *arguments)
                except exceptions.NoScriptError:  # Redis was restarted, or never saw it
                    value = await self._redis.eval(script.text, len(keys), *keys, *arguments)
        except (exceptions.RedisError, OSError, TimeoutError, RuntimeError) as error:
            # RuntimeError: uvloop raises it if the connection is closed
            self.trouble = f"Redis at {self.address} {_explain(error)}"
            raise StoreUnavailable(self.trouble) from error
        self.trouble = None
        return value

    async def risks(self) -> list[str]:
        """Returns the reasons why Redis, with its settings, could lose acknowledged writes. The list is empty if there
        are none, or if the settings cannot be read."""
        try:
            info = await self._redis.info("memory", "persistence")
        except (exceptions.RedisError, OSError, TimeoutError):
            return []
        found = []
        if info.get("maxmemory_policy") != "noeviction":
            found.append(f"maxmemory-policy is {info.get('maxmemory_policy')}: set noeviction")
        if info.get("aof_enabled") != 1:
            found.append("appendonly is off: what was written is lost with a restart")
        return found

    async def aclose(self) -> None:
        await self._redis.aclose(close_connection_pool=True)


def _explain(error: Exception) -> str:
    """Returns what is wrong with Redis and what to do about it, as text that is added to a sentence that begins with
    Redis's address."""
    text = " ".join(str(error).split())[:SHOWN]
    if "unauthenticated" in text:  # Redis answers this to a command of more than ten words before authentication
        error = exceptions.AuthenticationError(text)
    match error:
        case exceptions.AuthenticationError() | exceptions.AuthorizationError() | exceptions.NoPermissionError():
            return f"refuses this user or password, or what it wants to do: see LANEKEEPER_STORE_URL ({text})"
        case exceptions.BusyLoadingError():
            return f"is still loading its data: it is tried again ({text})"
        case exceptions.ReadOnlyError():
            return f"is a replica that may not be written: give the primary's address ({text})"
        case exceptions.OutOfMemoryError():
            return f"refuses writes, its memory is full: raise maxmemory ({text})"
        case exceptions.InvalidResponse():
            return f"is not a Redis: see LANEKEEPER_STORE_URL ({text})"
        case exceptions.ResponseError() if "MISCONF" in text or "NOREPLICAS" in text or "disk" in text:
            return f"refuses writes: see its disk, its replicas and its log ({text})"
        case exceptions.ResponseError():
            return f"answered: {text}"
        case exceptions.TimeoutError() | TimeoutError():
            return f"does not answer within {CALL_S:g} s: see that it runs, and LANEKEEPER_STORE_URL"
        case _:
            return f"cannot be reached: see that it runs, and LANEKEEPER_STORE_URL ({text})"
