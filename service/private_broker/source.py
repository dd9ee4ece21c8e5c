"""What the two sources of private brokers have in common: errors, ports, passwords, and `Steps`, which runs commands
that can be interrupted at any moment.

A source is Docker (`container.py`) or an installed RabbitMQ (`node.py`). Both run in the guard (`guard.py`).
"""

import base64
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"
USER = "lanekeeper"
POLL_S = 0.05
ERLANG_ARGUMENTS = "-rabbit dead_letter_worker_publisher_confirm_timeout 15000"
"""Arguments for the Erlang runtime of a private broker. With them, if a queue was still starting and did not accept a
dead-lettered message, RabbitMQ sends the message again after 15 s, not 180 s."""
FIXED_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Leaving(Exception):
    """Raised to give up the start of a private broker, because the process that asked for the broker has ended or no
    longer needs it."""


class Unavailable(Exception):
    """This source (Docker or an installed RabbitMQ) cannot provide a broker; the text says why."""


class TooSlow(Unavailable):
    """A step of starting a broker exceeded its time limit. The step is not repeated, because it would probably take as
    long again."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to connect to a private broker: its ports on loopback, and the password of its only user."""

    amqp_port: int
    management_port: int
    password: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)

    @property
    def amqp_url(self) -> str:
        return f"amqp://{USER}:{self.password}@{LOOPBACK}:{self.amqp_port}/"

    @property
    def management_url(self) -> str:
        return f"http://{LOOPBACK}:{self.management_port}"


@dataclass(slots=True)
class Steps:
    """Runs commands and waits for conditions, for code that starts a broker. Once `leaving` is set, all methods
    raise Leaving at once."""

    leaving: threading.Event = field(default_factory=threading.Event)
    say: Callable[[str], None] = lambda text: None
    """A function that is called with a text about each step that takes long."""

    def check(self) -> None:
        if self.leaving.is_set():
            raise Leaving

    def until(self, seconds: float) -> Iterator[None]:
        """Let a caller poll in a `for` loop: yield at once, and then every 50 ms, until `seconds` have passed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check()
            yield
            self.leaving.wait(POLL_S)
        self.check()

    def run(
        self,
        command: Sequence[str],
        *,
        within_s: float,
        end_with: signal.Signals = signal.SIGKILL,
    ) -> tuple[int, str]:
        """Run a command to its end; returns the exit code and all its output. Raises TooSlow after `within_s`.

        When `leaving` is set, or after `within_s`, the signal `end_with` is sent to the command's process group, and
        this method waits until the command has ended. Choose SIGINT for a command that must clean up first.
        """
        self.check()
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
                    self.check()
                    raise TooSlow(f"`{' '.join(command[:2])}` did not end within {within_s:g} s")
            output.seek(0)
            return child.returncode, output.read().decode(errors="replace").strip()


def free_ports(count: int) -> list[int]:
    """Find `count` different TCP ports on loopback on which nothing listens."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind((LOOPBACK, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def version_if_ready(access: Access) -> str | None:
    """The broker's version if its management API answers, and says that it accepts AMQP connections; else None."""
    token = base64.b64encode(f"{USER}:{access.password}".encode()).decode()
    request = urllib.request.Request(
        f"{access.management_url}/api/overview", headers={"Authorization": f"Basic {token}"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2) as answer:
            overview = json.load(answer)
        accepts = any(listener["protocol"] == "amqp" for listener in overview["listeners"])
        return str(overview["rabbitmq_version"]) if accepts else None
    except (OSError, ValueError, KeyError):
        return None
