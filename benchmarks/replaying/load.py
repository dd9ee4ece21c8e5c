"""Who asks what, and when: the recorded requests of a scenario, and an endless line of batch jobs."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.replaying.scenarios import LIMITS, SERVICE, Scenario
from benchmarks.replaying.traces import Recorded
from consumers.limits.amounts import Amounts
from topology.lanes import BATCH

BYTES_PER_TOKEN = (3.6, 4.4)
"""Differs from request to request, so that input is only expected as well."""
LATENCY_S = 0.5
TOKENS_PER_S = 60.0
SPREAD_S = 10.0
"""Copies of a request come within this time."""


class Stand(NamedTuple):
    """At the gate, from when until when; whether it was granted then, or put off, or the replay was over."""

    since_s: float
    until_s: float
    is_granted: bool


@dataclass(slots=True)
class Ask:
    """One request, and what became of it."""

    lane: str
    arrived_s: float
    input_tokens: int
    output_tokens: int
    body_bytes: int
    counts: bool = True
    """Recorded; else one of the endless line of batch jobs."""
    reserved: Amounts | None = None
    """What it was expected to use when it came first."""
    predicted_s: float = 0.0
    """How long it would wait, as was said when it came."""
    joined_s: float | None = None
    """When it came to the gate first."""
    granted_s: float | None = None
    """For the first time."""
    started_s: float | None = None
    """When the call left that was answered."""
    answered_s: float | None = None
    attempts: int = 0
    refused: int = 0
    """Times that it was answered 429."""
    waits: list[Stand] = field(default_factory=list)
    """For each time that it stood at the gate."""

    @property
    def wait_s(self) -> float | None:
        """Until the call began that was answered, all pauses before it included."""
        return None if self.started_s is None else self.started_s - self.arrived_s

    @property
    def gate_s(self) -> float | None:
        """From when it came to the gate until it was granted first: what was predicted."""
        return None if self.granted_s is None or self.joined_s is None else self.granted_s - self.joined_s

    @property
    def used(self) -> Amounts:
        return Amounts(1, self.input_tokens, self.output_tokens)

    @property
    def takes_s(self) -> float:
        """The provider's own time for it."""
        return LATENCY_S + self.output_tokens / TOKENS_PER_S


@dataclass(frozen=True)
class Load:
    """Of one scenario."""

    asks: Sequence[Ask]
    """Of critical and normal, as they arrive."""
    ends_s: float
    """After the last of them: nobody else asks, but for batch."""
    limits: Amounts
    """The provider's, a minute."""
    demand: Mapping[str, Amounts]
    """By lane, of each limit."""
    jobs: Iterator[Recorded]
    """Sizes of batch jobs, without end."""


def load(scenario: Scenario) -> Load:
    """The same for the same scenario."""
    first_s, last_s = scenario.slice_s
    rng = random.Random(scenario.seed)
    cut = {
        SERVICE[service]: _copied([each for each in requests if first_s <= each.at_s < last_s], scenario.copies, rng)
        for service, requests in scenario.traces.items()
    }
    asked = {lane: _per_minute(requests, last_s - first_s) for lane, requests in cut.items()}
    most = max(sum(each) / limit for *each, limit in zip(*asked.values(), LIMITS, strict=True))
    limits = Amounts(*(round(limit * most / scenario.demand) for limit in LIMITS))
    asks = [
        _ask(lane, each.at_s - first_s, each.input_tokens, each.output_tokens, rng)
        for lane, requests in cut.items()
        for each in requests
    ]
    asks += [_ask(each.lane, each.at_s, each.input_tokens, each.output_tokens, rng) for each in scenario.large]
    return Load(
        asks=sorted(asks, key=lambda ask: ask.arrived_s),
        ends_s=last_s - first_s,
        limits=limits,
        demand={
            lane: Amounts(*(each / limit for each, limit in zip(amounts, limits, strict=True)))
            for lane, amounts in asked.items()
        },
        jobs=_jobs(scenario),
    )


def job(size: Recorded, at_s: float, rng: random.Random) -> Ask:
    """The next of the line."""
    ask = _ask(BATCH.name, at_s, size.input_tokens, size.output_tokens, rng)
    ask.counts = False
    return ask


def _ask(lane: str, at_s: float, input_tokens: int, output_tokens: int, rng: random.Random) -> Ask:
    return Ask(lane, at_s, input_tokens, output_tokens, body_bytes=round(input_tokens * rng.uniform(*BYTES_PER_TOKEN)))


def _copied(requests: Sequence[Recorded], copies: int, rng: random.Random) -> list[Recorded]:
    more = [each._replace(at_s=each.at_s + rng.uniform(0, SPREAD_S)) for _ in range(copies - 1) for each in requests]
    return [*requests, *more]


def _per_minute(requests: Sequence[Recorded], seconds: float) -> Amounts:
    minutes = seconds / 60
    return Amounts(
        len(requests) / minutes,
        sum(each.input_tokens for each in requests) / minutes,
        sum(each.output_tokens for each in requests) / minutes,
    )


def _jobs(scenario: Scenario) -> Iterator[Recorded]:
    rng, sizes = random.Random(scenario.seed + 1), list(scenario.traces["chat"])
    while True:
        yield rng.choice(sizes)
