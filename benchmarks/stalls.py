"""Measures how long each request or answer of a corpus blocks the event loop, and how much memory it takes.

A worker on a broker gets every nasty request (`tests/support/corpus/requests.py`), then every nasty answer
(`tests/support/corpus/answers.py`, streamed and not) of a malicious provider in its own process: one at a time, and the
worst requests twenty at a time. Requester and worker share the process, so the work of both counts. Stalls are given in
CPU time, to which the limit applies, and in real time, which other work on the machine lengthens.

    ./dev bench stalls [--only WORD] [--limit-ms 100]
"""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import ground
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from service.worker import running as worker
from service.worker.assembly import assemble
from tests.support.corpus.answers import ANSWERS
from tests.support.corpus.requests import REQUESTS
from tests.support.malicious_provider import malicious_provider
from tests.support.requester import Got, Requester, requester
from tests.support.stalls import Stalls

MIB = 1024 * 1024
AT_ONCE = 20
TOGETHER = ("as many arrays as may be", "as many messages as may be", "keys", "both", "arrays, 8 KiB of gzip")
DEADLINE_MS = 6000
"""The deadline of requests whose answer never ends."""
WITHIN_S = 120.0


def forget_peak() -> None:
    """Reset this process's peak of resident memory, which the kernel records (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """This process's peak of resident memory since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


class Table:
    """Measures each case and prints a line for it."""

    def __init__(self) -> None:
        self.worst_ms = 0.0
        self.most_bytes = 0

    async def line(self, name: str, size: int, work: Callable[[], Awaitable[str]]) -> None:
        forget_peak()
        with Stalls(time.perf_counter) as stalls, Stalls() as working:
            began_s = time.perf_counter()
            found = await work()
            took_s = time.perf_counter() - began_s
        peak, stall_ms, cpu_ms = peak_bytes(), 1000 * stalls.longest_s, 1000 * working.longest_s
        self.worst_ms, self.most_bytes = max(self.worst_ms, cpu_ms), max(self.most_bytes, peak)
        figures = f"{cpu_ms:7.1f} {stall_ms:7.1f} {peak / MIB:7.0f} {took_s:7.2f}"
        print(f"{name[:58]:58} {size:9} {figures}  {found}", flush=True)


def outcome(reply: Got) -> str:
    """`ok`, or the code of the error."""
    return "ok" if reply.status == "ok" else reply.code


async def requests(table: Table, app: Requester, only: str) -> None:
    for name, nasty in REQUESTS.items():
        if only not in name:
            continue
        options = {"key": "batch.bench.stalls", "content_encoding": nasty.content_encoding, "within_s": WITHIN_S}
        body = nasty.body

        async def one(body: bytes = body, options: dict[str, object] = options) -> str:
            return outcome(await app.ask(body, **options))  # type: ignore[arg-type]

        async def many(one: Callable[[], Awaitable[str]] = one) -> str:
            return ", ".join(sorted(set(await asyncio.gather(*(one() for _ in range(AT_ONCE))))))

        await table.line(name, len(body), one)
        if name in TOGETHER:
            await table.line(f"{AT_ONCE} times: {name}", AT_ONCE * len(body), many)


async def answers(table: Table, app: Requester, only: str) -> None:
    for name in ANSWERS:
        if only not in name:
            continue
        for streamed in (False, True):
            headers = {"x-lane-stream": streamed, "x-lane-deadline-ms": DEADLINE_MS}
            body = {"prompt": f"[[answer: {name}]]"}

            async def one(body: dict[str, str] = body, headers: dict[str, object] = headers) -> str:
                return outcome(await app.ask(body, headers=headers, within_s=WITHIN_S))

            await table.line(f"answer: {name}{', streamed' if streamed else ''}", 0, one)


async def main(only: str, limit_ms: float) -> None:
    with malicious_provider() as base_url:
        async with ground.broker() as url:
            settings = ground.settings(url, base_url)
            stop = asyncio.Event()
            async with assemble(settings, declares=True) as parts, requester(url) as app:
                working = asyncio.create_task(worker.run(parts, stop=stop, grace_s=5))
                for _ in range(20):
                    await app.ask({"prompt": "hello"}, within_s=WITHIN_S)
                print(f"{'':58} {'bytes':>9} {'CPU ms':>7} {'ms':>7} {'MiB':>7} {'took s':>7}")
                table = Table()
                await requests(table, app, only)
                await answers(table, app, only)
                stop.set()
                await working
    print(f"longest stall {table.worst_ms:.0f} CPU-ms (limit {limit_ms:g}); at most {table.most_bytes / MIB:.0f} MiB")
    if table.worst_ms > limit_ms:
        sys.exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only requests and answers with this word in their name")
    parser.add_argument("--limit-ms", type=float, default=100.0)
    options = parser.parse_args()
    uvloop.run(main(options.only, options.limit_ms))
