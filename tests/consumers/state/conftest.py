"""One set of tests for both engines: `store` is a new one, `opened` opens more on the same data."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from consumers.state.base import StoreSpec
from consumers.state.redis.store import RedisStore
from consumers.state.sqlite.store import SqliteStore
from consumers.state.store import Store
from tests.support.redis import RedisServer, redis_server

Opened = Callable[..., Awaitable[Store]]


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for the session; each test has its own namespace."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill and change."""
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    namespace = f"test-{secrets.token_hex(4)}"
    url = request.getfixturevalue("redis").url if request.param == "redis" else ""
    async with AsyncExitStack() as stack:

        async def open_one(**spec: Any) -> Store:
            wanted = StoreSpec(**spec)
            if request.param == "redis":
                return await stack.enter_async_context(RedisStore(url, namespace=namespace, spec=wanted))
            file = tmp_path / "store.sqlite"
            return await stack.enter_async_context(SqliteStore(file, namespace=namespace, spec=wanted))

        yield open_one


@pytest.fixture
async def store(opened: Opened) -> Store:
    return await opened()
