"""`lanekeeper demo`: its verdict is correct, and it leaves nothing behind, however it ends."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.brokers import Vhost
from tests.support.forks import HOUSE
from tests.support.processes import COMMAND, environment, lanekeeper, run
from tests.support.waiting import until

LONG_S = 240
"""For a start, a broker and the first requests, or the whole demo, on a busy machine."""
QUICK = {"LANEKEEPER_LANES__BATCH__SLOTS": "100"}
"""The flood takes two seconds, not twelve; everything else is the same."""
DEAD_PROXY = "socks5://127.0.0.1:9"
"""All servers of the demo are on this machine, so that it uses none."""
ENDLESS = {"LANEKEEPER_LANES__BATCH__SLOTS": "1"}
"""The flood takes minutes: its middle is not over before the test has seen it."""


def left_on(vhost: Vhost) -> list[str]:
    """The queues and exchanges in a virtual host, except those that every virtual host has."""
    names = [each["name"] for what in ("queues", "exchanges") for each in vhost.api("GET", f"{what}/{vhost.quoted}")]
    return [name for name in names if name and not name.startswith("amq.")]


@pytest.mark.timing
async def test_the_demo_answers_everything_and_its_verdict_says_so(vhost: Vhost, tmp_path: Path) -> None:
    of_the_real_account = {"LANEKEEPER_BUDGET__REQUESTS_PER_MIN": "30"}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), DEAD_PROXY)
    environ = environment(vhost, **QUICK, **of_the_real_account, **proxies)
    code, lines = await run("demo", environ=environ, folder=tmp_path, within_s=LONG_S)
    print("\n".join(lines))  # whichever of these fails
    told = " ".join(" ".join(lines).split())
    assert code == 0, told
    for number in (1, 2, 3):
        assert told.count(f"Act {number}: ") == 1
    assert told.count("OK: ") == 3
    assert len(re.findall(r"40/40 +2 ", told)) == 4, "with lanes, and first come first served"
    assert len(re.findall(r"500/500 +20 ", told)) == 2
    assert re.search(r"critical chats waited less than .* In one queue half waited longer than ", told)
    assert re.search(r"the kill interrupted [1-9]\d* calls; 0 of 60 requests were lost", told)
    assert "20 were answered from the store, with 0 further calls of the model" in told
    assert re.search(r"critical requests waited less than [\d.]+ m?s, and the provider refused no call", told)
    assert "Now try" in told
    assert max(map(len, lines)) <= 80
    assert "FAILED" not in told
    await until(lambda: not left_on(vhost))


async def test_the_demo_fails_if_a_lane_is_broken(vhost: Vhost, tmp_path: Path) -> None:
    broken = {
        "LANEKEEPER_LANES__CRITICAL__MODEL": "claude-no-such-model",
        "LANEKEEPER_PRICES__MODELS": '{"claude-no-such-model": {"input": 1, "output": 5}}',  # no provider has it
    }
    environ = environment(vhost, **QUICK, **broken)
    code, lines = await run("demo", environ=environ, folder=tmp_path, within_s=LONG_S)
    told = "\n".join(lines)
    assert code == 1, told
    assert "FAILED: 40 requests were not answered right" in told
    assert "FAILED: act 1" in told
    assert "claude-no-such-model" in told, "and why"
    assert "Now try" not in told
    await until(lambda: not left_on(vhost))


@pytest.mark.parametrize(
    ("moment", "number"), [("while it declares", signal.SIGTERM), ("in the middle", signal.SIGINT)]
)
async def test_an_interrupted_demo_leaves_nothing_on_the_broker(
    vhost: Vhost, tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    environ = environment(vhost, **ENDLESS)
    async with lanekeeper("demo", environ=environ, folder=tmp_path) as demo:
        if moment == "in the middle":
            await until(lambda: [line for line in demo.lines if "answered" in line] or demo.has_ended, within_s=LONG_S)
        await until(lambda: left_on(vhost), within_s=LONG_S)
        demo.send(number)
        assert await demo.ended() == 130
    await until(lambda: not left_on(vhost))


@pytest.mark.parametrize("moment", ["while the broker starts", "in the middle"])
async def test_an_interrupted_demo_leaves_no_process_container_or_folder(tmp_path: Path, moment: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environ = {**environment(None, TMPDIR=str(temporary), **ENDLESS), "PYTHONPATH": str(HOUSE)}
    beside = (sys.executable, "-m", "tests.support.with_broker", "--", sys.executable, "-m", COMMAND, "demo")
    demo = await asyncio.create_subprocess_exec(*beside, env=environ, cwd=tmp_path, stdout=PIPE, stderr=DEVNULL)
    if moment == "in the middle":
        assert demo.stdout is not None
        while b"answered" not in (line := await demo.stdout.readline()):
            assert line, "it ended by itself"
    await until(lambda: owners_of_brokers(demo.pid), within_s=LONG_S)
    theirs = psutil.Process(demo.pid).children(recursive=True)
    words = [word for line in owners_of_brokers(demo.pid) for word in line]
    containers = [word.removeprefix("--name=") for word in words if word.startswith("--name=")]
    demo.send_signal(signal.SIGINT)
    await asyncio.wait_for(demo.communicate(), LONG_S)
    assert demo.returncode == 130
    await until(lambda: not [each for each in theirs if each.is_running() and each.status() != psutil.STATUS_ZOMBIE])
    assert not list(temporary.iterdir())
    assert list(temporary.parent.iterdir()) == [temporary]
    if containers:  # it was started in Docker
        assert not await docker("ps", "--all", "--quiet", *(f"--filter=name={each}" for each in containers))


def owners_of_brokers(process: int) -> list[list[str]]:
    """The command lines of `docker run`, or of the shell of an installed node."""
    found = []
    for each in psutil.Process(process).children():
        with suppress(psutil.NoSuchProcess):  # or a zombie, as a look for images that has just ended
            found.append(each.cmdline())
    return [line for line in found if line[1:2] in (["run"], ["-c"])]


async def docker(*line: str) -> str:
    process = await asyncio.create_subprocess_exec("docker", *line, stdout=PIPE, stderr=DEVNULL)
    out, _ = await process.communicate()
    return out.decode()
