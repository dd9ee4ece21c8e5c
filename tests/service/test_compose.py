"""The compose files, for `docker compose` and for Debian's `docker-compose`."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
FILES = ("docker-compose.yml", "deploy/cluster/docker-compose.yml")
TOOLS = (["docker", "compose"], ["docker-compose"])
TO_FIND_IT = ("PATH", "HOME", "DOCKER_CONFIG")
"""Docker's plugins may be in a user's own folder."""
NEEDED = {
    "RABBITMQ_PASSWORD": "secret",
    "WORKER_PASSWORD": "works",
    "CLI_PASSWORD": "asks",
    "REDIS_PASSWORD": "hidden",
    "ERLANG_COOKIE": "biscuit",
}
WORKERS = {"docker-compose.yml": "  lanekeeper:", "deploy/cluster/docker-compose.yml": "x-worker:"}
"""The beginning of the workers' part of each file."""


def has(tool: list[str]) -> bool:
    if shutil.which(tool[0]) is None:
        return False
    return subprocess.run([*tool, "version"], capture_output=True, check=False).returncode == 0


def part(file: str, begin: str) -> str:
    """The lines of one service: from `begin` to the first line that is not indented more."""
    depth = len(begin) - len(begin.lstrip())
    _, _, rest = (HOUSE / file).read_text().partition(f"\n{begin}")
    return re.split(rf"\n {{0,{depth}}}(?=\S)", rest)[0]


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS, ids=" ".join)
@pytest.mark.parametrize("file", FILES)
def test_docker_compose_accepts_the_files(file: str, tool: list[str], tmp_path: Path) -> None:
    if not has(tool):
        pytest.skip(f"{' '.join(tool)} is not here")
    shutil.copytree(HOUSE / "deploy", tmp_path / "deploy")
    shutil.copy(HOUSE / "docker-compose.yml", tmp_path)
    done = subprocess.run(
        [*tool, "-f", file, "config"],
        cwd=tmp_path,  # as if there is no .env
        env={**{name: os.environ[name] for name in TO_FIND_IT if name in os.environ}, **NEEDED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lanekeeper:secret@" in done.stdout
    assert "worker:works@" in done.stdout
    assert "redis://:hidden@redis:6379" in done.stdout


@pytest.mark.parametrize("file", FILES)
def test_redis_requires_a_password_and_evicts_nothing(file: str) -> None:
    text = (HOUSE / file).read_text()

    assert 'echo "requirepass $$REDIS_PASSWORD" >/tmp/redis.conf' in text
    assert "--requirepass" not in text, "everybody on the machine sees a command's arguments"
    assert "--appendonly yes --maxmemory-policy noeviction" in text


@pytest.mark.parametrize("file", FILES)
def test_a_worker_is_not_the_brokers_administrator(file: str) -> None:
    worker = part(file, WORKERS[file])

    assert "amqp://worker:${WORKER_PASSWORD}@" in worker
    assert "RABBITMQ_PASSWORD" not in worker
    assert "command: consume" in worker  # `serve` declares the topology, which a worker's user may not do
    assert "topology: {condition: service_completed_successfully}" in worker


@pytest.mark.parametrize("file", FILES)
def test_only_the_service_that_makes_users_has_the_administrators_password(file: str) -> None:
    text = (HOUSE / file).read_text()
    topology = part(file, "  topology:")

    assert "topology apply --user worker:worker --user cli:client:*" in topology
    assert re.findall("restart:|ports:", topology) == []  # that service ends
    assert text.count("amqp://lanekeeper:${") == topology.count("amqp://lanekeeper:${") == 1
    assert "amqp://cli:${CLI_PASSWORD}@" in part(file, "  cli:")
    assert "profiles: [cli]" in part(file, "  cli:")


@pytest.mark.parametrize("file", FILES)
def test_the_production_profile_is_on_unless_dotenv_switches_it_off(file: str) -> None:
    for begin in (WORKERS[file], "  cli:"):
        assert "LANEKEEPER_PROFILE: ${LANEKEEPER_PROFILE-production}" in part(file, begin)


@pytest.mark.parametrize("password", ["", "calls"])
def test_the_gateways_user_is_made_where_it_has_a_password(password: str, tmp_path: Path) -> None:
    line = re.sub(r"\s+", " ", part("docker-compose.yml", "  topology:").split(">-")[1].split("environment:")[0])
    told = tmp_path / "lanekeeper"
    told.write_text('#!/bin/sh\necho "$@"\ncat\n')
    told.chmod(0o755)
    passwords = {"WORKER_PASSWORD": "works", "CLI_PASSWORD": "asks", "GATEWAY_PASSWORD": password}

    done = subprocess.run(
        ["sh", "-c", line.replace("$$", "$")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **passwords},
        capture_output=True,
        text=True,
        check=True,
    )

    command, *lines = done.stdout.splitlines()
    assert lines == ["worker:works", "cli:asks", *(["gateway:calls"] if password else [])]
    assert ("--user gateway:client:*" in command) == bool(password)
    assert command.endswith("--passwords /dev/stdin")


def test_the_gateway_asks_as_a_client_that_the_workers_believe() -> None:
    worker, gateway = part("docker-compose.yml", "  lanekeeper:"), part("docker-compose.yml", "  gateway:")

    assert "amqp://gateway:${GATEWAY_PASSWORD:-}@" in gateway
    for service in (worker, gateway):
        assert "LANEKEEPER_SPEAKERS: ${LANEKEEPER_SPEAKERS:-gateway}" in service
