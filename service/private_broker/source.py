"""What a source of brokers gives, and how its steps are run so that they can be left at any second.

A source is Docker (`container.py`) or an installed RabbitMQ (`node.py`). All of this runs in the guard (`guard.py`).
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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

LOOPBACK = "127.0.0.1"
USER = "lanekeeper"
POLL_S = 0.05
ERLANG_ARGUMENTS = "-rabbit dead_letter_worker_publisher_confirm_timeout 15000"
"""What a delay's next queue did not take, because it was still starting, is tried again after 15 s instead of 180."""
FIXED_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Leaving(Exception):
    """Whoever asked for the broker is gone, or wants it no more."""


class Unavailable(Exception):
    """This source has no broker to give; the text says why."""


class TooSlow(Unavailable):
    """It had all the time that it may take; another try would take as long."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the broker listens, on loopback only, and its one user."""

    amqp_port: int
    management_port: int
    password: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)

    @property
    def amqp_url(self) -> str:
        return f"amqp://{USER}:{self.password}@{LOOPBACK}:{self.amqp_port}/"

    @property
    def management_url(self) -> str:
        return f"http://{LOOPBACK}:{self.management_port}"


class Server(Protocol):
    """A broker of one's own. `start` after `kill` has the same data, ports and name."""

    access: Access

    def start(self) -> str:
        """Start, wait until it is ready, and give its version. Raises Unavailable where it does not come up."""
        ...

    def kill(self) -> None:
        """End it as a power cut would (SIGKILL); its data stays."""
        ...

    def remove(self) -> None:
        """Take it away, whatever state it is in."""
        ...


@dataclass(slots=True)
class Steps:
    """Runs commands and waits, until `leaving` is set: then each of them raises Leaving at once."""

    leaving: threading.Event = field(default_factory=threading.Event)
    say: Callable[[str], None] = lambda text: None
    """Told what takes long."""

    def check(self) -> None:
        if self.leaving.is_set():
            raise Leaving

    def until(self, seconds: float) -> Iterator[None]:
        """A loop's rounds, one at once and then every 50 ms, for so long."""
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
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Run to the end; the exit code and all that it wrote. Beyond `within_s`: TooSlow.

        `end_with` is sent to the command's process group on Leaving or when its time is over, and then its end is
        awaited: SIGINT for what must put something in order first. `environment` None: inherited.
        """
        self.check()
        with tempfile.TemporaryFile() as output:
            # A file, not a pipe: a daemon that the command leaves behind would hold a pipe open.
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment
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
    """Ports that nobody listens on now. All are held at once, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def version_if_ready(access: Access) -> str | None:
    """The broker's version, once it takes connections and its management API answers; None before."""
    try:
        with socket.create_connection((LOOPBACK, access.amqp_port), timeout=1) as connection:
            connection.settimeout(2)
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            if connection.recv(1) != b"\x01":  # the first byte of a method frame: connection.start
                return None
        token = base64.b64encode(f"{USER}:{access.password}".encode()).decode()
        request = urllib.request.Request(
            f"{access.management_url}/api/overview", headers={"Authorization": f"Basic {token}"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2) as answer:
            return str(json.load(answer)["rabbitmq_version"])
    except (OSError, urllib.error.URLError, ValueError, KeyError):
        return None
