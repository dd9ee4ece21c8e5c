"""Docker for tests: commands that can be interrupted, the engine (the running one, or else one that is started), images
and containers of RabbitMQ, and the removal of those whose owner was killed; and Debian's packages."""

import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import cast

import pytest
from testcontainers.core.config import ConnectionMode, testcontainers_config

from tests.support.brokers import RunningBroker
from tests.support.debian import can_install
from tests.support.private_broker import (
    ANSWER_S,
    ERLANG_ARGUMENTS,
    LOCAL,
    LOOPBACK,
    OFFICIAL,
    POLL_S,
    PULL_S,
    USER,
    version_if_ready,
)

DEBIAN = Path(__file__).with_name("debian.py")
LABEL = "org.lanekeeper.broker"
"""A label of the containers that tests start: `host:process id` of their owner."""
READY_S = 60
DATA = "/var/lib/rabbitmq:size=4g"
"""In memory: nobody starts these brokers again, and quorum queues would wait for the disk at each declaration."""
SMALL = "+S 1:1 +SDcpu 1:1 +SDio 1"
"""One thread of each kind. Most of these brokers' work is to declare queues, which then takes a third less CPU time."""
ABSENT: Mapping[str, str] = MappingProxyType({})
GUARD = '"$@" & read _; kill -KILL $!; wait'
"""In a shell: ends a program when standard input is closed: by us, or because our process has ended."""
START_S = 60
STOP_S = 30
INSTALL_S = 600


class Leaving(Exception):
    """Given up, because nobody needs it any more."""


class Unavailable(Exception):
    """There is no broker, image, engine or package; the text says why."""


@dataclass(slots=True)
class Steps:
    """Runs commands and waits for conditions. Once `leaving` is set, all methods raise Leaving at once."""

    leaving: threading.Event = field(default_factory=threading.Event)
    say: Callable[[str], None] = lambda text: None

    def until(self, seconds: float) -> Iterator[None]:
        """Let a caller poll in a `for` loop, until `seconds` have passed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check()
            yield
            self.leaving.wait(POLL_S)
        self._check()

    def run(
        self, command: Sequence[str], *, within_s: float, end_with: signal.Signals = signal.SIGKILL
    ) -> tuple[int, str]:
        """Run a command to its end; returns the exit code and all its output. Raises Unavailable after `within_s`.

        When `leaving` is set, or after `within_s`, `end_with` is sent to its process group, and its end awaited.
        """
        self._check()
        with tempfile.TemporaryFile() as output:
            # The output goes to a file, because a daemon that the command leaves behind would keep a pipe open.
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            until = time.monotonic() + within_s
            while child.poll() is None:
                if self.leaving.wait(POLL_S) or time.monotonic() > until:
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, end_with)
                    child.wait()
                    self._check()
                    raise Unavailable(f"`{' '.join(command[:2])}` did not end within {within_s:g} s")
            output.seek(0)
            return child.returncode, output.read().decode(errors="replace").strip()

    def _check(self) -> None:
        if self.leaving.is_set():
            raise Leaving


def install(steps: Steps, package: str) -> None:
    """Install a Debian package, without its services. Raises Unavailable."""
    if can_install():
        steps.say(f"installing {package} from Debian's packages (once)")
    # It waits on SIGINT until apt has ended.
    command = [sys.executable, str(DEBIAN), package]
    code, said = steps.run(command, within_s=INSTALL_S, end_with=signal.SIGINT)
    if code:
        raise Unavailable(said.splitlines()[-1].removeprefix("./dev: ") if said else f"{package} cannot be installed")


def see_that_it_is_installed(program: str) -> None:
    """Install the Debian package of the same name if the program is missing. If that is impossible, the test is
    skipped; in CI it fails."""
    if shutil.which(program) is None:
        with Path(tempfile.gettempdir(), f"lanekeeper-tests-{program}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only one process of the test session installs it
            try:
                if shutil.which(program) is None:
                    install(Steps(), program)
            except Unavailable as error:
                if os.environ.get("CI") == "true":
                    pytest.fail(str(error))
                pytest.skip(f"{error} (apt install {program})")


def engine_answers(steps: Steps) -> bool:
    if shutil.which("docker") is None:
        return False
    with suppress(Unavailable):
        return steps.run(["docker", "version", "--format", "{{.Server.Version}}"], within_s=ANSWER_S)[0] == 0
    return False


def find_image(steps: Steps, *, official: str = OFFICIAL, local: str = LOCAL) -> str | None:
    """An image that this machine has; else the official one is pulled; None if that fails."""
    for image in (official, local):
        if steps.run(["docker", "image", "inspect", image], within_s=ANSWER_S)[0] == 0:
            return image
    with suppress(Unavailable):
        if steps.run(["docker", "manifest", "inspect", official], within_s=ANSWER_S)[0] == 0:
            steps.say(f"pulling {official}")
            if steps.run(["docker", "pull", "--quiet", official], within_s=PULL_S)[0] == 0:
                return official
    return None


def image_here(steps: Steps) -> str:
    """An image of the newest version. Raises Unavailable."""
    if not engine_answers(steps):
        raise Unavailable("no Docker engine answers")
    if found := find_image(steps):
        return found
    raise Unavailable(f"{OFFICIAL} is not here and cannot be pulled; tests/support/rabbitmq-image 4.3 makes one")


def run_node(
    steps: Steps, image: str, *, name: str, password: str, options: Sequence[str], environ: Mapping[str, str] = ABSENT
) -> None:
    """Start a container with a node of RabbitMQ. Its settings are in a file, so that the password is in no list of
    processes."""
    settings = {
        "RABBITMQ_DEFAULT_USER": USER,
        "RABBITMQ_DEFAULT_PASS": password,
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ERLANG_ARGUMENTS,
        **environ,
    }
    with tempfile.NamedTemporaryFile("w", prefix="lanekeeper-node-") as file:
        file.writelines(f"{setting}={value}\n" for setting, value in settings.items())
        file.flush()
        named = (f"--name={name}", f"--hostname={name}", f"--label={LABEL}={owner()}", f"--env-file={file.name}")
        command = ["docker", "run", "--detach", "--pull=never", *named, *options, image]
        code, said = steps.run(command, within_s=START_S)
    if code:
        raise Unavailable(f"{image} did not start: {said}")


def start_rabbitmq(
    image: str, *, steps: Steps, keep: Callable[[str], object], configuration: Path | None = None
) -> RunningBroker:
    """Start a broker that nobody starts again, and wait until it is ready. `keep` gets its name before the start, so
    that it is always removed."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # a decorator of its own that it uses
        from testcontainers.community.rabbitmq import RabbitMqContainer

    # The reaper of testcontainers needs a separate image, from a registry that not every machine can reach. The keeper
    # removes all containers instead.
    testcontainers_config.ryuk_disabled = True
    testcontainers_config.connection_mode_override = ConnectionMode.docker_host
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # says ERROR each second until the broker is up
    name, password = f"lanekeeper-{secrets.token_hex(6)}", secrets.token_urlsafe(18)
    made = RabbitMqContainer(image, username=USER, password=password).with_name(name)
    made.with_kwargs(labels={LABEL: owner()}).with_tmpfs_mount(*DATA.split(":"))
    made.with_env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", f"{ERLANG_ARGUMENTS} {SMALL}")
    # Ports that the engine chooses, on loopback; testcontainers' own method would publish them on every address.
    made.ports = cast(dict[str, int | None], {"5672/tcp": (LOOPBACK, None), "15672/tcp": (LOOPBACK, None)})
    if configuration is not None:
        made.with_volume_mapping(str(configuration), "/etc/rabbitmq/conf.d/30-lanekeeper.conf", "ro")
    keep(name)
    made.start()
    amqp, management = (f"{LOOPBACK}:{made.get_exposed_port(port)}" for port in (5672, 15672))
    for _ in steps.until(READY_S):
        if version := version_if_ready(f"http://{management}", password):
            return RunningBroker(f"amqp://{USER}:{password}@{amqp}/", f"http://{management}", version)
    raise Unavailable(f"{image} was not ready within {READY_S} s")


