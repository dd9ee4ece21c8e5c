"""Calls Redis over a bounded pool of connections, with a time limit for each call, and explains its errors."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from hashlib import sha1
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from consumers.state.base import StoreUnavailable
from consumers.state.redis_url import SentinelUrl

CONNECT_S = 3.0
CALL_S = 3.0
SENTINEL_S = 1.0
CONNECTIONS = 32
QUOTED_CHARS = 200
LOST = (exceptions.RedisError, OSError, TimeoutError, RuntimeError, ValueError)
"""What redis-py raises if Redis cannot be used. RuntimeError: asyncio and uvloop raise it if the connection's transport
or the event loop is closed. ValueError: an answer in which a number is none."""
Argument = str | bytes | int | float
_BEGIN: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local run = {}
"""


class Script:
    """A Lua script, and the hash by which Redis finds it once it has run it.

    Each run is one atomic step that takes one round trip, and reads the time from Redis. If Redis has no memory or disk
    space left, it refuses the first write of a script, so that a refused script has changed nothing.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _functions(name: str) -> dict[str, Script]:
    """Returns a script for each function `run.…` of this Lua file, which calls it with the script's arguments.

    It contains only that function, and what the file contains before its first function. With all functions it would
    take a sixth more time in Redis, which creates every function anew at each run of the script.
    """
    shared, *functions = _read(name).split("\nfunction run.")
    scripts = {}
    for function in functions:
        name = function[: function.index("(")]
        # at most 30 parameters, because Lua cannot pass thousands: functions for many requests read the rest from ARGV
        call = f"return run.{name}(unpack(ARGV, 1, math.min(#ARGV, 30)))"
        scripts[name] = Script(f"{_BEGIN}{shared}\nfunction run.{function}\n{call}")
    return scripts


STORE: Final = {
    name: script
    for file in ("requests.lua", "shares.lua", "rows.lua", "webhooks.lua", "groups.lua", "files.lua", "sweeping.lua")
    for name, script in _functions(file).items()
}
BUDGET: Final = Script(_read("budget.lua"))


class RedisClient:
    """Runs Lua scripts on one Redis. It connects at the first call, and again after an error."""

    def __init__(self, url: str, *, tls: Mapping[str, str] = MappingProxyType({})) -> None:
        """`tls`: redis-py's arguments for a URL with TLS, such as `ssl_ca_certs`."""
        self.trouble: str | None = None
        self._is_closed = False
        self._sentinel: Sentinel | None = None
        self._room: AbstractAsyncContextManager[object] = nullcontext()
        options: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_S,
            "socket_timeout": CALL_S,
            "retry": Retry(NoBackoff(), 0),  # no retries here: the caller decides whether to try again
            "protocol": 2,  # with `driver_info=None` no greeting is sent, which saves a round trip for each connection
            "driver_info": None,
        }
        if (sentinels := SentinelUrl.of(url)) is None:
            parts = urlsplit(url)
            self.address = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
            # `timeout`: waiting for a free connection
            pool: ConnectionPool = BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=CALL_S,
                **options,
                **(tls if parts.scheme == "rediss" else {}),
            )
        else:
            self.address = f"{sentinels.service} of {','.join(f'{host}:{port}' for host, port in sentinels.hosts)}"
            self._room = asyncio.Semaphore(CONNECTIONS)  # this pool refuses where the other one waits
            options |= {"ssl": True, **tls} if sentinels.is_encrypted else {}
            self._sentinel = _sentinel(sentinels, options)
            pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
                sentinels.service,
                self._sentinel,
                db=sentinels.database,
                username=sentinels.username,
                password=sentinels.password,
                max_connections=CONNECTIONS,
                **options,
            )
        self._redis: Redis = Redis.from_pool(pool)

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:
        """Run a Lua script and return its result. Raises StoreUnavailable."""
        if self._is_closed:
            raise StoreUnavailable(f"Redis at {self.address} is not used any more: this store was closed")
        try:
            async with asyncio.timeout(CONNECT_S + CALL_S), self._room:
                try:
                    value = await self._redis.evalsha(script.sha, len(keys), *keys, *arguments)
                except exceptions.NoScriptError:  # Redis was restarted, or never saw it
                    value = await self._redis.eval(script.text, len(keys), *keys, *arguments)
        except UnicodeEncodeError:  # a ValueError too, but it is what we send that is wrong
            raise
        except LOST as error:
            if isinstance(error, exceptions.ReadOnlyError):  # a primary until now: its address may lead to another one
                with suppress(*LOST):
                    await self._redis.connection_pool.disconnect(inuse_connections=False)
            self.trouble = f"Redis at {self.address} {_explain(error)}"
            raise StoreUnavailable(self.trouble) from error
        self.trouble = None
        return value

    async def risks(self) -> list[str]:
        """Returns the reasons why Redis, with its settings, could lose acknowledged writes."""
        if (info := await self._info()) is None:
            return []
        found = []
        if info.get("maxmemory_policy") != "noeviction":
            found.append(f"maxmemory-policy is {info.get('maxmemory_policy')}: set noeviction")
        if info.get("aof_enabled") != 1:
            found.append("appendonly is off: what was written is lost with a restart")
        return found

    async def memory(self) -> tuple[int, int] | None:
        info = await self._info()
        return None if info is None else (int(info["used_memory"]), int(info.get("maxmemory", 0)))

    async def _info(self) -> Mapping[str, Any] | None:
        try:
            async with asyncio.timeout(CONNECT_S + CALL_S), self._room:
                info: Mapping[str, Any] = await self._redis.info("memory", "persistence")
        except LOST:
            return None
        return info if "used_memory" in info else None

    async def aclose(self) -> None:
        self._is_closed = True
        with suppress(*LOST):
            await self._redis.aclose(close_connection_pool=True)
            if self._sentinel is not None:
                await self._sentinel.aclose()


