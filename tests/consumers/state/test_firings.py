"""When schedules fired last, for every engine."""

from consumers.state.base import Firing
from tests.consumers.state.conftest import Opened


async def test_the_last_firing_is_seen_by_every_process_and_an_older_one_changes_nothing(opened: Opened) -> None:
    here, there = await opened(), await opened()
    assert await here.firings() == {}

    await here.fired("nightly", Firing(1_790_000_000_000, ""))
    await here.fired("weekly", Firing(1, "schedule-weekly-x"))
    await here.fired("weekly", Firing(0, "older"))
    assert await there.firings() == {"nightly": Firing(1_790_000_000_000, ""), "weekly": Firing(1, "schedule-weekly-x")}

    await there.fired("nightly", Firing(1_790_000_060_000, "schedule-nightly-y"))
    await here.fired("nightly", Firing(1_790_000_030_000, "late"))
    assert (await here.firings())["nightly"] == Firing(1_790_000_060_000, "schedule-nightly-y")


async def test_a_firing_that_a_clock_ahead_recorded_is_lowered_by_who_names_it(opened: Opened) -> None:
    store = await opened()
    await store.fired("nightly", Firing(1_990_000_000_000, "ahead"))

    await store.fired("nightly", Firing(1_790_000_000_000, "ahead"), instead_of_ms=1_980_000_000_000)
    assert (await store.firings())["nightly"].at_ms == 1_990_000_000_000, "another one was stored meanwhile"
    await store.fired("nightly", Firing(1_790_000_000_000, "ahead"), instead_of_ms=1_990_000_000_000)
    assert (await store.firings())["nightly"] == Firing(1_790_000_000_000, "ahead")
