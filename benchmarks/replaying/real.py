"""Replays a scenario's requests in real time, with a real broker, real workers and the simulated API.

A wait is the time until the answer, minus the provider's own time, so it includes the time in broker and worker. For a
request without an answer it is the time until the end of the run. Provider and workers are started as in
`benchmarks/contest`.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ground
from contest import workers
from contest.load import MODEL
from contest.load import Ask as Asked
from contest.load import Load as Contest
from contest.provider import Counts, provider
from contest.running import Asking

from benchmarks.replaying.calls import MAX_TOKENS
from benchmarks.replaying.load import LATENCY_S, TOKENS_PER_S, Ask, job, load
from benchmarks.replaying.result import SETTLED_S, Spread
from benchmarks.replaying.scenarios import LANES, Scenario
from consumers.limits.base import Amounts
from topology.lanes import BATCH

JOBS = 600
"""More than can be answered in one run."""
FIRST_S = 3.0
"""When the recorded requests begin: all batch jobs are in the broker by then."""
_CHARACTERS_PER_TOKEN = 4  # as the simulated API counts
_WORDS = "the quick brown fox jumps over the lazy dog and thinks of lanes again "


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of one run."""

    seconds: float
    limits: Amounts
    waits: dict[str, Spread]
    answered: Counter[str]
    asked: Counter[str]
    failed: Counter[str]
    refused: int
    use: Amounts
    """The used part of the refill after the first minute. Output is missing, because the provider does not report
    it."""
    points: list[tuple[str, float, float]]
    """For each request: lane, arrival, wait."""

    def as_json(self) -> dict[str, Any]:
        """The figures in the form that `plot` reads."""
        return {"scenario": "real", "ends_s": self.seconds, "asks": self.points}


async def run(scenario: Scenario, *, seconds: float, processes: int = 1) -> Measured:
    """Replay the first `seconds` of a scenario."""
    recorded = load(scenario)
    limits = recorded.limits
    contest = Contest(
        window_s=seconds,
        requests_per_minute=round(limits.requests),
        input_tokens_per_minute=round(limits.input_tokens),
        burst_s=scenario.bucket_s,
        latency_s=LATENCY_S,
    )
    options = ("--output-tokens-per-minute", str(round(limits.output_tokens)), "--tokens-per-s", f"{TOKENS_PER_S:g}")
    rng = random.Random(scenario.seed)
    jobs = [job(next(recorded.jobs), 0.0, rng) for _ in range(JOBS)]
    asks = [*jobs, *(ask for ask in recorded.asks if ask.arrived_s < seconds)]
    async with ground.broker() as broker_url, ground.redis() as redis_url:
        if processes > 1 and redis_url is None:
            raise SystemExit("several processes share their budget in Redis, and no redis-server is installed")
        store = redis_url if processes > 1 else None
        async with (
            provider(contest, *options) as by,
            workers.lanekeeper(
                by.base_url, contest, broker_url=broker_url, workers=processes, redis_url=store
            ) as asking,
        ):
            sending = asyncio.ensure_future(_send(asking, asks, seconds))
            await asyncio.sleep(FIRST_S + SETTLED_S)
            before = await by.counts()
            await asyncio.sleep(seconds - SETTLED_S)
            after = await by.counts()
            await sending
    return _measured(asks, seconds, limits, before, after)


async def _send(asking: Asking, asks: list[Ask], seconds: float) -> None:
    """Send all batch jobs at once, and the others as they were recorded. Requests without an answer at the end are
    cancelled."""
    loop = asyncio.get_running_loop()
    began_s = loop.time() + FIRST_S

    async def one(number: int, ask: Ask) -> None:
        body = _body(number, ask)
        if ask.counts:
            await asyncio.sleep(began_s + ask.arrived_s - loop.time())
        try:
            await asking(Asked(ask.lane, body, ask.arrived_s))
        except Exception:  # how many failed is a figure of the table
            ask.refused += 1
        else:
            ask.answered_s = loop.time() - began_s

    tasks = [asyncio.create_task(one(number, ask)) for number, ask in enumerate(asks)]
    await asyncio.sleep(began_s + seconds - loop.time())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _body(number: int, ask: Ask) -> bytes:
    """A body with the recorded number of tokens. The marker for the answer's length is in a separate message, because
    the simulated API echoes the last message."""
    request = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": []}
    last = {"role": "user", "content": f"[[tokens: {max(8, ask.output_tokens)}]] {number}"}
    missing = ask.input_tokens * _CHARACTERS_PER_TOKEN - len(json.dumps(request)) - len(json.dumps(last)) - 84
    text = (_WORDS * (max(1, missing) // len(_WORDS) + 1))[: max(1, missing)]
    first = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes?"}]
    return json.dumps({**request, "messages": [*first, last]}).encode()


def _measured(asks: list[Ask], seconds: float, limits: Amounts, before: Counts, after: Counts) -> Measured:
    counted = [ask for ask in asks if ask.counts]
    points = [
        (ask.lane, ask.arrived_s, max(0.0, _sent_s(ask, seconds) - ask.arrived_s))
        for ask in counted
        if ask.refused == 0
    ]
    minutes = (seconds - SETTLED_S) / 60
    return Measured(
        seconds=seconds,
        limits=limits,
        waits={lane: Spread.of([wait_s for name, _, wait_s in points if name == lane]) for lane in LANES[:2]},
        answered=Counter(ask.lane for ask in asks if ask.answered_s is not None),
        asked=Counter(ask.lane for ask in asks),
        failed=Counter(ask.lane for ask in asks if ask.refused),
        refused=after.refused,
        use=Amounts(
            (after.requests - before.requests) / limits.requests / minutes,
            (after.input_tokens - before.input_tokens) / limits.input_tokens / minutes,
        ),
        points=points,
    )


def _sent_s(ask: Ask, seconds: float) -> float:
    """When the call was sent, computed from the time of its answer; without an answer: the end of the run."""
    return seconds if ask.answered_s is None else ask.answered_s - ask.takes_s


def table(measured: Measured) -> str:
    """The figures as lines of text."""
    lines = [
        f"{lane}: waited p50 {found.p50:.2f} s, p95 {found.p95:.2f} s, p99 {found.p99:.2f} s, max {found.most:.2f} s; "
        f"answered {measured.answered[lane]} of {measured.asked[lane]}, refused {measured.failed[lane]}"
        for lane, found in measured.waits.items()
    ]
    use = measured.use
    lines.append(
        f"{measured.answered[BATCH.name]} batch jobs answered; {measured.refused} answers 429; used after the first "
        f"minute: {100 * use.requests:.1f} % of requests, {100 * use.input_tokens:.1f} % of input tokens"
    )
    return "\n".join(lines)
