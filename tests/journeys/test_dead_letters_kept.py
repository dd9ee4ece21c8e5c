"""Dead letters have a bound; the oldest beyond it go, loudly, into a file where there is a folder for it."""

import json
import stat

import pytest

from tests.support.house import house
from tests.support.requester import requester
from tests.support.waiting import until


@pytest.mark.default_broker_only
@pytest.mark.parametrize("bound", [{"max_count": 2}, {"keep_s": 3600}])
async def test_the_oldest_beyond_the_bound_are_exported_and_the_others_stay(vhost, tmp_path, bound) -> None:
    folder = tmp_path / "dead"
    async with house(vhost.amqp_url, dead={"folder": folder, **bound}) as home, requester(vhost.amqp_url) as app:
        await app.read_events()
        for number in range(4):
            await app.ask(b"rubbish", message_id=f"m-{number}")
        gone = await home.parts.dead_letters.look()

        assert gone == (2 if "max_count" in bound else 0)
        await until(lambda: _depth_is(app, 4 - gone))
        if gone:
            (file,) = folder.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert [json.loads(line)["message_id"] for line in file.read_text().splitlines()] == ["m-0", "m-1"]
            await until(lambda: "removed" in app.events_of("m-0") and "removed" in app.events_of("m-1"))
            assert (home.parts.dead_letters.exported, home.parts.dead_letters.dropped) == (2, 0)
            assert await home.parts.dead_letters.look() == 0


async def _depth_is(app, count: int) -> bool:
    return await app.depth("lane.dead") == count
