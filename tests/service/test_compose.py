"""The compose files: for `docker compose`, and for the `docker-compose` that Debian has."""

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
"""Docker's plugins may lie in a user's own folder."""
NEEDED = {"RABBITMQ_PASSWORD": "secret", "REDIS_PASSWORD": "hidden", "ERLANG_COOKIE": "secret"}


def has(tool: list[str]) -> bool:
    if shutil.which(tool[0]) is None:
        return False
    return subprocess.run([*tool, "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("file", FILES)
def test_it_says_nothing_that_docker_compose_1_refuses(file: str) -> None:
    keys = re.findall(r"^([A-Za-z0-9_-]+):", (HOUSE / file).read_text(), re.MULTILINE)
    assert {key for key in keys if not key.startswith("x-")} <= {"services", "volumes", "networks"}


@pytest.mark.parametrize("tool", TOOLS, ids=" ".join)
@pytest.mark.parametrize("file", FILES)
def test_it_is_accepted(file: str, tool: list[str], tmp_path: Path) -> None:
    if not has(tool):
        pytest.skip(f"{' '.join(tool)} is not here")
    shutil.copytree(HOUSE / "deploy", tmp_path / "deploy")
    shutil.copy(HOUSE / "docker-compose.yml", tmp_path)
    done = subprocess.run(
        [*tool, "-f", file, "config"],
        cwd=tmp_path,  # where there is no .env
        env={**{name: os.environ[name] for name in TO_FIND_IT if name in os.environ}, **NEEDED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lanekeeper:secret@" in done.stdout
    assert "redis://:hidden@redis:6379" in done.stdout


@pytest.mark.parametrize("file", FILES)
def test_redis_wants_a_password_and_forgets_nothing(file: str) -> None:
    text = (HOUSE / file).read_text()

    assert "--requirepass" in text
    assert '--appendonly, "yes", --maxmemory-policy, noeviction' in text


def test_the_readme_gives_the_url_of_the_user_that_the_compose_file_makes() -> None:
    (user,) = re.findall(r"RABBITMQ_DEFAULT_USER: (\w+)", (HOUSE / "docker-compose.yml").read_text())
    url = f"LANEKEEPER_AMQP_URL=amqp://{user}:$password@localhost:5672/"
    readme = (HOUSE / "README.md").read_text()
    assert readme.index(url) < readme.index("docker compose up")
    assert url in (HOUSE / "docker-compose.yml").read_text()


def test_the_readme_declares_before_it_sends_where_nothing_waits_for_the_worker() -> None:
    readme = (HOUSE / "README.md").read_text()
    (block,) = [each for each in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) if "docker-compose up" in each]
    assert "--wait" not in block
    assert block.index("topology apply") < block.index("lanekeeper send")
