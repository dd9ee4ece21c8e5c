"""What workers note for the page's last hour."""

import time

from tests.consumers.state.conftest import Opened


async def test_the_notes_of_the_last_hour_outlive_the_workers_that_wrote_them(opened: Opened) -> None:
    minute = time.time_ns() // 60_000_000_000
    first, second = await opened(), await opened()
    await first.note_history(minute - 61, "a", "too old")
    await first.note_history(minute - 5, "a", '{"ä": 1}')
    await second.note_history(minute - 5, "b", "2")
    await first.note_history(minute, "a", "3")
    third = await opened()
    found = {at - minute: dict(rows) for at, rows in (await third.history(minute)).items() if rows}
    assert found == {-5: {"a": '{"ä": 1}', "b": "2"}, 0: {"a": "3"}}
