"""Tries the scaling rule of deploy/kubernetes on recorded traffic, in virtual time.

    ./dev bench scaling [--write]

The load is a day made of the recorded half hour: each of its minutes lasts 48, with its own requests again and again,
at times drawn within the minute. Sixteen such services share a lane. A call takes half a second, and a second for every
60 tokens of its answer. The rule is that of deploy/prometheus/scaling.yml, with the delays of a real cluster: figures
are up to 10 s old, KEDA asks every 15 s, a worker is ready 30 s after it was asked for. Kubernetes follows the largest
wish of the last five minutes when it takes workers away. A worker that is taken away begins nothing new, and counts
until its last call has ended.

Best fixed size: the smallest number of workers whose p95 wait is within `WAIT_S`."""

import argparse
import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.report import between
from benchmarks.replaying.load import LATENCY_S, TOKENS_PER_S, recorded

PAGE = Path(__file__).parents[1] / "docs" / "kubernetes.md"
PLOT = PAGE.parent / "pictures" / "scaling.svg"
COPIES, STRETCH = 16, 48
CALLS = 14
WAIT_S = 1.0
SLOTS = 4
"""Of one worker."""
FIGURES_S, ASKED_EVERY_S, STARTS_S, KEPT_S = 10.0, 15.0, 30.0, 300.0
LEAST, MOST = 3, 100
DRAIN_S = 30.0
"""Time in which what waits should be begun."""
SHARE = 0.75
"""How much of their slots workers should use."""
GROWS_BY = 4
"""How many workers may be added at once, or as many as there are."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What Prometheus knows of a lane."""

    used: float
    """Slots that are taken."""
    held: float
    """Those of them whose request waits for the provider's limits."""
    waiting: int
    run_s: float


def wanted(seen: Figures, *, looks_at_provider: bool = True) -> float:
    """How many workers: the query of the ScaledObject (deploy/prometheus/scaling_test.yml has the same figures)."""
    is_limited = looks_at_provider and seen.held > 0.1 * seen.used
    busy = seen.used - seen.held if looks_at_provider else seen.used
    backlog = 0.0 if is_limited else seen.waiting * seen.run_s / DRAIN_S
    return (busy + backlog) / SHARE / SLOTS


@dataclass(slots=True)
class Worker:
    """One pod."""

    since_s: float
    ready_s: float
    leaves: bool = False
    running: int = 0


@dataclass
class Result:
    """What a day cost, and how long its requests waited."""

    waits: list[float] = field(default_factory=list)
    worker_hours: float = 0.0
    sizes: list[int] = field(default_factory=list)
    """At each minute."""

    def wait(self, share: float) -> float:
        return sorted(self.waits)[int(share * (len(self.waits) - 1))]


