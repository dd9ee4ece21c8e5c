"""However a command with a private broker ends, it leaves no process, port or folder behind."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from service.private_broker import container, install, node
from service.private_broker.source import LOOPBACK, Steps

ROOT = Path(__file__).parents[2]
GONE_WITHIN_S = 60


@pytest.fixture(params=["docker", "installed"])
def source(request: pytest.FixtureRequest) -> str:
    source = str(request.param)
    steps = Steps()
    if source == "docker" and not (container.engine_answers(steps) and container.find_image(steps)):
        pytest.skip("no Docker engine, or no image of RabbitMQ 4.3")
    if source == "installed" and not node.installed():
        if not install.can_install():
            pytest.skip("no rabbitmq-server is installed")
        return "install"
    return source


@pytest.fixture
def start(source: str, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.with_broker", "--sources", source, "--", *command],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


def processes_of(folder: Path) -> list[str]:
    """All processes whose environment names this folder: our temporary one, which is also the node's home."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in value for value in process.environ().values()):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def is_open(url: str) -> bool:
    with socket.socket() as each:
        return each.connect_ex((LOOPBACK, urlsplit(url).port or 0)) == 0


def left_of(folder: Path) -> list[str]:
    return processes_of(folder) + [str(each) for each in folder.iterdir()]


def eventually_nothing_left(folder: Path) -> bool:
    until = time.monotonic() + GONE_WITHIN_S
    while left_of(folder) and time.monotonic() < until:
        time.sleep(0.05)
    return not left_of(folder)


def test_a_command_gets_a_broker_and_its_exit_code_is_returned(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    run = start("sh", "-c", "echo $LANEKEEPER_AMQP_URL $LANEKEEPER_MANAGEMENT_URL; exit 3")

    urls = run.communicate(timeout=240)[0].split()

    assert run.returncode == 3
    assert all(urlsplit(url).hostname == LOOPBACK for url in urls)
    assert not any(is_open(url) for url in urls)
    assert left_of(tmp_path) == []


def test_processes_that_the_command_leaves_running_are_ended(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    run = start("sh", "-c", "(setsid sleep 600 &); echo started")

    run.wait(timeout=240)

    assert left_of(tmp_path) == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_nothing_is_left_after_a_signal_while_it_runs(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, ending: signal.Signals
) -> None:
    run = start("sh", "-c", "echo $LANEKEEPER_AMQP_URL; exec sleep 600")
    assert run.stdout is not None
    url = run.stdout.readline().strip()
    assert is_open(url)

    run.send_signal(ending)

    assert run.wait(timeout=120) == 128 + ending
    assert left_of(tmp_path) == []
    assert not is_open(url)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_nothing_is_left_after_an_end_at_any_moment_of_its_start(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, ending: signal.Signals
) -> None:
    moment_s = random.uniform(0.3, 5)
    run = start("sleep", "600")
    time.sleep(moment_s)

    run.send_signal(ending)
    run.wait(timeout=120)

    assert eventually_nothing_left(tmp_path), f"after {moment_s:.2f} s: {left_of(tmp_path)}"
