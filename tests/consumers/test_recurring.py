"""Schedules: when they fire, by the clock that is passed in, and what becomes of times at which nobody published."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import pytest
from structlog.testing import capture_logs

from consumers.brake import Brake
from consumers.flows.schedules import Schedules, ScheduleSpec
from consumers.state.base import Completion, Fingerprint, Granted, Identity, StoreUnavailable
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerUnreachable
from tests.support.jobs import HeldPauses, a_pause
from tests.support.memory_store import MemoryStore

NIGHTLY = ScheduleSpec(name="nightly", cron="30 2 * * *", timezone="Europe/Berlin", key="batch.reports.x", body=b"{}")

FINGERPRINT = Fingerprint(body_hash=b"b" * 16, mark=b"m" * 16, redelivered=False)


def ms(text: str) -> int:
    return round(1000 * datetime.fromisoformat(text).timestamp())


def texts(spec: ScheduleSpec, after: str, count: int) -> list[str]:
    times = spec.after(ms(after))
    return [f"{datetime.fromtimestamp(next(times) / 1000, UTC):%m-%d %H:%M}" for _ in range(count)]


class FakePublisher:
    """Notes what is published; raises `failure` if it is set."""

    def __init__(self) -> None:
        self.published: list[Message] = []
        self.failure: Exception | None = None
        self.then: Callable[[], None] | None = None

    async def publish(self, message: Message, *, exchange: str, routing_key: str) -> None:
        if self.failure is not None:
            raise self.failure
        assert (exchange, routing_key) == ("lane.requests", "batch.reports.x")
        self.published.append(message)
        if self.then is not None:
            self.then()


class World:
    """A store, and processes that share it; `now` is the time of all."""

    def __init__(self, spec: ScheduleSpec, now: str) -> None:
        self.spec = spec
        self.store = MemoryStore()
        self.publisher = FakePublisher()
        self.now_ms = ms(now)
        self.claims: dict[str | None, int] = {}
        self.pauses = HeldPauses()
        self.brake = Brake(self.pauses, now_ms=lambda: self.now_ms)

    def process(self, specs: Sequence[ScheduleSpec] | None = None) -> Schedules:
        more: Mapping[str, Any] = {"publisher": self.publisher, "exchange": "lane.requests", "user": None}
        return Schedules(specs or [self.spec], store=self.store, brake=self.brake, now_ms=lambda: self.now_ms, **more)

    async def at(self, now: str, process: Schedules, *, owner: str = "one") -> list[str | None]:
        """The ids of the requests that the process publishes when it looks at this time."""
        self.now_ms = self.store.now_ms = ms(now)
        before = len(self.publisher.published)
        await process.look(owner=owner)
        return [message.message_id for message in self.publisher.published[before:]]

    async def end(self, id: str | None, code: str) -> None:
        completion = Completion(status="error" if code else "ok", code=code, body=b"{}", ended_ms=self.now_ms)
        await self.store.complete(Identity("", str(id)), FINGERPRINT, completion, token=self.claims.pop(id, None))

    async def begin(self, id: str | None) -> None:
        granted = await self.store.claim(Identity("", str(id)), FINGERPRINT)
        assert isinstance(granted, Granted)
        self.claims[id] = granted.token


def test_a_schedule_keeps_its_local_time_through_changes_of_summer_time() -> None:
    daily = ScheduleSpec(name="d", cron="0 7 * * *", timezone="Europe/Berlin", key="k", body=b"")

    assert texts(daily, "2026-10-24T00:00Z", 3) == ["10-24 05:00", "10-25 06:00", "10-26 06:00"]
    assert texts(daily, "2026-03-28T00:00Z", 3) == ["03-28 06:00", "03-29 05:00", "03-30 05:00"]


def test_what_falls_into_the_skipped_hour_runs_after_it_and_what_falls_into_the_repeated_one_runs_once() -> None:
    assert texts(NIGHTLY, "2026-03-28T12:00Z", 2) == ["03-29 01:00", "03-30 00:30"]
    assert texts(NIGHTLY, "2026-10-24T12:00Z", 3) == ["10-25 00:30", "10-26 01:30", "10-27 01:30"]
    often = replace(NIGHTLY, cron="*/20 * * * *")
    assert texts(often, "2026-10-25T00:10Z", 3) == ["10-25 00:20", "10-25 00:40", "10-25 01:00"], "it is the first 2:10"
    assert texts(often, "2026-10-25T01:20Z", 1) == ["10-25 01:40"], "not the same time again: it is the second 2:20"
    assert texts(NIGHTLY, "2026-10-25T01:10Z", 2) == ["10-26 01:30", "10-27 01:30"], "it is the second 2:10"


@pytest.mark.slow
@pytest.mark.parametrize("cron", ["30 2 * * *", "0,30 1-3 * * *", "15 */2 * * *", "5 2 * * 0", "*/20 2 * * *"])
@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Europe/Berlin", "2026-03-28"),
        ("Europe/Berlin", "2026-10-24"),
        ("Australia/Lord_Howe", "2026-10-03"),  # half an hour is skipped
        ("Australia/Lord_Howe", "2026-04-04"),
        ("Pacific/Apia", "2011-12-29"),  # a day is skipped
        ("UTC", "2026-03-28"),
    ],
)
def test_six_fields_fire_at_the_times_of_five(cron: str, zone: str, day: str) -> None:
    five = replace(NIGHTLY, cron=cron, timezone=zone)
    begin = ms(f"{day}T00:00Z")

    for since_ms in range(begin, begin + 72 * 3_600_000, 85 * 60_000):
        expected = list(islice(five.after(since_ms), 5))
        assert list(islice(replace(five, cron=f"0 {cron}").after(since_ms), 5)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("cron", ["30 2 * * *", "0 30 2 * * *"])
@pytest.mark.parametrize("missed", ["skip", "once"])
async def test_it_fires_once_a_time_across_a_change_of_summer_time(missed: Any, cron: str) -> None:
    world = World(replace(NIGHTLY, cron=cron, missed=missed), "2026-10-24T20:00Z")
    process = world.process()
    assert await world.at("2026-10-24T20:00Z", process) == []
    found = [
        await world.at(f"2026-10-25T{hour:02}:{minute:02}:02Z", process) for hour in range(3) for minute in range(60)
    ]
    assert [each for each in found if each] == [["schedule-nightly-20261025T003000Z"]]


async def test_a_process_that_died_before_it_recorded_a_firing_is_followed_by_one_with_the_same_id() -> None:
    world = World(NIGHTLY, "2026-11-25T20:00Z")
    await world.process().look(owner="one")
    world.publisher.then = lambda: setattr(world.store, "failing", StoreUnavailable("died"))
    with pytest.raises(StoreUnavailable):
        await world.at("2026-11-26T01:30:05Z", world.process())
    world.publisher.then, world.store.failing = None, None

    assert await world.at("2026-11-26T01:30:14.999Z", world.process(), owner="two") == [], "the lease still holds"
    ids = await world.at("2026-11-26T01:30:15Z", world.process(), owner="two")

    assert ids == ["schedule-nightly-20261126T013000Z"] == [world.publisher.published[0].message_id]
    assert world.publisher.published[0].body == world.publisher.published[1].body
    assert await world.at("2026-11-26T01:30:21Z", world.process(), owner="two") == []


@pytest.mark.parametrize(
    ("missed", "published"), [("skip", []), ("once", ["schedule-nightly-20261126T013000Z"])], ids=["skip", "once"]
)
async def test_missed_times_are_told_and_run_once_or_not(missed: Any, published: list[str]) -> None:
    world = World(replace(NIGHTLY, missed=missed), "2026-11-20T12:00Z")
    await world.process().look(owner="one")

    with capture_logs() as logs:
        assert await world.at("2026-11-26T09:00Z", world.process(), owner="one") == published

    (told,) = [each for each in logs if each["event"] == "schedule.missed"]
    assert (told["schedule"], told["count"], told["runs_once"]) == ("nightly", 6 - len(published), missed == "once")
    assert await world.at("2026-11-26T09:01Z", world.process(), owner="one") == []


async def test_a_time_at_which_nothing_could_be_published_is_told_as_late_until_it_runs() -> None:
    world = World(NIGHTLY, "2026-11-25T20:00Z")
    process, other = world.process(), world.process()
    assert process.late() == {}, "nothing is known yet"
    await process.look(owner="one")
    await other.look(owner="two")
    assert (process.late(), other.late()) == ({"nightly": 0.0}, {})
    world.publisher.failure = BrokerUnreachable("away")

    await world.at("2026-11-26T01:30:30Z", process)
    assert process.late() == {"nightly": 30.0}
    world.publisher.failure = None
    await world.at("2026-11-26T01:30:50Z", process)
    assert process.late() == {"nightly": 0.0}


async def test_a_pause_that_ended_while_another_process_published_costs_no_later_time() -> None:
    world = World(NIGHTLY, "2026-11-25T20:00Z")
    one, two = world.process(), world.process()
    await one.look(owner="one")
    pause = a_pause("schedule", "nightly")
    await world.pauses.pause(pause)
    await world.brake.read()
    await world.at("2026-11-26T01:30:01Z", one, owner="one")
    await world.pauses.resume(pause.id)
    await world.brake.read()
    await world.at("2026-11-26T09:00Z", two, owner="two")
    await world.at("2026-11-26T09:00:01Z", one, owner="one")  # it is not the one that publishes
    assert await world.at("2026-11-27T01:30:01Z", one, owner="one") == ["schedule-nightly-20261127T013000Z"]


async def test_a_schedule_whose_last_request_failed_is_told_until_one_succeeds() -> None:
    world = World(replace(NIGHTLY, cron="*/10 * * * *"), "2026-11-26T01:29:00Z")
    process = world.process()
    await process.look(owner="one")
    (first,) = await world.at("2026-11-26T01:30:00Z", process)
    await world.begin(first)
    assert process.failed() == {}
    (second,) = await world.at("2026-11-26T01:40:00Z", process)
    await world.end(first, "attempts_exhausted")
    await world.at("2026-11-26T01:40:01Z", process)
    assert process.failed() == {"nightly": True}, "it ended after the next one had begun"
    assert process.figures()["nightly"]["failed"] == f"{first} ended as attempts_exhausted"
    await world.at("2026-11-26T01:40:02Z", process)
    assert process.failed() == {"nightly": True}
    await world.end(second, "")
    await world.at("2026-11-26T01:40:03Z", process)
    assert process.failed() == {"nightly": False}
    (third,) = await world.at("2026-11-26T01:50:00Z", process)
    await world.end(third, "cancelled")
    await world.at("2026-11-26T01:50:01Z", process)
    assert process.failed() == {"nightly": False}, "somebody wanted it so"
    assert world.process().failed() == {}


async def test_a_schedule_of_every_second_that_was_away_for_a_year_is_not_counted_through() -> None:
    spec = ScheduleSpec(name="s", cron="* * * * * *", key="k", body=b"")
    now_ms = ms("2026-11-26T09:00Z")

    due = spec.due(ms("2025-11-26T09:00Z"), now_ms)

    assert due[-1] == now_ms
    assert len(due) == 100


async def test_a_schedule_goes_on_although_a_clock_far_ahead_recorded_its_last_time() -> None:
    world = World(NIGHTLY, "2026-11-25T20:00Z")
    await world.process().look(owner="one")
    await world.at("2031-01-01T01:30:01Z", world.process())
    process = world.process()

    with capture_logs() as logs:
        assert await world.at("2026-11-25T21:00:00Z", process) == []

    assert [each["event"] for each in logs] == ["schedule.ahead"]
    assert await world.at("2026-11-26T01:30:01Z", process) == ["schedule-nightly-20261126T013000Z"]


async def test_a_fault_in_one_schedule_is_told_once_and_stops_no_other() -> None:
    world = World(NIGHTLY, "2026-11-25T20:00Z")
    broken = replace(NIGHTLY, name="broken", key="")
    process = world.process([broken, NIGHTLY])
    await process.look(owner="one")

    with capture_logs() as logs:
        found = await world.at("2026-11-26T01:30:01Z", process)
        assert found == ["schedule-nightly-20261126T013000Z"]
        for second in (2, 3):
            assert await world.at(f"2026-11-26T01:30:0{second}Z", process) == []

    assert [each["schedule"] for each in logs if each["event"] == "schedule.failed"] == ["broken"]
    assert [each["trouble"] for each in process.figures().values()] == ["AssertionError", None]
    process.specs = [replace(broken, key=NIGHTLY.key), NIGHTLY]
    await world.at("2026-11-26T01:30:04Z", process)
    assert [each["trouble"] for each in process.figures().values()] == [None, None], "it is mended"
