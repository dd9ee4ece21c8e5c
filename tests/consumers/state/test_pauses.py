"""What operators have paused, for every engine."""

import json
from typing import Any

import pytest

from consumers.state import base
from consumers.state.base import Pause
from consumers.state.store import Store
from tests.consumers.state.conftest import in_ms
from tests.support.waiting import until


def a_pause(name: str = "batch", **given: Any) -> Pause:
    fields = {
        "kind": "lane",
        "since_ms": 1_790_000_000_000,
        "until_ms": None,
        "who": "ann@desk",
        "why": "too dear",
        **given,
    }
    return Pause(name=name, **fields)


async def test_a_pause_ends_by_itself(store: Store) -> None:
    ended, ending = a_pause("ended", until_ms=in_ms(-1)), a_pause("ending", until_ms=in_ms(300))
    await store.pause(ended)
    await store.pause(ending)

    assert await store.pauses() == [ending]
    assert await store.resume(ended.id) is None

    async def none_is_left() -> bool:
        return await store.pauses() == []

    await until(none_is_left)
    assert await store.resume(ending.id) is None


async def test_there_is_a_limit_of_pauses_that_have_not_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PAUSES_AT_MOST", 3)
    for number in range(2):
        assert await store.pause(a_pause(str(number)))
    assert await store.pause(a_pause("ended", until_ms=in_ms(-1)))
    assert await store.pause(a_pause("last"))

    assert not await store.pause(a_pause("one more"))
    assert await store.pause(a_pause("last", why="another reason"))
    assert len(await store.pauses()) == 3


def test_a_pause_has_the_same_id_in_every_version_and_ends_the_moment_it_says() -> None:
    assert a_pause().id == "22346568eeb2"
    assert [a_pause(until_ms=7).has_ended(now_ms) for now_ms in (6, 7)] == [False, True]
    assert not a_pause().has_ended(7)


def test_of_stored_pauses_those_in_another_form_are_left_out_and_one_without_a_start_is_the_oldest() -> None:
    row = a_pause().as_json()
    found = base.pauses_in([json.dumps(each) for each in (row, {**row, "since": "?", "name": "x"}, {"id": "y"}, 7)])
    assert [(each.name, each.since_ms) for each in found] == [("x", 0), ("batch", 1_790_000_000_000)]