def day(service: str) -> Sequence[tuple[float, float]]:
    """Arrivals and run times."""
    randomly = random.Random(1)
    minutes: list[list[float]] = [[] for _ in range(30)]
    for each in recorded()[service]:
        minutes[min(int(each.at_s // 60), 29)].append(LATENCY_S + each.output_tokens / TOKENS_PER_S)
    found = [
        (60 * (minute * STRETCH + again + randomly.random()), run_s)
        for minute, runs in enumerate(minutes)
        for again in range(STRETCH)
        for run_s in runs
        for _ in range(COPIES)
    ]
    return sorted(found)


class Lane:
    """A lane and its workers, in virtual time."""

    def __init__(
        self,
        load: Sequence[tuple[float, float]],
        *,
        workers: int = LEAST,
        scales: bool = False,
        calls: int | None = None,
        looks_at_provider: bool = True,
    ) -> None:
        """`calls`: how many the provider takes at a time."""
        self._load = load
        self._scales, self._calls, self._looks = scales, calls, looks_at_provider
        self._workers = [Worker(0.0, 0.0) for _ in range(workers)]
        self._queue: deque[tuple[float, float]] = deque()
        self._free: list[Worker] = [each for each in self._workers for _ in range(SLOTS)]
        self._starting: deque[Worker] = deque()
        self._held: deque[tuple[Worker, float]] = deque()
        self._running = 0
        self._ends: list[tuple[float, int, Worker]] = []
        self._lately: deque[tuple[float, float]] = deque()
        self._lately_s = 0.0
        self._wishes: deque[tuple[float, int]] = deque()
        self._seen: deque[tuple[float, Figures]] = deque()
        self._minute: deque[tuple[int, int]] = deque(maxlen=12)
        self._now = 0.0
        self._number = 0
        self.result = Result()

    def run(self) -> Result:
        ends_s = 60.0 * 30 * STRETCH
        tick, at = 0.0, 0
        while tick < ends_s or self._ends or self._queue:
            next_arrival = self._load[at][0] if at < len(self._load) else math.inf
            next_end = self._ends[0][0] if self._ends else math.inf
            self._now = min(next_arrival, next_end, tick)
            if self._now == next_end:
                self._end()
            elif self._now == next_arrival:
                self._queue.append(self._load[at])
                at += 1
            else:
                self._scale()
                tick += 5.0
            self._begin()
        for worker in self._workers:
            self.result.worker_hours += (self._now - worker.since_s) / 3600
        return self.result

    def _end(self) -> None:
        _, _, worker = heapq.heappop(self._ends)
        self._running -= 1
        self._leave(worker)
        if self._held:
            self._call(*self._held.popleft())

    def _leave(self, worker: Worker) -> None:
        worker.running -= 1
        if not worker.leaves:
            self._free.append(worker)
        elif not worker.running:
            self.result.worker_hours += (self._now - worker.since_s) / 3600

    def _begin(self) -> None:
        while self._queue and self._free:
            worker = self._free.pop()
            if worker.leaves:
                continue
            arrived_s, run_s = self._queue.popleft()
            worker.running += 1
            self.result.waits.append(self._now - arrived_s)
            if self._calls is None or self._running < self._calls:
                self._call(worker, run_s)
            else:
                self._held.append((worker, run_s))

    def _call(self, worker: Worker, run_s: float) -> None:
        self._running += 1
        self._number += 1
        heapq.heappush(self._ends, (self._now + run_s, self._number, worker))
        self._lately.append((self._now, run_s))
        self._lately_s += run_s

    def _scale(self) -> None:
        while self._starting and self._starting[0].ready_s <= self._now:
            worker = self._starting.popleft()
            self._free += [] if worker.leaves else [worker] * SLOTS
        while self._lately and self._lately[0][0] < self._now - 600:
            self._lately_s -= self._lately.popleft()[1]
        run_s = self._lately_s / len(self._lately) if self._lately else 0.0
        used = sum(each.running for each in self._workers)
        self._minute.append((used, len(self._held)))
        used_1m, held_1m = (sum(each) / len(self._minute) for each in zip(*self._minute, strict=True))
        self._seen.append((self._now, Figures(used_1m, held_1m, len(self._queue), run_s)))
        while len(self._seen) > 1 and self._seen[1][0] <= self._now - FIGURES_S:
            self._seen.popleft()
        if self._now % 60 == 0:
            self.result.sizes.append(len(self._workers))
        if not self._scales or self._now % ASKED_EVERY_S:
            return
        size = len(self._workers)
        wish = wanted(self._seen[0][1], looks_at_provider=self._looks)
        aim = size if abs(wish / size - 1) <= 0.1 else math.ceil(wish)  # Kubernetes' tolerance
        self._wishes.append((self._now, max(LEAST, min(MOST, aim))))
        while self._wishes[0][0] < self._now - KEPT_S:
            self._wishes.popleft()
        latest = self._wishes[-1][1]
        if latest > size:
            for _ in range(min(latest - size, max(size, GROWS_BY))):
                self._workers.append(Worker(self._now, self._now + STARTS_S))
                self._starting.append(self._workers[-1])
        else:
            for _ in range(size - max(each for _, each in self._wishes)):
                worker = self._workers.pop()
                worker.leaves = True
                if not worker.running:
                    self.result.worker_hours += (self._now - worker.since_s) / 3600


def best_fixed(load: Sequence[tuple[float, float]]) -> tuple[int, Result]:
    """The smallest number of workers whose p95 wait is within `WAIT_S`."""
    mean = sum(run_s for _, run_s in load) / (1800 * STRETCH) / SLOTS
    least, most = math.ceil(mean), math.ceil(mean * 6)
    found = {}
    while least < most:
        size = (least + most) // 2
        found[size] = Lane(load, workers=size).run()
        least, most = (least, size) if found[size].wait(0.95) <= WAIT_S else (size + 1, most)
    return least, found.get(least) or Lane(load, workers=least).run()


HEAD = ("lane", "workers", "wait p50 / p95 / p99, s", "worker-hours", "of the best fixed size")


def figures(result: Result) -> list[str]:
    waits = " / ".join(f"{result.wait(share):.2f}" for share in (0.5, 0.95, 0.99))
    return [waits, f"{result.worker_hours:.0f}"]


def main() -> tuple[str, Result, Result]:
    """The table, and the day of code completions with the best fixed size and with the rule."""
    table: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    days = {}
    for service, what in (("code", "code completion"), ("chat", "chat, a steady load")):
        load = day(service)
        size, fixed = best_fixed(load)
        scaled = Lane(load, scales=True).run()
        days[service] = fixed, scaled
        table.append([what, f"{size}, the best fixed size", *figures(fixed), "1"])
        sizes = f"by the rule: {min(scaled.sizes)} to {max(scaled.sizes)}"
        table.append([what, sizes, *figures(scaled), f"{scaled.worker_hours / fixed.worker_hours:.2f}"])
    load = day("code")
    for looks, how in ((True, "by the rule"), (False, "the same, blind to the provider")):
        limited = Lane(load, scales=True, calls=CALLS, looks_at_provider=looks).run()
        sizes = f"{how}: {min(limited.sizes)} to {max(limited.sizes)}"
        name = f"code completion, the provider takes {CALLS} calls at a time"
        table.append([name, sizes, *figures(limited), f"{limited.worker_hours / days['code'][0].worker_hours:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in table), *days["code"]


def plot(fixed: Result, scaled: Result) -> str:
    """An SVG: the number of workers over the day."""
    width, height, highest = 720, 200, max(*fixed.sizes, *scaled.sizes)

    def line(sizes: Sequence[int], colour: str) -> str:
        step, up = width / len(sizes), height / highest
        points = " ".join(f"{n * step:.1f},{height - size * up:.1f}" for n, size in enumerate(sizes) if n % 4 == 0)
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>'

    day_long = fixed.sizes[: len(scaled.sizes)]
    texts = (
        f'<text x="4" y="-6">workers: by the rule (blue, at most {max(scaled.sizes)}), '
        f"best fixed size (grey, {fixed.sizes[0]})</text>"
        f'<text x="{width - 4}" y="{height + 16}" text-anchor="end">24 hours</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -24 {width + 8} {height + 48}" font-family="sans-serif" '
        f'font-size="12"><rect x="-4" y="-24" width="{width + 8}" height="{height + 48}" fill="white"/>'
        f"{line(day_long, '#999')}{line(scaled.sizes, '#1565c0')}{texts}</svg>\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="./dev bench scaling", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put table and plot into docs/kubernetes.md")
    given = parser.parse_args()
    found, *both = main()
    print(found)
    if given.write:
        between(PAGE, found, command="./dev bench scaling")
        PLOT.write_text(plot(*both))
