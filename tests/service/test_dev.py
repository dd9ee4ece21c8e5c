"""`./dev` on a machine on which something is missing: it says so in a sentence, before the set-up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import debian
from tests.support.debian import see_to_a_broker
from tests.support.sources import ROOT


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without .venv, for which a machine has neither a broker nor apt."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "env", "dirname", "cat", "sed", "mkdir", "mktemp", "rm"):
        (programs / name).symlink_to(shutil.which(name) or "")
    (programs / "python3").symlink_to(sys.executable)
    house = tmp_path / "house"
    (house / "tests/support").mkdir(parents=True)
    shutil.copy(ROOT / "dev", house)
    text = (ROOT / "tests/support/debian.py").read_text()
    (house / "tests/support/debian.py").write_text(text.replace(":/usr/sbin:/usr/local/sbin", ""))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("LANEKEEPER_AMQP_URL", raising=False)
    return house


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "test", "interop", "upgrade-test"])
def test_without_a_broker_it_says_so_before_the_set_up(bare: Path, command: str) -> None:
    run = subprocess.run([bare / "dev", command], capture_output=True, text=True, check=False)

    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("./dev: no broker to be had: set LANEKEEPER_AMQP_URL, or start Docker, or install")
    assert run.stderr.count("\n") == 1
    assert not (bare / ".venv").exists()


def test_a_command_that_does_not_exist_is_refused_before_the_set_up(bare: Path) -> None:
    run = subprocess.run([bare / "dev", "tset"], capture_output=True, text=True, check=False)

    assert run.returncode == 2
    assert run.stderr.startswith("./dev: no such command: tset\n")


def test_no_service_of_a_package_starts_at_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wants = tmp_path / "multi-user.target.wants"
    wants.mkdir()
    (wants / "ours.service").symlink_to("/lib/systemd/system/ours.service")
    monkeypatch.setattr(debian, "NO_SERVICES", tmp_path / "policy-rc.d")
    monkeypatch.setattr(debian, "_starts_at_boot", lambda: set(wants.iterdir()))

    def enables(command: list[str], _: int) -> bool:
        assert os.access(tmp_path / "policy-rc.d", os.X_OK), "services are not started now"
        if "install" in command:
            (wants / "redis-server.service").symlink_to("/lib/systemd/system/redis-server.service")
        return True

    monkeypatch.setattr(debian, "_run", enables)
    assert debian._install(("redis-server",), 1)
    assert [each.name for each in wants.iterdir()] == ["ours.service"]
    assert not (tmp_path / "policy-rc.d").exists()


def test_rabbitmq_is_installed_only_where_there_is_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(debian, "can_install", lambda: True)
    monkeypatch.setattr(debian, "install", installed.append)
    monkeypatch.setattr(debian, "has_broker", lambda: True)
    see_to_a_broker()
    assert installed == []
    monkeypatch.setattr(debian, "has_broker", lambda: False)
    see_to_a_broker()
    assert installed == ["rabbitmq-server"]
