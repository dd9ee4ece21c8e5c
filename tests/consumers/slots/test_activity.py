"""A lane's figures: counts, and a limited number of the latest waits and run times."""

import asyncio
from dataclasses import replace

import pytest

from consumers.background import background_task
from consumers.outcomes import (
    Answered,
    Batched,
    DeadLettered,
    Deferred,
    Outcome,
    PipelineAdvanced,
    Refused,
    Replayed,
    Retried,
    Superseded,
)
from consumers.slots.activity import WINDOWS, LaneActivity, ended_per_s, note_ends
from consumers.state.base import AllowanceReservation, AllowanceTaken, Period, StoreUnavailable
from lanekeeper.contract.problems import RequestProblem
from tests.support.completions import answered
from tests.support.virtual_time import virtually
from topology.codec.headers import FlowHop

PROBLEM = RequestProblem("internal", "…")
ANSWERED = Answered(body=b"{}", model="m", provider="p")
STEPPED = PipelineAdvanced(flow=FlowHop(step="s", deadline_ms=0), state=b"", lane="critical", step="s")
FIGURES = ("answered", "failed", "retried", "deferred", "dropped", "throughput_per_min")


@pytest.mark.parametrize(
    ("outcome", "figures"),
    [
        (ANSWERED, (1, 0, 0, 0, 0, 1)),
        (Refused(PROBLEM), (0, 1, 0, 0, 0, 1)),
        (DeadLettered(PROBLEM), (0, 1, 0, 0, 0, 1)),
        (Superseded(PROBLEM), (0, 0, 0, 0, 1, 1)),
        (Retried(delay_ms=0, error="x"), (0, 0, 1, 0, 0, 0)),
        (Deferred(delay_ms=0, reason="x"), (0, 0, 0, 1, 0, 0)),
        (Batched(params=b""), (0, 0, 0, 1, 0, 0)),
        (replace(STEPPED, answer=ANSWERED), (1, 0, 0, 0, 0, 1)),
        (STEPPED, (0, 0, 0, 0, 0, 0)),
    ],
)
def test_each_outcome_is_counted_once(outcome: Outcome, figures: tuple[int, ...]) -> None:
    activity = LaneActivity("critical", slots=16, due_slots=4)
    activity.record(outcome, wait_ms=5, run_ms=None)
    told = activity.snapshot()
    assert tuple(told[name] for name in FIGURES) == figures
    assert activity.attempts == sum(activity.waits.counts) == 0
    assert activity.recent.over(60)[0].count == 0
    assert told["deferred_for"] == {Deferred: {"x": 1}, Batched: {"batch": 1}}.get(type(outcome), {})


def test_waits_and_run_times_are_kept_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 6000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    activity = LaneActivity("critical", slots=16, due_slots=4)
    for minute in range(90):
        now_s = 6000.0 + 60 * minute
        activity.record(ANSWERED, wait_ms=1000 * minute, run_ms=1)
    for window, minutes, p50 in (("5m", 5, 87_000), ("1h", 60, 60_000)):
        waits, runs = activity.recent.over(WINDOWS[window])
        assert (waits.count, runs.count) == (minutes, minutes)
        assert waits.get_quantile_value(0.5) == pytest.approx(p50, rel=0.03)
    now_s += 3600
    assert activity.recent.over(60)[0].count == 0


def test_ends_are_counted_by_code_and_retries_by_cause() -> None:
    activity = LaneActivity("critical", slots=16, due_slots=4)
    for outcome in (ANSWERED, Refused(PROBLEM), Refused(PROBLEM), DeadLettered(PROBLEM), Superseded(PROBLEM)):
        activity.record(outcome, wait_ms=0, run_ms=1, total_ms=2000)
    activity.record(Retried(delay_ms=0, error="x"), wait_ms=0, run_ms=1, cause="overloaded")
    assert activity.ended_by == {"ok": 1, "internal": 4}
    assert (activity.buried_by, activity.retried_for) == ({"internal": 1}, {"overloaded": 1})
    assert activity.totals.sum == 10


def test_what_waits_in_delays_is_told_by_reason_until_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    activity = LaneActivity("batch", slots=4, due_slots=1)
    for _ in range(86):
        activity.record(Deferred(delay_ms=36_000_000, reason="daily cap"), wait_ms=0, run_ms=None)
    activity.record(Retried(delay_ms=2_000, error="x"), wait_ms=0, run_ms=1)
    told = activity.snapshot()["delayed_for"]
    assert (told["daily cap"]["count"], told["retry"]) == (86, {"count": 1, "last_in_s": 2})
    assert 36_000 <= told["daily cap"]["last_in_s"] <= 36_000 * 17 / 16
    now_s += 3
    assert "retry" not in activity.snapshot()["delayed_for"]
    now_s += 36_000 * 17 / 16
    assert activity.snapshot()["delayed_for"] == {}


