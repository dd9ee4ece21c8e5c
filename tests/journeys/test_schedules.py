"""Recurring requests: across a broker's restart, a leader's death and a pause; listed, and run by command."""

import asyncio
import json
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.support import forks
from tests.support.brokers import Vhost
from tests.support.private_broker import PrivateBroker
from tests.support.processes import COMMAND, environment, lanekeeper
from tests.support.serving import HeldCalls
from tests.support.waiting import STARTED_S, until

EVERY_SECOND = {
    "LANEKEEPER_SCHEDULES__TICK__CRON": "* * * * * *",
    "LANEKEEPER_SCHEDULES__TICK__KEY": "normal.tests.tick",
    "LANEKEEPER_SCHEDULES__TICK__BODY": '{"prompt": "tick"}',
}
DAILY = {
    "LANEKEEPER_SCHEDULES__DAILY__CRON": "0 7 * * *",
    "LANEKEEPER_SCHEDULES__DAILY__TIMEZONE": "Europe/Berlin",
    "LANEKEEPER_SCHEDULES__DAILY__KEY": "normal.tests.daily",
    "LANEKEEPER_SCHEDULES__DAILY__BODY": '{"prompt": "the daily report"}',
}


async def command(environ: Mapping[str, str], folder: Path, *line: str) -> str:
    process = await forks.begin(COMMAND, *line, environ=environ, folder=folder)
    out, err = await asyncio.wait_for(process.communicate(), timeout=STARTED_S)
    assert process.returncode == 0, (out + err).decode()
    return out.decode()


async def listed(environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await command(environ, folder, "schedules", "list", "--json"))
    return found


async def test_another_worker_goes_on_when_the_leader_is_killed_and_no_time_is_called_twice(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with HeldCalls() as api:
        environ = environment(vhost, api, **EVERY_SECOND)
        async with (
            lanekeeper("serve", environ=environ, folder=tmp_path) as first,
            lanekeeper("serve", environ=environ, folder=tmp_path) as second,
        ):
            await asyncio.gather(first.ready(), second.ready())
            both = (first, second)
            await until(lambda: any(len(each.told("schedule.fired")) >= 3 for each in both))
            leader, other = sorted(both, key=lambda each: -len(each.told("schedule.fired")))
            assert not other.told("schedule.fired"), "one leader"
            leader.send(signal.SIGKILL)
            died_s = time.monotonic()
            await until(lambda: len(other.told("schedule.fired")) >= 3)
            print(f"the other worker fired {time.monotonic() - died_s:.1f} s after the leader's death")
            ids = [each["id"] for process in both for each in process.told("schedule.fired")]
        assert len(ids) == len(set(ids)), "each time is one request"
        # The leader may have died in a call, or before it told of what it had published.
        assert sum(call.outcome != "client_gone" for call in api.calls) <= len(ids) + 1


async def test_times_that_pass_while_the_broker_is_away_run_once_when_it_is_back(
    own_broker: PrivateBroker, tmp_path: Path
) -> None:
    async with HeldCalls() as api:
        environ = environment(own_broker, api, **EVERY_SECOND)
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
            await worker.ready()
            await until(lambda: len(worker.told("schedule.fired")) >= 6)  # a younger queue may not survive the kill
            await own_broker.kill()
            await until(lambda: worker.told("schedule.unpublished"))
            before = worker.told("schedule.fired")[-1]["id"]
            await own_broker.start()
            await until(lambda: len([each for each in worker.told("schedule.fired") if each["id"] > before]) >= 3)
            ids = [each["id"] for each in worker.told("schedule.fired")]
            assert len(ids) == len(set(ids))
            told = max(each["count"] for each in worker.told("schedule.missed"))
            assert told >= 2, "each second that passed was told, and one request was published for them"
            await until(lambda: len(api.calls) == len(worker.told("schedule.fired")))


async def test_a_schedule_is_listed_run_paused_and_let_go_by_command(vhost: Vhost, tmp_path: Path) -> None:
    async with HeldCalls() as api:
        environ = environment(vhost, api, **EVERY_SECOND, **DAILY)
        async with lanekeeper("serve", environ=environ, folder=tmp_path) as worker:
            await worker.ready()
            await until(lambda: worker.told("schedule.fired", schedule="tick"))
            found = await listed(environ, tmp_path)
            assert found["tick"]["last"].startswith("schedule-tick-20")
            assert (found["daily"]["last"], found["daily"]["timezone"]) == (None, "Europe/Berlin")
            assert found["daily"]["next"][11:] in ("05:00:00.000Z", "06:00:00.000Z")

            id = (await command(environ, tmp_path, "schedules", "run", "daily")).strip()
            assert id.startswith("schedule-daily-20")
            assert "the daily report" in await command(environ, tmp_path, "result", id, "--wait", "30s")

            await command(environ, tmp_path, "schedules", "pause", "tick", "--why", "no data")
            assert "no data" in (await listed(environ, tmp_path))["tick"]["paused"]
            assert "schedule tick is paused" in await command(environ, tmp_path, "status")
            paused = datetime.fromisoformat((await worker.tells("brake.pulled", name="tick"))["timestamp"])
            await until(lambda: datetime.now(UTC) > paused + timedelta(seconds=3))
            late = f"schedule-tick-{paused + timedelta(seconds=1):%Y%m%dT%H%M%SZ}"
            assert not [each for each in worker.told("schedule.fired") if each["id"] > late]
            await command(environ, tmp_path, "resume", "--schedule", "tick")
            await until(lambda: [each for each in worker.told("schedule.fired", schedule="tick") if each["id"] > late])
            assert sum(each["count"] for each in worker.told("schedule.missed", schedule="tick")) >= 2
