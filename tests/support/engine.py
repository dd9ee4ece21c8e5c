"""Docker for tests: commands that can be interrupted, the engine (the running one, or else one that is started), images
of RabbitMQ, and the removal of containers whose owner was killed."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from service.private_broker import ANSWER_S, LOCAL, OFFICIAL, POLL_S, PULL_S

DEV = Path(__file__).parents[2] / "dev"
LABEL = "org.lanekeeper.broker"
"""A label of the containers that tests start: `host:process id` of their owner."""
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
    """Let `./dev` install a Debian package, without its services. Raises Unavailable."""
    steps.say(f"installing {package} from Debian's packages (once)")
    # `./dev` waits on SIGINT until apt has ended.
    code, said = steps.run([str(DEV), "install", package], within_s=INSTALL_S, end_with=signal.SIGINT)
    if code:
        raise Unavailable(f"{package} is not installed, and cannot be:\n{said[-1500:]}")


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
        if host == mine and process.isdigit() and not Path("/proc", process).exists():
            steps.run(["docker", "rm", "--force", "--volumes", identity], within_s=START_S)


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
