"""What the frameworks share whose tasks and clients block: Celery and Dramatiq."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Self


@cache
def _calling() -> Any:
    from benchmarks.harness.sdk import BlockingCalling  # requesters need no SDK, and it takes long to import

    return BlockingCalling(os.environ["BENCH_BASE_URL"])


def call(body: str) -> str:
    return _calling()(body.encode()).decode()


class BlockingRequester:
    """The framework's own client, which blocks: each caller has a thread."""

    def __init__(
        self, send: Callable[[str, str], object], ask: Callable[[str, str], object], close: Callable[[], object]
    ) -> None:
        self._send, self._ask, self._close = send, ask, close

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    async def publish(self, body: bytes, *, lane: str, **_: Any) -> None:
        await asyncio.to_thread(self._send, body.decode(), lane)

    async def ask(self, body: bytes, *, lane: str, **_: Any) -> None:
        await asyncio.to_thread(self._ask, body.decode(), lane)
