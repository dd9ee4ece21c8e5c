"""`LANEKEEPER_PROFILE=production`: a worker that does not meet the profile reports everything at once, and does not
start."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lanekeeper import Client, Problem
from tests.support.brokers import Vhost
from tests.support.processes import environment, lanekeeper, run
from tests.support.serving import serving
from tests.support.users import imported_users
from topology.declaration import RECOMMENDED, is_before


@pytest.mark.parametrize("command", ["serve", "consume"])
async def test_a_worker_that_does_not_meet_the_profile_reports_all_findings_and_does_not_start(
    vhost: Vhost, tmp_path: Path, command: str
) -> None:
    environ = environment(
        vhost.amqp_url, None, LANEKEEPER_PROFILE="production", LANEKEEPER_LOG_CONTENT="true", LANEKEEPER_STORE_URL=""
    )
    async with lanekeeper(command, "--port", "0", environ=environ, folder=tmp_path) as worker:
        assert await worker.ended() == 2
        said = " ".join(each["event"] for each in worker.events)

    assert "not fit for production" in said
    expected = {"log content"}
    if urlsplit(vhost.amqp_url).username == "guest":
        expected.add("broker user")
    if is_before(vhost.version, RECOMMENDED):
        expected.add("broker version")
    assert [each for each in expected if f"{each}:" not in said] == []


@pytest.mark.oldest_version
async def test_an_administrator_is_refused_as_a_workers_user_and_the_role_worker_is_accepted(
    vhost: Vhost, tmp_path: Path
) -> None:
    async with imported_users(vhost) as users:
        plain = {"LANEKEEPER_PROFILE": "production"}
        admin = environment(vhost.amqp_url, None, **plain)
        worker = environment(users.url("worker"), None, **plain)
        found = [await run("check", "--json", "--simulate", environ=each, folder=tmp_path) for each in (admin, worker)]

    rights = [[each for each in json.loads("".join(lines)) if each["what"] == "broker rights"] for _, lines in found]
    assert [[each["well"] for each in each_found] for each_found in rights] == [[False], []]
    assert "topology export --user worker:worker" in rights[0][0]["text"]


async def test_a_request_without_user_id_is_refused_and_one_with_it_belongs_to_that_user(vhost: Vhost) -> None:
    async with (
        imported_users(vhost) as users,
        serving(vhost.amqp_url, declares=False, require_user_id=True),
        Client(users.url("client"), identified=True) as mine,
        Client(users.url("client")) as nobody,
    ):
        key = f"critical.{users.users['client'].name}.chat"
        with pytest.raises(Problem, match="user_id: missing; publish with the property user_id"):
            await nobody.request({"prompt": "x"}, key=key)
        answer = await mine.request({"prompt": "mine"}, key=key, message_id="m-1")
        again = await asyncio.wait_for(mine.result("m-1", wait_s=5), 60)

        assert answer.text == again.text == "echo: mine"