def remove_node(steps: Steps, name: str) -> None:
    steps.run(["docker", "rm", "--force", "--volumes", name], within_s=START_S)


def owner() -> str:
    """The value of `LABEL` on the containers that this process starts."""
    return f"{socket.gethostname()}:{os.getpid()}"


def sweep(steps: Steps) -> None:
    """Remove containers whose owner was killed before it could. Several machines can share an engine: only owners of
    this one are looked for."""
    mine, _, _ = owner().rpartition(":")
    listed = steps.run(
        ["docker", "ps", "--all", f"--filter=label={LABEL}", f'--format={{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'],
        within_s=ANSWER_S,
    )[1]
    for line in listed.splitlines():
        identity, _, its_owner = line.partition(" ")
        host, _, process = its_owner.rpartition(":")
        if host == mine and process.isdigit() and not _runs(process):
            remove_node(steps, identity)


def _runs(process: str) -> bool:
    """Not if it has ended, and PID 1 does not reap."""
    try:
        return ") Z" not in Path("/proc", process, "stat").read_text()
    except OSError:
        return False


class Engine:
    """`ensure` that an engine answers; `stop` the one that was started here. Its log is written to `folder`."""

    def __init__(self, folder: Path, *, steps: Steps) -> None:
        self._log = folder / "dockerd.log"
        self._steps = steps
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Raises Unavailable if no engine answers and none can be started."""
        if engine_answers(self._steps):
            return
        if shutil.which("dockerd") is None or shutil.which("docker") is None:
            install(self._steps, "docker.io")
        # Without iptables, which not every machine has; Docker's own proxy serves the published ports.
        command = ["dockerd", "--iptables=false", "--ip6tables=false"]
        self._steps.say("starting Docker's engine")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        for _ in self._steps.until(START_S):
            if self._process.poll() is not None:
                break
            if engine_answers(self._steps):
                return
        said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise Unavailable(f"Docker's engine did not start: {said[-1]}")

    def stop(self) -> None:
        """Stop the engine that `ensure` started; it stops its containers and its own containerd."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._process.kill()
            self._process.wait()
