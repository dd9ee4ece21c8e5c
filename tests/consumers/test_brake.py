"""What a process knows of the pauses: until they end, also while the store is away, and for a while after."""

import pytest

from consumers.brake import Brake, read_pause
from consumers.state.base import Pause, StoreUnavailable
from tests.support.jobs import NOW_MS, HeldPauses, a_pause


class World:
    def __init__(self, *pauses: Pause) -> None:
        self.now_ms = NOW_MS
        self.store = HeldPauses(*pauses)
        self.brake = Brake(self.store, now_ms=lambda: self.now_ms)


@pytest.mark.parametrize("until", ["9999-12-31T23:59:59-05:00", "9999-12-31T23:59:59.9999999Z"])
async def test_a_pause_until_the_end_of_the_calendar_in_any_zone_is_a_pause_like_others(until: str) -> None:
    pause = read_pause({"kind": "tenant", "name": "crm", "until": until}, now_ms=NOW_MS, known={})
    world = World(pause)
    await world.brake.read()
    assert world.brake.of("tenant", "crm") == pause
    assert pause.as_json()["until"] == "9999-12-31T23:59:59.000Z"


async def test_nothing_is_taken_until_the_pauses_were_read_and_then_the_last_known_ones_hold() -> None:
    world = World(a_pause())
    world.store.is_away = True
    with pytest.raises(StoreUnavailable):
        await world.brake.read()
    assert world.brake.behind is not None
    world.store.is_away = False
    await world.brake.read()
    assert [world.brake.behind] == [None]
    world.store.is_away, world.store.held = True, {}
    with pytest.raises(StoreUnavailable):
        await world.brake.read()
    assert world.brake.of("lane", "batch") == a_pause()