@pytest.mark.parametrize(("items", "counts"), [(0, {}), (3, {"pipeline": 1})])
def test_a_pipeline_is_delayed_only_while_it_waits_for_its_items(items: int, counts: dict[str, int]) -> None:
    lane = activity()
    lane.record(replace(STEPPED, of=items, delay_ms=2000), wait_ms=0, run_ms=None)
    assert {reason: told["count"] for reason, told in lane.still_delayed().items()} == counts


def test_what_waits_in_delays_takes_little_memory_although_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    lane = activity()
    for now_s in range(2000):  # noqa: B007
        lane.record(Retried(delay_ms=1000, error="x"), wait_ms=0, run_ms=1)
    assert len(lane._delayed["retry"]) <= 1024


class Counted:
    """Counts without periods; `seen_s`: how old the period is."""

    def __init__(self) -> None:
        self.used = 0.0
        self.seen_s = 20.0
        self.is_away = False
        self.asked = 0
        self.periods_s: set[int] = set()

    def now_ms(self) -> int:
        return round(1000 * self.seen_s)

    async def take(
        self, name: str, amount: float, *, limit: float, period: Period, reservation: AllowanceReservation | None = None
    ) -> AllowanceTaken:
        self.asked += 1
        self.periods_s.add(period.length_s)
        if self.is_away:
            raise StoreUnavailable("away")
        self.used += amount
        return AllowanceTaken(granted=True, used=self.used)

    async def settle(self, name: str, used: float, *, period: Period, reservation: AllowanceReservation) -> None:
        raise NotImplementedError

    async def give_back(self, name: str, amount: float, *, period: Period) -> None:
        raise NotImplementedError


def activity() -> LaneActivity:
    return LaneActivity("batch", slots=1, due_slots=1)


@pytest.mark.parametrize(("is_reply_only", "counted"), [(False, 1), (True, 0)])
def test_a_result_that_is_sent_again_is_counted_unless_its_reply_alone_was_missing(
    is_reply_only: bool, counted: int
) -> None:
    lane = activity()
    lane.record(Replayed(completion=answered(), is_reply_only=is_reply_only), wait_ms=0, run_ms=None)
    assert (lane.snapshot()["replayed"], lane.ended_by["replayed"], lane.ended) == (counted, counted, counted)


def test_what_ends_in_all_workers_is_noted_every_five_seconds_and_is_the_pace() -> None:
    async def story() -> tuple[list[float], float | None]:
        store, workers, used = Counted(), [activity(), activity()], []
        workers[0].ended = 1000  # before it notes anything
        async with (
            background_task(note_ends(store, workers[:1], now_ms=store.now_ms), name="1"),
            background_task(note_ends(store, workers[1:], now_ms=store.now_ms), name="2"),
        ):
            await asyncio.sleep(0.1)
            workers[0].ended, workers[1].ended = 1030, 10
            for seconds in (4.8, 0.2):
                await asyncio.sleep(seconds)
                used.append(store.used)
            workers[0].ended = 1050
            await asyncio.sleep(15)
        assert (store.asked, store.periods_s) == (3, {60})
        return [*used, store.used], await ended_per_s(store, "batch", now_ms=store.now_ms)

    assert virtually(story()) == ([0, 40, 60], 3)


def test_what_a_store_that_was_away_did_not_take_is_counted_later() -> None:
    async def story() -> float:
        store, worker = Counted(), activity()
        store.is_away = True
        async with background_task(note_ends(store, [worker], now_ms=store.now_ms), name="pace"):
            await asyncio.sleep(0)
            worker.ended = 7
            await asyncio.sleep(12)
            assert (store.asked, store.used) == (2, 0)
            store.is_away = False
            await asyncio.sleep(12)
        return store.used

    assert virtually(story()) == 7


@pytest.mark.parametrize(("used", "seen_s"), [(0, 50), (5, 19.9)])
async def test_it_is_unknown_where_nothing_ends_or_too_little_was_seen(used: int, seen_s: float) -> None:
    store = Counted()
    store.used, store.seen_s = used, seen_s

    assert await ended_per_s(store, "batch", now_ms=store.now_ms) is None
