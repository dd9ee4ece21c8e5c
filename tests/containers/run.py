"""`./dev compose-test`: the image, and the cluster of deploy/cluster, on Docker's engine.

The image is built from the Dockerfile, and must run with a read-only root, as a user who is not root, become healthy,
and end on SIGTERM with exit code 0. Then compose starts three brokers, Redis and two workers; while requests are
published, a broker node and a worker are killed: none may be lost. Images that no registry gives are made from Debian's
packages."""

import argparse
import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from service.private_broker import LOCAL, OFFICIAL, free_ports
from tests.support import waiting
from tests.support.engine import Engine, Steps, Unavailable
from tests.support.keeper import IMAGE_SCRIPT
from tests.support.requester import Ledger

HOUSE = Path(__file__).parents[2]
FILE = HOUSE / "deploy" / "cluster" / "docker-compose.yml"
IMAGE = "lanekeeper:compose-test"
BASE = "debian-python:3.11"
REQUESTS = 300
PREFIX = "lanekeepertest"


def docker(*line: str, check: bool = True, within_s: float = 120) -> str:
    done = subprocess.run(["docker", *line], capture_output=True, text=True, timeout=within_s)
    assert not check or done.returncode == 0, f"docker {' '.join(line)}: {done.stderr[-2000:]}"
    return done.stdout.strip()


def has(image: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode == 0


def until(condition: Callable[[], object], what: str, *, within_s: float = 180) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.5)  # polling: the engine notifies nobody


def build() -> str:
    """Build the image; returns its size."""
    if not has("python:3.11-slim"):
        subprocess.run([HOUSE / "tests/containers/base-image"], check=True)
    base = "python:3.11-slim" if has("python:3.11-slim") else BASE
    line = ("build", "--network=host", f"--build-arg=PYTHON_IMAGE={base}", f"--tag={IMAGE}", str(HOUSE))
    docker(*line, within_s=1200)
    return f"{int(docker('image', 'inspect', '--format={{.Size}}', IMAGE)) / 1e6:.0f} MB, of which {base} " + (
        f"{int(docker('image', 'inspect', '--format={{.Size}}', base)) / 1e6:.0f} MB"
    )


LOCKED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges:true")


def check_image() -> None:
    assert docker("run", "--rm", *LOCKED, "--entrypoint=id", IMAGE, "-u") == "10001", "it is root"
    assert docker("run", "--rm", *LOCKED, IMAGE, "--version").startswith("lanekeeper ")
    name = f"{PREFIX}-image"
    docker("rm", "--force", name, check=False)
    line = ("--detach", f"--name={name}", *LOCKED, "--health-interval=2s", IMAGE, "simulate", "--port", "8080")
    docker("run", *line)
    try:
        until(lambda: health(name) == "healthy", f"{name} is healthy")
        began = time.monotonic()
        docker("stop", "--time=30", name)
        code = docker("inspect", "--format={{.State.ExitCode}}", name)
        assert code == "0", f"SIGTERM: exit code {code}: {docker('logs', name)[-500:]}"
        assert time.monotonic() - began < 29, "it was killed"
    finally:
        docker("rm", "--force", name)


def health(name: str) -> str:
    return docker("inspect", "--format={{if .State.Health}}{{.State.Health.Status}}{{end}}", name, check=False)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Callable[..., str], list[int], str]]:
    """compose's command, the brokers' ports, and the administrator's password."""
    tool = ["docker", "compose"]
    if subprocess.run([*tool, "version"], capture_output=True).returncode:
        tool = ["docker-compose"]
        if shutil.which(tool[0]) is None:
            subprocess.run([HOUSE / "dev", "install", *tool], check=True)
    if not has(OFFICIAL) and not has(LOCAL):
        subprocess.run([IMAGE_SCRIPT, "4.3"], check=True)
    ports = free_ports(6)
    password = secrets.token_hex(16)
    names = ("WORKER_PASSWORD", "CLI_PASSWORD", "REDIS_PASSWORD", "ERLANG_COOKIE")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LANEKEEPER_")},
        **{name: secrets.token_hex(16) for name in names},
        "RABBITMQ_PASSWORD": password,
        "RABBITMQ_IMAGE": OFFICIAL if has(OFFICIAL) else LOCAL,
        "REDIS_IMAGE": "redis:8" if has("redis:8") else BASE,
        "SERVICE_IMAGE": IMAGE,
        "SERVE_OPTIONS": "--simulate",
        "LANEKEEPER_PROFILE": "",  # the test's requests have no user_id
        **{f"AMQP_PORT_{n + 1}": str(ports[n]) for n in range(3)},
        **{f"MANAGEMENT_PORT_{n + 1}": str(ports[n + 3]) for n in range(3)},
    }

    def compose(*line: str) -> str:
        command = [*tool, "--project-name", PREFIX, "--file", str(FILE), *line]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"compose {' '.join(line)}: {done.stderr[-3000:]}"
        return done.stdout

    try:
        compose("up", "--detach", "--no-build")
        yield compose, ports, password
    finally:
        compose("down", "--volumes", "--timeout", "5")


async def load(amqp_url: str, compose: Callable[..., str]) -> dict[str, object]:
    ledger = Ledger(amqp_url)
    began = time.monotonic()
    async with ledger.writing(), ledger.reading():
        for number in range(REQUESTS):
            lane = ("critical", "normal", "batch")[number % 3]
            headers = {"x-lane-no-batch": True} if lane == "batch" else {}
            await ledger.ask(lane, f"{number} [[latency: 1s]]", id=f"c-{number}", headers=headers)
            if number == REQUESTS // 3:
                await asyncio.to_thread(compose, "kill", "rabbitmq2")
            if number == 2 * REQUESTS // 3:
                await asyncio.to_thread(compose, "kill", "worker1")
        await waiting.until(lambda: not ledger.lost, within_s=240)
    ledger.check()
    return {"requests": len(ledger.confirmed), "replies twice": ledger.repeated, "s": round(time.monotonic() - began)}


def main(only_image: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        engine = Engine(Path(name), steps=Steps())
        try:
            engine.ensure()
            run(only_image)
        finally:
            engine.stop()


def run(only_image: bool) -> None:
    began = time.monotonic()
    size = build()
    print(f"image: built in {time.monotonic() - began:.0f} s, {size}", flush=True)
    check_image()
    print("image: read-only, not root, healthy, ends on SIGTERM with 0", flush=True)
    if only_image:
        return
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as (compose, ports, password):
        workers = [f"{PREFIX}{sep}worker{n}{sep}1" for n in (1, 2) for sep in "_-"]
        until(lambda: sum(health(each) == "healthy" for each in workers) == 2, "both workers are healthy")
        print(f"cluster: three brokers, Redis, two workers healthy after {time.monotonic() - began:.0f} s", flush=True)
        seen = asyncio.run(load(f"amqp://lanekeeper:{password}@127.0.0.1:{ports[0]}/", compose))
        print(f"cluster: a broker node and a worker were killed, nothing lost: {json.dumps(seen)}")
    print("1 passed, 0 failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="./dev compose-test", description=__doc__)
    parser.add_argument("--image", action="store_true", help="only the image")
    try:
        main(parser.parse_args().image)
    except (AssertionError, subprocess.SubprocessError, TimeoutError, Unavailable) as error:
        sys.exit(f"FAILED: {error}")
