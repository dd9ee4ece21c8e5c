"""Further scenarios, for Lanekeeper alone. Each has a load, perhaps a fault of the provider, and a condition that must
hold at the end."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from contest.load import Load
from contest.provider import SimulatedProvider
from contest.running import Trouble
from contest.score import Row, used

MOST_CALLS_PER_ANSWER = 1.5
LEAST_USED = 0.95
BATCH_SHARE = 0.05
MOST_OVERSPENT = 0.02
DOWN_AFTER_S = 10.0
DOWN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario. `load` derives its load from the given one; `fault_in` describes what is wrong with the result, or
    returns None."""

    name: str
    load: Callable[[Load], Load]
    fault_in: Callable[[Row], str | None]
    options: Sequence[str] = ()
    trouble: Trouble | None = None
    workers: int = 1


async def _down_and_back(by: SimulatedProvider, load: Load) -> None:
    await asyncio.sleep(DOWN_AFTER_S / load.speed)
    await by.stop()
    await asyncio.sleep(DOWN_S / load.speed)
    await by.start()


def _few(load: Load, **changes: float) -> Load:
    """A load so small that all requests can be answered."""
    return replace(load, window_s=90, jobs=40, critical_every_s=5.0, finish_s=240, **changes)  # type: ignore[arg-type]


def _unused_budget(row: Row) -> str | None:
    assert row.board is not None
    assert row.counts is not None
    load = row.board.load
    share = max(
        used(row.counts.requests, load.requests_per_minute, load),
        used(row.counts.input_tokens, load.input_tokens_per_minute, load),
    )
    return None if share >= LEAST_USED else f"{share:.1%} of the budget used, not {LEAST_USED:.0%}"


def _too_few_batch_jobs(row: Row) -> str | None:
    assert row.board is not None
    load = row.board.load
    least = int(BATCH_SHARE * load.requests_per_minute * load.window_s / 60)
    answered = row.board.answered("batch")
    return None if answered >= least else f"{answered} batch jobs answered, not {least}"


def _unanswered(row: Row) -> str | None:
    assert row.board is not None
    missing = len(row.board.asks) - row.board.answered()
    if missing:
        why = next((ask.failed for ask in row.board.asks if ask.failed), "no answer came")
        return f"{missing} of {len(row.board.asks)} not answered: {why}"
    calls = row.calls_per_answer()
    return None if calls <= MOST_CALLS_PER_ANSWER else f"{calls:.2f} calls per answer, not {MOST_CALLS_PER_ANSWER}"


def _overspent(row: Row) -> str | None:
    assert row.counts is not None
    share = row.counts.refused / max(1, row.counts.requests)
    return None if share <= MOST_OVERSPENT else f"{share:.1%} more than there was, not {MOST_OVERSPENT:.0%}"


SCENARIOS: Mapping[str, Scenario] = {
    each.name: each
    for each in (
        Scenario(
            name="batch alone",
            # in a shorter window, the reserves of the other lanes, unused at the end, would be a large part of the
            # budget
            load=lambda load: replace(load, critical_every_s=None, window_s=max(300, load.window_s)),
            fault_in=_unused_budget,
        ),
        Scenario(
            name="critical flood", load=lambda load: replace(load, critical_every_s=0.25), fault_in=_too_few_batch_jobs
        ),
        Scenario(name="provider down", load=_few, fault_in=_unanswered, trouble=_down_and_back),
        Scenario(
            name="30 % overloaded",
            load=_few,
            fault_in=_unanswered,
            options=("--fault", "overloaded=0.3"),
        ),
        Scenario(name="provider slow", load=lambda load: _few(load, latency_s=20.0), fault_in=_unanswered),
        Scenario(name="three workers", load=lambda load: load, fault_in=_overspent, workers=3),
    )
}
