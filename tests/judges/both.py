"""Makes the calls of `calls.py` and `openai_calls.py` with a client that blocks and with one that does not."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

AT_ONCE = 8


def print_made(
    made: Callable[[dict[str, Any]], Any], made_async: Callable[[dict[str, Any], asyncio.Semaphore], Awaitable[Any]]
) -> None:
    """Reads the calls from the standard input, and prints what each got."""
    print(json.dumps(asyncio.run(_both(made, made_async)), default=str))  # dates


def options(call: dict[str, Any], client: str) -> dict[str, Any]:
    """The call's parameters: of this client alone, so that calls and circuit breakers can be told apart."""
    own = json.loads(json.dumps(call).replace("CLIENT", client))
    return {**own["body"], "timeout": own["timeout_s"], "extra_headers": own["headers"]}


async def _both(
    made: Callable[[dict[str, Any]], Any], made_async: Callable[[dict[str, Any], asyncio.Semaphore], Awaitable[Any]]
) -> dict[str, Any]:
    calls, free = json.load(sys.stdin), asyncio.Semaphore(AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        loop = asyncio.get_running_loop()
        sync = asyncio.gather(*(loop.run_in_executor(pool, made, call) for call in calls))
        own = asyncio.gather(*(made_async(call, free) for call in calls))
        names = [call["name"] for call in calls]
        return {"sync": dict(zip(names, await sync, strict=True)), "async": dict(zip(names, await own, strict=True))}