def _sentinel(of: SentinelUrl, options: Mapping[str, Any]) -> Sentinel:
    """Asked with the password of Redis, which many give to their Sentinels too, and then without."""
    asked = {**options, "socket_connect_timeout": SENTINEL_S, "socket_timeout": SENTINEL_S}
    without = Sentinel(of.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    if of.password is not None:
        given = {**asked, "username": of.username, "password": of.password}
        with_password = Sentinel(of.hosts, sentinel_kwargs=given)  # type: ignore[no-untyped-call]
        without.sentinels[:0] = with_password.sentinels
    return without


def _explain(error: Exception) -> str:
    """What is wrong with Redis and what to do about it, as the rest of a sentence that begins with its address."""
    text = " ".join(str(error).split())[:QUOTED_CHARS]
    if "unauthenticated" in text:  # Redis answers this to a command of more than ten words before authentication
        error = exceptions.AuthenticationError(text)
    match error:
        case MasterNotFoundError():
            return "has no primary that a Sentinel knows: see that they run, and the name in LANEKEEPER_STORE_URL"
        case exceptions.AuthenticationError() | exceptions.AuthorizationError() | exceptions.NoPermissionError():
            return f"refuses this user or password, or what it wants to do: see LANEKEEPER_STORE_URL ({text})"
        case exceptions.BusyLoadingError():
            return f"is still loading its data: it is tried again ({text})"
        case exceptions.ReadOnlyError():
            return f"is a replica that may not be written: give the primary's address ({text})"
        case exceptions.MovedError() | exceptions.ClusterCrossSlotError():
            return f"is in cluster mode, in which Lanekeeper cannot use it: name one without ({text})"
        case exceptions.OutOfMemoryError():
            return f"refuses writes, its memory is full: raise maxmemory ({text})"
        case exceptions.InvalidResponse() | ValueError():
            return f"is not a Redis: see LANEKEEPER_STORE_URL ({text})"
        case exceptions.ResponseError() if "MISCONF" in text or "NOREPLICAS" in text or "disk" in text:
            return f"refuses writes: see its disk, its replicas and its log ({text})"
        case exceptions.ResponseError():
            return f"answered: {text}"
        case exceptions.TimeoutError() | TimeoutError():
            return f"does not answer within {CALL_S:g} s: see that it runs, and LANEKEEPER_STORE_URL"
        case _:
            return f"cannot be reached: see that it runs, and LANEKEEPER_STORE_URL ({text})"
