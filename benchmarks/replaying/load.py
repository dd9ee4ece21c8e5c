"""The requests of a scenario: the recorded ones, and an endless supply of batch jobs."""

import csv
import gzip
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.replaying.scenarios import LANES, LIMITS, SERVICE, Scenario, Steady
from consumers.limits.base import Amounts
from topology.lanes import BATCH

TRACES = Path(__file__).parents[1] / "traces" / "azure-2023-quarter.csv.gz"
"""Every fourth request of a chat service and of a code completion."""
BYTES_PER_TOKEN = (3.6, 4.4)
"""The least and the most bytes of a body for each input token. Drawn for each request, so that its input has to be
estimated."""
LATENCY_S = 0.5
TOKENS_PER_S = 60.0
SPREAD_S = 10.0
"""The copies of a request (`Scenario.copies`) arrive within this time after it."""


class Recorded(NamedTuple):
    """One recorded request."""

    at_s: float
    input_tokens: int
    output_tokens: int


@cache
def recorded() -> Mapping[str, Sequence[Recorded]]:
    found: dict[str, list[Recorded]] = {service: [] for service in SERVICE}
    with gzip.open(TRACES, "rt", newline="") as file:
        for row in csv.DictReader(file):
            made = Recorded(float(row["at_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
            found[row["service"]].append(made)
    return found


class Stand(NamedTuple):
    """One stay of a request at the gate. `is_granted` is false if it left the gate without a grant, or the replay
    ended."""

    since_s: float
    until_s: float
    is_granted: bool


@dataclass(slots=True)
class Ask:
    """One request and its results."""

    lane: str
    arrived_s: float
    input_tokens: int
    output_tokens: int
    body_bytes: int
    call_s: float | None = None
    """How long the provider takes for it; None: as long as its output takes."""
    counts: bool = True
    """True for a recorded request, false for a batch job."""
    reserved: Amounts | None = None
    """The amounts that it was expected to use, at its first arrival at the gate."""
    joined_s: float | None = None
    """When it first came to the gate."""
    started_s: float | None = None
    """When the answered call was sent."""
    answered_s: float | None = None
    attempts: int = 0
    refused: int = 0
    """How often it was answered with 429."""
    overloaded: int = 0
    """How often it was answered with 529."""
    waits: list[Stand] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(id(self))

    @property
    def wait_s(self) -> float | None:
        """The time from arrival to the start of the answered call, including all pauses."""
        return None if self.started_s is None else self.started_s - self.arrived_s

    @property
    def used(self) -> Amounts:
        return Amounts(1, self.input_tokens, self.output_tokens)

    @property
    def takes_s(self) -> float:
        return LATENCY_S + self.output_tokens / TOKENS_PER_S if self.call_s is None else self.call_s


@dataclass(frozen=True)
class Load:
    """The load of one scenario."""

    asks: Sequence[Ask]
    """Critical and normal requests, in the order of arrival."""
    ends_s: float
    """When the recorded requests end. After that, only batch jobs come."""
    limits: Amounts
    jobs: Iterator[Recorded]
    """The sizes of batch jobs, without end."""


def load(scenario: Scenario) -> Load:
    """The load of a scenario. It is the same each time."""
    if scenario.steady is not None:
        return _steady(scenario, scenario.steady)
    first_s, last_s = scenario.slice_s
    rng = random.Random(scenario.seed)
    cut = {
        SERVICE[service]: _copied([each for each in requests if first_s <= each.at_s < last_s], scenario.copies, rng)
        for service, requests in recorded().items()
    }
    asked = [_per_minute(requests, last_s - first_s) for requests in cut.values()]
    most = max(sum(each) / limit for *each, limit in zip(*asked, LIMITS, strict=True))
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
        jobs=_jobs(scenario),
    )


def _steady(scenario: Scenario, steady: Steady) -> Load:
    rng, asks, at_s = random.Random(scenario.seed), list[Ask](), 0.0
    while (at_s := at_s + rng.expovariate(steady.per_s)) < steady.lasts_s:
        call_s = steady.long_s if rng.random() < 1 / 8 else steady.short_s
        asks.append(Ask(rng.choice(LANES), at_s, 1000, 100, body_bytes=4000, call_s=call_s))
    return Load(asks=asks, ends_s=steady.lasts_s, limits=Amounts(1e9, 1e12, 1e12), jobs=iter(()))


def job(size: Recorded, at_s: float, rng: random.Random) -> Ask:
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
    rng, sizes = random.Random(scenario.seed + 1), list(recorded()["chat"])
    while True:
        yield rng.choice(sizes)
