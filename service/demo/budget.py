"""The demo's third act: a small budget, batch jobs that could use all of it, and recorded chats.

The same load runs at the same time on two simulated providers, which enforce their limits and count their 429s. One
gets the load through Lanekeeper; the other gets it from the same number of workers for each lane, but without a budget
gate, that is, without the check that lets a call start only if the provider's limits allow it. Without the gate,
whichever call comes first uses the provider's limits, and a call that is refused with 429 is repeated after its
`retry-after`, as Anthropic's SDK does.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from consumers.capacity.activity import quantile
from consumers.failures import RateLimitedError
from consumers.providers.anthropic import AnthropicProvider
from service.config.budget_sections import BudgetSettings
from service.config.copies import with_provider
from service.config.settings import Settings
from service.demo.working import working
from service.simulated.app import SimulatedAPI
from service.simulated.options import SimulatedOptions
from topology.codec.request import unpublished
from topology.lanes import BATCH, CRITICAL

WINDOW_S = 12.0
JOBS = 300
CHATS_FROM_S = 1.0
"""The chats begin this many seconds after the start of the demo's budget act, when all batch jobs are waiting
already."""
CHATS = (
    (0.7, 38), (1.8, 10), (2.9, 10), (3.6, 10), (4.2, 10), (4.5, 34), (5.0, 102), (5.7, 27), (6.1, 81), (6.4, 102),
    (6.5, 10), (6.9, 4), (7.3, 28), (8.1, 11), (9.0, 10), (10.1, 25), (10.7, 10),
)  # fmt: skip
"""Eleven seconds of a recorded chat service. For each request: when it came, in seconds, and the number of its input
tokens, divided by forty because the simulated provider's limits are low. It is a part of the recordings that
`benchmarks/traces` describes (Azure LLM inference trace 2023)."""
CHARACTERS_PER_TOKEN = 4
"""How many characters the simulated API counts as one token."""
LATENCY_MS = (200, 600)
BURST_S = 2.0
"""The size of the simulated provider's token buckets: a bucket holds as much as its limit allows in this many seconds.
The buckets are full at the start, and the run is short, so the content of larger buckets would be a large part of the
whole budget."""
ACCOUNT = SimulatedOptions(
    output_tokens=80,
    requests_per_minute=300,
    input_tokens_per_minute=36_000,
    output_tokens_per_minute=30_000,
    burst_s=BURST_S,
)
TEXT = "the quick brown fox jumps over the lazy dog and thinks of lanes again, " * 4
SOON_S = 1.0
"""The demo's budget act succeeds only if the 95th percentile of the critical requests' waits is below this many
seconds."""
PAUSE_S = 0.5
"""The pause, in seconds, after an answer 429 without the header `retry-after`."""
USED_LEAST = 0.85
"""The demo's budget act succeeds only if at least this share of one of the provider's limits is used."""
Asking = Callable[[str, str], Awaitable[object]]
"""A function that sends a request with the given lane and prompt. It returns when the request is answered, and raises
an exception if the request is given up."""


@dataclass(slots=True)
class Spending:
    """The result of one run of the demo's budget act (with the budget gate, or without), as its requests and its
    simulated provider measured it."""

    waits_ms: list[int] = field(default_factory=list)
    """For each critical request, how long it waited, without the time that the provider took to answer; for a request
    that was not answered, how long it waited until the run ended."""
    answered: int = 0
    refused: int = 0
    """How many calls the simulated provider refused with 429."""
    calls: int = 0
    used: float = 0.0
    """The highest used share (0 to 1) among the provider's limits of requests, input tokens and output tokens a
    minute."""
    wrong: list[str] = field(default_factory=list)

    @property
    def calls_per_answer(self) -> float:
        return self.calls / max(1, self.answered)

    def wait_ms(self, share: float) -> int:
        return quantile(sorted(self.waits_ms), share) or 0

    @property
    def is_well(self) -> bool:
        is_soon = self.wait_ms(0.95) < SOON_S * 1000
        return is_soon and not self.wrong and self.refused == 0 and self.used >= USED_LEAST


async def run(settings: Settings) -> tuple[Spending, Spending]:
    """Run the same load at the same time through Lanekeeper, and without its budget gate (the check that lets a call
    start only if the provider's limits allow it). Returns the two results in this order."""
    async with AsyncExitStack() as stack:
        gated, ungated = [await stack.enter_async_context(SimulatedAPI(ACCOUNT)) for _ in range(2)]
        settings = with_provider(settings, gated.base_url, key="simulated")
        settings = settings.model_copy(update={"budget": BudgetSettings(burst_s=BURST_S)})
        model = settings.lanes.batch.model  # one model for both lanes, so that they share an account
        provider = AnthropicProvider.at(ungated.base_url, api_key="simulated", traceparent=lambda: None)
        stack.push_async_callback(provider.aclose)
        parts, client = await stack.enter_async_context(working(settings))
        slots = {lane.name: asyncio.Semaphore(lane.slots + lane.due_slots) for lane in parts.lanes}

        async def through_lanes(lane: str, prompt: str) -> None:
            await client.request({"prompt": prompt, "model": model}, key=f"{lane}.demo.budget", timeout_s=600)

        async def without_gate(lane: str, prompt: str) -> None:
            async with slots[lane]:
                while True:
                    try:
                        await provider.stream(
                            unpublished(prompt, model=model, max_tokens=1024), timeout_s=60, parts=None
                        )
                        break
                    except RateLimitedError as limited:
                        await asyncio.sleep(limited.retry_after_s or PAUSE_S)

        both = await asyncio.gather(_spend(through_lanes, gated), _spend(without_gate, ungated))
        return both[0], both[1]


async def _spend(asking: Asking, api: SimulatedAPI) -> Spending:
    """Send the act's load (batch jobs and chats) with `asking` for `WINDOW_S` seconds, and return the result. Requests
    that have no answer by then are abandoned."""
    found, clock, rng = Spending(), asyncio.get_running_loop().time, random.Random(1)
    waits_ms: dict[str, list[int]] = {CRITICAL.name: found.waits_ms, BATCH.name: []}

    async def ask(lane: str, number: int, text: str = TEXT) -> None:
        asked_s, takes_ms = clock(), rng.randint(*LATENCY_MS)
        try:
            await asking(lane, f"{lane} {number}: {text}[[latency: {takes_ms}ms]]")
        except Exception as error:
            found.wrong.append(f"{lane} {number}: {error}")
        finally:
            waits_ms[lane].append(max(0, round(1000 * (clock() - asked_s)) - takes_ms))

    await asyncio.gather(ask(CRITICAL.name, 0), ask(BATCH.name, 0))  # the budget learns limits and sizes from these
    found.waits_ms.clear()
    before, began_s = _counts(api), clock()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(BATCH.name, number)) for number in range(JOBS)]
        for at_s, tokens in CHATS:
            await asyncio.sleep(max(0.0, began_s + CHATS_FROM_S + at_s - clock()))
            text = (TEXT * (1 + tokens * CHARACTERS_PER_TOKEN // len(TEXT)))[: tokens * CHARACTERS_PER_TOKEN]
            tasks.append(group.create_task(ask(CRITICAL.name, len(tasks), text)))
        await asyncio.sleep(max(0.0, began_s + WINDOW_S - clock()))
        counts, could_s = _counts(api) - before, clock() - began_s + BURST_S
        for task in tasks:
            task.cancel()
    found.answered, found.refused, found.calls = counts["ok"], counts["rate_limited"], counts["calls"]
    found.used = max(
        counts[what] / (per_minute * could_s / 60)
        for what, per_minute in (
            ("requests", ACCOUNT.requests_per_minute),
            ("input_tokens", ACCOUNT.input_tokens_per_minute),
            ("output_tokens", ACCOUNT.output_tokens_per_minute),
        )
    )
    return found


def _counts(api: SimulatedAPI) -> Counter[str]:
    """What the simulated provider has counted. By the name of an outcome, such as `rate_limited`: the calls with this
    outcome; `calls`: the calls that have ended; `requests`, `input_tokens` and `output_tokens`: how much of each limit
    was used."""
    stats = api.stats()
    return Counter(
        stats["outcomes"],
        calls=stats["calls"] - stats["running"],
        requests=stats["calls"] - stats["outcomes"].get("rate_limited", 0),
        input_tokens=stats["input_tokens"],
        output_tokens=stats["output_tokens"],
    )
