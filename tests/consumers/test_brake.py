"""What a process knows of the pauses: until they end, also while the store is away, and for a while after."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from consumers.brake import Brake, read_pause
from consumers.state.base import Pause, StoreUnavailable
from lanekeeper.contract.problems import RequestProblem
from tests.support.jobs import NOW_MS, HeldPauses, a_pause, routes_of

ONE, TWO = routes_of("one", "two").of("critical", "", "claude-x").routes
WHOSE: dict[str, Any] = {"lane": "batch", "tenant": "crm", "app": "jobs", "routes": (ONE, TWO)}


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


@pytest.mark.parametrize(
    ("paused", "is_held"),
    [
        ([a_pause("tenant", "crm")], True),
        ([a_pause("app", "jobs")], True),
        ([a_pause("tenant", "jobs"), a_pause("app", "crm")], False),
        ([a_pause("lane", "batch")], False),  # its pools do not take it
        ([a_pause("model", "claude-x")], True),
        ([a_pause("provider", "one")], False),
        ([a_pause("provider", "one"), a_pause("provider", "two")], True),
    ],
)
async def test_a_request_is_held_if_it_or_all_its_routes_are_paused(paused: list[Pause], is_held: bool) -> None:
    world = World(*paused)
    await world.brake.read()
    assert (world.brake.of_request(tenant="crm", app="jobs", routes=(ONE, TWO)) is not None) is is_held


async def test_a_late_request_is_told_of_the_pause_in_its_time_also_when_that_has_ended() -> None:
    world = World(a_pause("lane", "batch"), a_pause("provider", "one"))
    await world.brake.read()
    world.now_ms += 5000
    assert world.brake.during(**WHOSE, from_ms=NOW_MS + 1, to_ms=NOW_MS + 2)
    world.store.held = {}
    await world.brake.read()
    world.now_ms += 5000
    late = world.brake.during(**WHOSE, from_ms=NOW_MS + 4999, to_ms=NOW_MS + 6000)
    assert late is not None
    assert late.description.startswith("lane batch was paused by an operator at 20")
    assert " until 20" in late.description
    assert late.description.endswith(": too dear")
    assert world.brake.during(**WHOSE, from_ms=NOW_MS + 5000, to_ms=NOW_MS + 6000) is None
    assert world.brake.during(**WHOSE, from_ms=NOW_MS - 9, to_ms=NOW_MS) is None
    assert world.brake.during(**{**WHOSE, "lane": "normal"}, from_ms=NOW_MS, to_ms=NOW_MS + 1) is None


async def test_beginning_and_end_are_logged_once_with_who_and_why() -> None:
    world = World(a_pause())
    with capture_logs() as logs:
        for _ in range(2):
            await world.brake.read()
        world.now_ms += 61_000
        world.store.held = {}
        for _ in range(2):
            await world.brake.read()
    told = {"kind": "lane", "name": "batch", "until": None, "who": "ann@desk", "why": "too dear"}
    assert logs == [
        {"event": "brake.pulled", "log_level": "warning", **told},
        {"event": "brake.released", "log_level": "warning", "paused_s": 61, **told},
    ]


def test_an_unknown_provider_is_refused_where_they_are_known() -> None:
    fields = {"kind": "provider", "name": "antropic"}
    assert read_pause(fields, now_ms=NOW_MS, known={}).name == "antropic"
    with pytest.raises(RequestProblem, match="no provider 'antropic'; allowed: anthropic"):
        read_pause(fields, now_ms=NOW_MS, known={"provider": ("anthropic",)})
