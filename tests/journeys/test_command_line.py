"""The commands as people use them: in their own processes, with a real broker."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from lanekeeper.amqp.connection import Connection
from lanekeeper.contract.names import Names
from service.status import collect_status
from tests.support import forks
from tests.support.brokers import Vhost
from tests.support.defaults import LANES
from tests.support.forks import Forked
from tests.support.processes import COMMAND, Running, environment, lanekeeper
from tests.support.waiting import STARTED_S, until

SLOW = "[[latency: 120s]]"
"""For requests in the batch lane. In other lanes their deadline could pass while processes start on a busy machine."""


class Cli:
    """Runs commands of `lanekeeper`: to their end, or as long as a block lasts."""

    def __init__(self, vhost: Vhost, folder: Path) -> None:
        self.folder, self.environ = folder, environment(vhost)
        del self.environ["ANTHROPIC_API_KEY"]

    async def __call__(self, *line: str, text: str = "", **environ: str) -> tuple[int, str, str]:
        process = await self.begin(*line, text=text, **environ)
        out, err = await asyncio.wait_for(process.communicate(), timeout=STARTED_S)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def begin(self, *line: str, text: str = "", **environ: str) -> Forked:
        return await forks.begin(COMMAND, *line, environ={**self.environ, **environ}, folder=self.folder, text=text)

    @asynccontextmanager
    async def serving(self, *line: str) -> AsyncIterator[Running]:
        async with lanekeeper(*line, "--simulate", "--port", "0", environ=self.environ, folder=self.folder) as service:
            await service.ready()
            yield service

    async def running(self) -> int:
        """The number of running requests as in `lanekeeper status`, without starting a process for it."""
        async with Connection(self.environ["LANEKEEPER_AMQP_URL"], name="test") as connection:
            return sum(
                each.running or 0 for each in (await collect_status(connection, lanes=LANES, names=Names())).lanes
            )

    async def status_of_critical(self) -> dict[str, Any]:
        """As `status` shows it, once its worker has answered in time; a busy one may be too late."""

        async def shown() -> dict[str, Any] | None:
            code, out, _ = await self("status", "--json")
            assert code == 0
            critical: dict[str, Any] = json.loads(out)["lanes"][0]
            return critical if critical["workers"] else None

        found: dict[str, Any] = await until(shown)
        return found


@pytest.fixture
def cli(vhost: Vhost, tmp_path: Path) -> Cli:
    return Cli(vhost, tmp_path)


async def test_serve_answers_requests_of_send_and_stops_on_a_signal(cli: Cli) -> None:
    async with cli.serving("serve") as service:
        line = ("send", "--id", "mine-1", "three rivers")
        assert await cli(*line) == (0, "echo: three rivers\n", "lanekeeper: request mine-1\n")
        code, out, err = await cli("send", "--stream", "-", text="from a pipe")
        assert (code, out) == (0, "echo: from a pipe\n")
        assert re.fullmatch(r"lanekeeper: request [0-9a-f]{32}\n", err)

        code, out, _ = await cli("send", "--json", "--lane", "batch", "--delay", "200ms", "x")
        assert (code, json.loads(out)["model"]) == (0, "claude-haiku-5-5")

        code, out, err = await cli("send", "--id", "mine", "--model", "claude-nope", "x")
        assert (code, out) == (1, "")
        assert err.startswith("lanekeeper: request mine\nlanekeeper: provider_rejected (404): ")
        assert err.endswith("[request mine, 1 attempt]\n")

        assert await cli("send", "--no-wait", "--id", "later", "x") == (0, "later\n", "")

        critical = await cli.status_of_critical()
        assert (critical["workers"], critical["failed"]) == (1, 1)
        assert critical["answered"] >= 2

        url = await service.ready()
        async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as answer:
            assert (answer.status, await answer.json()) == (200, {"ready": True, "reasons": {}})

        service.send(signal.SIGTERM)
        assert await service.ended() == 0
        assert service.told("service.stopped")[0]["orphaned"] == 0


async def test_caps_in_the_settings_file_change_without_a_restart(cli: Cli) -> None:
    file = cli.folder / "lanekeeper.toml"

    def cap(requests: int) -> str:
        return f"[caps.lanes.normal]\nrequests = {requests}\n"

    async def ask(prompt: str) -> int:
        body = {"prompt": prompt}
        async with session.post(f"{url}/v1/messages", json=body, headers={"x-lane-deadline-ms": "20000"}) as got:
            return got.status

    file.write_text(cap(1))
    async with cli.serving("serve") as service, aiohttp.ClientSession() as session:
        url = await service.ready()
        assert [await ask("within"), await ask("over")] == [200, 504]

        file.write_text(cap(2))
        await service.tells("caps.read")
        assert [await ask("more"), await ask("over again")] == [200, 504]

        file.write_text("[caps.lanes.normal]\nrequests = -1\n")
        assert "requests" in (await service.tells("caps.unread"))["reason"]
        assert await ask("the last caps hold") == 504


FLOWS = """
[handlers.turned]
run = "own:turned"
[[pipelines.twice.steps]]
name = "turn"
handler = "turned"
[[pipelines.twice.steps]]
name = "ask"
prompt = "{{ turn }}"
"""


async def test_send_calls_handlers_and_runs_pipelines(cli: Cli) -> None:
    (cli.folder / "lanekeeper.toml").write_text(FLOWS)
    (cli.folder / "own.py").write_text("async def turned(given):\n    return given[::-1]\n")
    async with cli.serving("serve"):
        code, out, _ = await cli("send", "--type", "turned", '["a", 1]')
        assert (code, out) == (0, '[1,"a"]\n')
        code, out, _ = await cli("send", "--pipeline", "twice", "abc")
        assert (code, out) == (0, "echo: cba\n")
        code, _, err = await cli("send", "--debounce", "k", "--webhook", "https://a.example/h", "x")
        assert (code, "forbidden_webhook" in err or "x-lane-delay-ms" in err) == (1, True)
        code, _, err = await cli("send", "--type", "turned", "--model", "m", "x")
        assert (code, "--model" in err) == (2, True)


async def test_a_request_sent_without_waiting_can_be_fetched_and_a_running_one_cancelled(cli: Cli) -> None:
    async with cli.serving("serve"):
        await cli("send", "--no-wait", "--id", "later", "x")
        assert await cli("result", "--wait", "60s", "later") == (0, "echo: x\n", "")
        code, out, _ = await cli("result", "--json", "later")
        assert (code, json.loads(out)["role"]) == (0, "assistant")

        running = await cli.begin("send", "--lane", "batch", "--id", "slow", SLOW)
        await until(lambda: cli.running(), within_s=60)
        code, out, err = await cli("result", "slow")
        assert (code, out) == (1, "")
        assert err.startswith("lanekeeper: request slow has no result yet: running, ")
        code, out, _ = await cli("cancel", "--json", "slow")
        assert (code, json.loads(out)) == (0, {"id": "slow", "outcome": "told"})

        _, err_of_send = await asyncio.wait_for(running.communicate(), timeout=60)
        assert running.returncode == 1
        assert err_of_send.startswith(b"lanekeeper: request slow\nlanekeeper: cancelled (499):")
        code, out, err = await cli("result", "slow")
        assert (code, out, err[:28]) == (1, "", "lanekeeper: cancelled (499):")
        code, out, _ = await cli("cancel", "slow")
        assert (code, out) == (0, "slow had ended before; how: lanekeeper result slow\n")
        code, _, err = await cli("cancel", "--tenant", "acme", "slow")
        assert (code, "may not speak for tenant 'acme'" in err) == (1, True)
        code, out, _ = await cli("cancel", "never-published")
        assert (code, "no worker has seen it; recorded for when it comes" in out) == (0, True)
        code, _, err = await cli("result", "no such id")
        assert (code, "can be no request's id" in err, "--wait" in err) == (1, True, False)


@pytest.mark.parametrize("how", [[], ["--stream"]])
async def test_an_interrupted_send_cancels_its_request_and_reports_it(cli: Cli, how: list[str]) -> None:
    async with cli.serving("serve"):
        sending = await cli.begin("send", "--lane", "batch", *how, "--id", "slow", SLOW)
        assert await sending.stderr.readline() == b"lanekeeper: request slow\n"
        await until(lambda: cli.running(), within_s=60)
        sending.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(sending.communicate(), timeout=60)

        assert err.decode().splitlines() == [
            "lanekeeper: cancelling slow; Ctrl-C again leaves it running",
            "lanekeeper: slow is running: its worker has been told to stop",
        ]
        assert sending.returncode == 130
        code, _, err_of_result = await cli("result", "--wait", "60s", "slow")
        assert (code, err_of_result[:28]) == (1, "lanekeeper: cancelled (499):")


async def test_without_a_worker_every_command_reports_that_and_ends(cli: Cli) -> None:
    code, _, err = await cli("send", "x")
    assert (code, err.count("\n")) == (1, 2)
    assert "run: lanekeeper topology apply" in err

    assert (await cli("topology", "apply"))[0] == 0
    short = ["--set", "lanes.critical.deadline_s=0.5", "--set", "lanes.critical.call_timeout_s=0.5"]
    code, out, err = await cli("send", *short, "--id", "alone", "x")
    assert (code, out) == (1, "")
    _, waits, ends = err.splitlines()
    assert waits.startswith("lanekeeper: no worker takes the lane critical: ")
    assert ends.startswith("lanekeeper: no answer to alone within 5.5 s; ")
    code, _, err = await cli("result", "alone")
    assert (code, "no worker answered" in err) == (1, True)


async def test_consume_needs_the_topology_and_serves_only_its_lanes(cli: Cli) -> None:
    code, _, err = await cli("consume", "--simulate", "--lane", "batch")
    assert code == 1
    assert err.splitlines()[-1].endswith("run: lanekeeper topology apply")

    assert (await cli("topology", "apply"))[0] == 0
    async with cli.serving("consume", "--lane", "batch"):
        assert (await cli("send", "--lane", "batch", "x"))[0] == 0
        _, out, _ = await cli("status", "--json")

    assert [lane["consumers"] for lane in json.loads(out)["lanes"]] == [0, 0, 1]


@pytest.mark.oldest_version
async def test_plan_apply_and_verify_report_differences(cli: Cli, vhost: Vhost) -> None:
    code, out, _ = await cli("topology", "plan")
    assert code == 1
    assert "queue lane.critical is missing  (apply makes it)" in out
    assert "29 delay levels are missing" in out
    assert len(out.splitlines()) < 100
    _, whole, _ = await cli("topology", "plan", "--all")
    assert "queue lane.delay.28 is missing  (apply makes it)" in whole

    assert (await cli("topology", "apply"))[0] == 0
    assert await cli("topology", "plan") == (0, "nothing to change\n", "")
    assert await cli("topology", "verify") == (0, "as declared\n", "")

    vhost.api("DELETE", f"queues/{vhost.quoted}/lane.batch")
    code, out, _ = await cli("topology", "verify", "--json")
    assert code == 1
    assert [each["name"] for each in json.loads(out)["differences"] if each["what"] == "queue"] == ["lane.batch"]


@pytest.mark.every_version
async def test_exported_definitions_can_be_imported_and_equal_the_declared_topology(cli: Cli, vhost: Vhost) -> None:
    users = ["--user", f"w-{vhost.name}:worker"]
    code, out, _ = await cli("topology", "export", *users)
    assert code == 0

    try:
        vhost.api("POST", "definitions", json.loads(out))
        assert await cli("topology", "plan") == (0, "nothing to change\n", "")
    finally:
        vhost.api("DELETE", f"users/w-{vhost.name}")


async def test_check_passes_if_everything_is_correct(cli: Cli) -> None:
    simulated = await cli.begin("simulate", "--port", "0")
    try:
        url = (await asyncio.wait_for(simulated.stdout.readline(), timeout=60)).decode().strip()
        told = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "any"}
        assert (await cli("topology", "apply", **told))[0] == 0

        code, out, _ = await cli("check", "--json", **told)

        found = json.loads(out)
        assert (code, [each["text"] for each in found if each["well"] is False]) == (0, [])
        assert all(each["text"].startswith("not for production") for each in found[1:] if each["well"] is None)
        assert found[0]["text"] == f"ANTHROPIC_BASE_URL is {url}, from environment"
    finally:
        simulated.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(simulated.wait(), timeout=60) == 0


async def test_check_does_not_call_a_simulated_provider(cli: Cli) -> None:
    async with cli.serving("serve"):

        async def providers() -> dict[str, Any] | None:
            """What `check` says of them, once the worker has answered it in time."""
            code, out, _ = await cli("check", "--json")
            found: dict[str, Any] = {each["what"]: each for each in json.loads(out)}["providers"]
            return found if code == 0 else None

        found = await until(providers)
        assert found["well"] is None
        assert "the workers that run answer by a simulated one" in found["text"]
        await cli("send", "Name three rivers.")
        await cli.status_of_critical()
        _, told, _ = await cli("status")
        assert "$" not in told
        assert "provider simulated by all workers: nothing is spent" in told
    code, out, _ = await cli("check", "--simulate")
    assert code == 0
    assert "-      providers          not asked: answers are simulated" in out
    assert (await cli("check"))[0] == 1, "a key is missing, and nobody is simulated"


async def test_check_shows_a_user_with_few_rights_what_it_may_do(cli: Cli, vhost: Vhost) -> None:
    user = f"crm-{vhost.name}"
    (cli.folder / "passwords").write_text(f"{user}:secret\n")
    line = ("topology", "export", "--user", f"{user}:application:normal", "--passwords", "passwords")
    _, out, _ = await cli(*line)
    try:
        vhost.api("POST", "definitions", json.loads(out))
        url = str(URL(vhost.amqp_url).with_user(user).with_password("secret"))
        its = {"LANEKEEPER_AMQP_URL": url}

        code, out, _ = await cli("check", "--json", **its)
        found = {each["what"]: each for each in json.loads(out)}
        assert code == 0
        assert f"with keys normal.{user}.…" in found["permissions"]["text"]
        assert [found[each]["well"] for each in ("topology", "providers", "store", "bodies")] == [None] * 4

        code, _, err = await cli("send", "--lane", "normal", "--no-wait", "x", **its)
        assert code == 1
        assert f"--key normal.{user}.send" in err
        assert (await cli("send", "--key", f"normal.{user}.send", "--no-wait", "x", **its))[0] == 0
    finally:
        vhost.api("DELETE", f"users/{user}")


async def test_a_broken_pipe_prints_no_traceback(cli: Cli) -> None:
    process = await cli.begin("topology", "show", "--json")
    process.stdout._transport.close()  # type: ignore[attr-defined]
    err = (await process.stderr.read()).decode()
    await process.wait()

    assert "Traceback" not in err
    assert "unexpected" not in err


async def test_dead_letters_are_listed_shown_mended_and_dropped(cli: Cli) -> None:
    async def dead(*arguments: str) -> tuple[int, str, str]:
        return await cli("dead", *arguments)

    async with cli.serving("serve"):
        assert (await dead("list"))[:2] == (0, "no dead letters\n")
        for id in ("one", "two"):
            assert (await cli("send", "--id", id, "[[fault: invalid]]"))[0] == 1
        code, out, _ = await dead("list", "--json")
        found = json.loads(out)
        assert (code, found["matched"], [each["id"] for each in found["letters"]]) == (0, 2, ["two", "one"])
        cause = found["groups"][0]["cause"]
        assert cause in (await dead("list", "--since", "1h"))[1]
        assert (await dead("list", "--since", "never"))[0] == 2

        code, out, _ = await dead("show", "one")
        assert (code, "code: provider_rejected" in out, "[[fault: invalid]]" in out) == (0, True, True)
        assert (await dead("show", "none"))[0] == 1

        exported = (await dead("export"))[1]
        assert len(exported.splitlines()) == 2
        (cli.folder / "letters.jsonl").write_text(exported)
        (cli.folder / "wrong.json").write_text('{"max_tokens": "few"}')
        (cli.folder / "patch.json").write_text('{"prompt": "mended"}')
        assert (await dead("replay"))[0] == 2
        assert (await dead("replay", "--cause", cause, "--edit", "letters.jsonl"))[0] == 2
        code, _, told = await dead("replay", "--cause", cause, "--edit", "wrong.json")
        assert (code, "nothing was sent" in told) == (1, True)
        assert (await dead("replay", "--cause", cause, "--to-lane", "none"))[0] == 1
        code, out, told = await dead("replay", "one", "--edit", "patch.json", "--dry-run")
        assert (code, out) == (0, "1 would be replayed\n"), told[:400]
        assert (await dead("replay", "one", "--edit", "patch.json", "--rate", "5"))[:2] == (0, "1 replayed\n")
        code, out, _ = await cli("result", "--wait", "20s", "one")
        assert code == 0, out

        assert (await dead("drop", "two"))[0] == 1, "nobody answers the question"
        assert (await dead("drop", "two", "--yes"))[:2] == (0, "1 dropped\n")
        assert (await dead("drop", "two", "--yes"))[0] == 1
        assert (await dead("import", "letters.jsonl"))[:2] == (0, "2 imported\n")
        assert (await dead("import", "patch.json"))[0] == 2
        assert len(json.loads((await dead("list", "--json"))[1])["letters"]) == 2


async def test_init_writes_settings_that_work_and_overwrites_nothing_unasked(cli: Cli) -> None:
    line = ("init", "--provider", "simulated", "--lanes", "urgent,normal,nightly", "--create-users")
    code, out, err = await cli(*line)
    assert (code, err) == (0, ""), out
    assert "FAIL" not in out

    written = cli.folder / "lanekeeper.toml"
    text = written.read_text()
    assert written.stat().st_mode & 0o077 == 0
    code, shown, _ = await cli("settings", "--json")
    ranks = {each["name"]: each["value"] for each in json.loads(shown) if each["name"].endswith(".rank")}
    assert code == 0
    assert ranks["lanes.urgent.rank"] < ranks["lanes.normal.rank"] < ranks["lanes.nightly.rank"]

    code, _, err = await cli(*line)
    assert (code, written.read_text()) == (2, text)
    assert "lanekeeper.toml exists" in err
    assert "--force" in err


async def test_init_writes_nothing_if_an_answer_is_wrong(cli: Cli) -> None:
    code, _, err = await cli("init", "--lanes", "Urgent!")

    assert code == 2
    assert "Urgent!" in err
    assert [file.name for file in cli.folder.iterdir() if file.suffix in (".toml", ".txt")] == []
