"""Records the calls to the simulated API: the latest calls, counts of all calls, and how many ran at the same time."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BODY_KEPT_BYTES = 16 * 1024
TEXT_KEPT = 200
"""How many characters of a model's name and of a prompt are recorded."""


@dataclass(slots=True)
class Call:
    """The record of one call to the simulated `POST /v1/messages`. `outcome` is `running` until the call ends, then
    `ok` or a short name for its error."""

    started_s: float
    """When the call arrived: the value of `time.monotonic()`."""
    headers: Mapping[str, str]
    """The HTTP headers of the call. Their names are looked up without regard to upper and lower case."""
    body: bytes = b""
    """The body of the call; empty if it was larger than 16 KiB."""
    model: str = ""
    stream: bool = False
    prompt: str = ""
    """The first 200 characters of the request's last user message."""
    request_id: str = ""
    outcome: str = "running"
    status: int = 0
    ended_s: float | None = None
    concurrency: int = 0
    """How many calls were running when this call started, including itself."""


class Calls:
    """The simulated API's record of its calls: the latest `keep` calls, and counts of all."""

    def __init__(self, keep: int) -> None:
        self.latest: deque[Call] = deque(maxlen=keep)
        self.outcomes: Counter[str] = Counter()
        self.models: Counter[str] = Counter()
        self.running = 0
        self.peak = 0
        self.total = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self._waiting: set[asyncio.Event] = set()

    def begin(self, *, headers: Mapping[str, str], request_id: str) -> Call:
        self.total += 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        call = Call(started_s=time.monotonic(), headers=headers, request_id=request_id, concurrency=self.running)
        self.latest.append(call)
        self._notify()
        return call

    def end(self, call: Call, *, outcome: str, status: int) -> None:
        call.outcome, call.status, call.ended_s = outcome, status, time.monotonic()
        self.running -= 1
        self.outcomes[outcome] += 1
        self._notify()

    def count_usage(self, *, model: str, input_tokens: int, output_tokens: int) -> None:
        self.models[model] += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `holds()` is true; it is checked whenever a call starts or ends. Raises `TimeoutError`."""
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await changed.wait()
                    changed.clear()
        finally:
            self._waiting.discard(changed)

    def stats(self) -> dict[str, Any]:
        """The JSON answer of `GET /simulated/stats`: counts of all calls."""
        return {
            "calls": self.total,
            "running": self.running,
            "peak_running": self.peak,
            "outcomes": dict(self.outcomes),
            "models": dict(self.models),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
        }

    def _notify(self) -> None:
        for event in self._waiting:
            event.set()
