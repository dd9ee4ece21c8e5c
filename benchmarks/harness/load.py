"""Makes the bodies of requests, and sends them in the same way for every contestant. It is a process in the
contestant's environment:

    python -m benchmarks.harness.load MODULE:CLASS SPEC

CLASS has the coroutines `publish` (waits for the confirm), `ask` (waits for the answer) or `first_part` (returns the
time of the first part). SPEC is a `Spec` as JSON. The process prints a `Sent` as JSON.
"""

import asyncio
import importlib
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

MODEL: Final = "claude-haiku-5-5"
BODY_BYTES: Final = 1024
_MARK: Final = re.compile(rb"#(\d{8})@(\d{6}) ")


def mark(number: int, call_ms: int = 0) -> str:
    """What a request's prompt begins with: its number, and the duration of its call in ms."""
    return f"#{number:08d}@{call_ms:06d} "


def body(number: int, *, size: int = BODY_BYTES, call_ms: int = 0, stream: bool = False) -> bytes:
    """The body of `POST /v1/messages`, about `size` bytes long."""
    fields = {"model": MODEL, "max_tokens": 400} | ({"stream": stream} if stream else {})
    start = json.dumps(fields)[:-1] + ', "messages": [{"role": "user", "content": "' + mark(number, call_ms)
    end = '"}]}'
    words = "Tell me what a lane is. "
    filling = max(0, size - len(start) - len(end))
    return (start + (words * (filling // len(words) + 1))[:filling] + end).encode()


def read_mark(body: bytes) -> tuple[int, int]:
    """Read a request's number and the duration of its call in ms from its body."""
    found = _MARK.search(body, 0, 512)
    assert found is not None
    return int(found[1]), int(found[2])


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
    sizes: Sequence[int] = (BODY_BYTES,)
    """The sizes of the bodies, in turns."""
    lanes: Sequence[str] = ("normal",)
    """The lanes of the requests, in turns."""
    call_ms: int = 0
    tenant: int = 0
    warm: int = 0
    """How many requests are sent first, to warm up. They are not reported; their numbers are those before `first`."""


@dataclass(kw_only=True)
class Sent:
    """The requests that were sent. Times are CLOCK_MONOTONIC, as in the provider's log of calls."""

    numbers: list[int] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    @property
    def latencies_ms(self) -> list[float]:
        return [1000 * (ended - began) for began, ended in zip(self.began, self.ended, strict=True)]

    @property
    def per_s(self) -> float:
        return len(self.numbers) / (max(self.ended) - min(self.began))


async def send(requester: Any, spec: Spec) -> Sent:
    do: Callable[..., Awaitable[float | None]] = getattr(requester, spec.do)

    async def one(number: int, into: Sent) -> None:
        size, lane = spec.sizes[number % len(spec.sizes)], spec.lanes[number % len(spec.lanes)]
        made = body(number, size=size, call_ms=spec.call_ms, stream=spec.do == "first_part")
        began = time.monotonic()
        ended = await do(made, number=number, lane=lane, tenant=spec.tenant)
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

        async with asyncio.TaskGroup() as group:
            for _ in range(spec.at_once):
                group.create_task(runner())

    await some(range(spec.first - spec.warm, spec.first), Sent())
    sent = Sent()
    if spec.every_s is None:
        await some(range(spec.first, spec.last), sent)
    else:
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at, number in enumerate(range(spec.first, spec.last)):
                await asyncio.sleep(start + at * spec.every_s - time.monotonic())
                group.create_task(one(number, sent))
    return sent


async def main(requester: str, spec: Spec) -> None:
    module, _, name = requester.partition(":")
    async with getattr(importlib.import_module(module), name)() as made:
        print("RESULT " + json.dumps(asdict(await send(made, spec))))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1], Spec(**json.loads(sys.argv[2]))))
