"""One set of tests for both engines: `store` is a new one, `opened` opens more on the same data."""

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from consumers.state.base import StoreSpec, StoreUnavailable
from consumers.state.redis.store import RedisStore
from consumers.state.sqlite.store import SqliteStore
from consumers.state.store import Store
from tests.support.completions import ME, fingerprint
from tests.support.redis import RedisServer, redis_server
from tests.support.waiting import until

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


async def trouble_with(store: Store) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        await store.claim(ME, fingerprint())
    assert store.trouble == str(caught.value)
    return str(caught.value)


async def is_well_again(store: Store) -> object:
    """The result of a claim once the store works again; nothing is done except trying again."""

    async def claimed() -> object:
        try:
            return await store.claim(ME, fingerprint(redelivered=True))
        except StoreUnavailable:
            return None

    found = await until(claimed)
    assert store.trouble is None
    return found


def in_ms(left_ms: int) -> int:
    """The time in ms since 1970, so many ms from now."""
    return time.time_ns() // 1_000_000 + left_ms
