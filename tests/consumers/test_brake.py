"""What a process knows of the pauses: until they end, also while the store is away, and for a while after."""

import pytest

from consumers.brake import Brake
from consumers.state.base import Pause, StoreUnavailable
from tests.support.jobs import NOW_MS, HeldPauses, a_pause


class World:
    def __init__(self, *pauses: Pause) -> None:
        self.now_ms = NOW_MS
        self.store = HeldPauses(*pauses)
        self.brake = Brake(self.store, now_ms=lambda: self.now_ms)


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
