"""Dead letters have a limit: the oldest beyond it are removed with a warning, and written to a file if a folder is
set."""

import asyncio
import json
import stat
from pathlib import Path

import pytest
import structlog

from lanekeeper.telemetry import signals
from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


@pytest.mark.parametrize("bound", [{"max_count": 2}, {"keep_s": 3600}])
async def test_the_oldest_dead_letters_beyond_the_limit_are_exported_and_the_others_stay(
    vhost: Vhost, tmp_path: Path, bound: dict[str, int]
) -> None:
    folder = tmp_path / "dead"
    async with serving(vhost.amqp_url, dead={"folder": folder, **bound}) as worker, requester(vhost.amqp_url) as app:
        await app.read_events()
        for number in range(4):
            await app.ask(b"rubbish", message_id=f"m-{number}")
        gone = await worker.parts.dead_letters.look()

        assert gone == (2 if "max_count" in bound else 0)
        await until(lambda: app.holds(4 - gone, "lane.dead"))
        if gone:
            (file,) = folder.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert [json.loads(line)["message_id"] for line in file.read_text().splitlines()] == ["m-0", "m-1"]
            await until(lambda: "removed" in app.events_of("m-0") and "removed" in app.events_of("m-1"))
            assert (worker.parts.dead_letters.exported, worker.parts.dead_letters.dropped) == (2, 0)
            assert await worker.parts.dead_letters.look() == 0


async def test_dead_letters_that_are_too_old_are_dropped_with_a_warning_if_there_is_no_folder(vhost: Vhost) -> None:
    async with serving(vhost.amqp_url, dead={"keep_s": 1}) as worker, requester(vhost.amqp_url) as app:
        await app.read_events()
        for number in range(2):
            await app.ask(b"rubbish", message_id=f"m-{number}")

        async def are_gone() -> bool:
            await worker.parts.dead_letters.look()
            return worker.parts.dead_letters.dropped == 2

        with structlog.testing.capture_logs() as logs:
            await until(are_gone)
        assert sum(each["removed"] for each in logs if each["event"] == signals.DEAD_LETTERS_REMOVED) == 2
        await until(lambda: "removed" in app.events_of("m-0") and "removed" in app.events_of("m-1"))
        await until(lambda: app.holds(0, "lane.dead"))


async def test_several_workers_remove_each_dead_letter_once(vhost: Vhost, tmp_path: Path) -> None:
    """One after the other and at the same time: the broker delivers each dead letter to only one of them."""
    folder, dead = tmp_path / "dead", {"max_count": 2}
    async with (
        serving(vhost.amqp_url, dead={"folder": folder, **dead}) as one,
        serving(vhost.amqp_url, dead={"folder": folder, **dead}) as other,
        requester(vhost.amqp_url) as app,
    ):
        for number in range(12):
            await app.ask(b"rubbish", message_id=f"m-{number}")
        both = [each.parts.dead_letters for each in (one, other)]

        async def ten_are_gone_and_two_are_back() -> bool:
            """While a worker looks, it holds the eight oldest; another that looks then sees too few, and ends early."""
            await asyncio.gather(*(each.look() for each in both))
            return sum(each.exported for each in both) >= 10 and await app.depth("lane.dead") == 2

        await until(ten_are_gone_and_two_are_back)
        ids = [json.loads(line)["message_id"] for file in folder.iterdir() for line in file.read_text().splitlines()]
        assert len(ids) == len(set(ids)) == sum(each.exported for each in both) == 10
