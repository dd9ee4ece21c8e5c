"""Sends the requests of a run, in the same way for every contestant. It is a process in the contestant's environment:

    python -m suite.requester MODULE SPEC

MODULE has a class `Requester` with the coroutines `publish` (waits for the confirm), `ask` (waits for the answer) and
optionally `first_part` (returns the time of the first part). SPEC is a `Spec` as JSON. The process prints a `Sent` as
JSON: when each request was sent, and when it was answered.
"""

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from suite import load


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Which requests to send, and how. Their numbers are `first` to `last` - 1."""

    do: str
    """`publish`, `ask` or `first_part`."""
    first: int = 0
    last: int
    at_once: int = 1
    pause_s: float = 0.0
    """Each sender's pause after a request."""
    every_s: float | None = None
    """Send one request in each such interval, whether or not earlier ones are answered."""
    size: int = load.BODY_BYTES
    call_ms: int = 0
    lanes: Sequence[str] = ("normal",)
    """The lanes of the requests, in turns."""
    tenants: int = 1
    warm: int = 0
    """How many requests are sent first, to warm up. They are not reported; their numbers are those before `first`."""


@dataclass(kw_only=True)
class Sent:
    """The requests that were sent. Times are CLOCK_MONOTONIC, as in the provider's log of calls."""

    numbers: list[int] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def latencies_s(self) -> list[float]:
        return [ended - began for began, ended in zip(self.began, self.ended, strict=True)]

    @property
    def took_s(self) -> float:
        return max(self.ended) - min(self.began)


async def send(requester: Any, spec: Spec) -> Sent:
    do: Callable[..., Awaitable[float | None]] = getattr(requester, spec.do)

    async def one(number: int, into: Sent) -> None:
        body = load.body(number, size=spec.size, call_ms=spec.call_ms, stream=spec.do == "first_part")
        began = time.monotonic()
        lane = spec.lanes[number % len(spec.lanes)]
        ended = await do(body, number=number, lane=lane, tenant=number % spec.tenants)
        into.numbers.append(number)
        into.began.append(began)
        into.ended.append(ended or time.monotonic())

    async def some(numbers: range, into: Sent) -> None:
        left = iter(numbers)

        async def runner() -> None:
            for number in left:
                await one(number, into)
                if spec.pause_s:
                    await asyncio.sleep(spec.pause_s)

        await asyncio.gather(*(runner() for _ in range(spec.at_once)))

    await some(range(spec.first - spec.warm, spec.first), Sent())
    sent, cpu = Sent(), time.process_time()
    if spec.every_s is None:
        await some(range(spec.first, spec.last), sent)
    else:
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at, number in enumerate(range(spec.first, spec.last)):
                await asyncio.sleep(start + at * spec.every_s - time.monotonic())
                group.create_task(one(number, sent))
    sent.cpu_s = time.process_time() - cpu
    return sent


async def main(module: str, spec: Spec) -> None:
    async with importlib.import_module(module).Requester() as requester:
        print("RESULT " + json.dumps(asdict(await send(requester, spec))))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1], Spec(**json.loads(sys.argv[2]))))
