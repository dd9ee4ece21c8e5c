"""A private Redis for tests: on loopback, nothing stored on disk, ended when its starter ends."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.engine import GUARD, see_that_it_is_installed
from tests.support.private_broker import LOOPBACK, free_ports

SERVER = "redis-server"
START_S = 60


class RedisServer:
    """One server. After `kill`, `start` uses the same port; the data is gone."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ()) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://{LOOPBACK}:{self.port}/0"
        self._folder = folder
        self._options = options
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["--port", str(self.port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no", *self._options]
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", SERVER, *command, "--dir", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < end, f"{SERVER} does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A running server. If there is none and none can be installed, the test is skipped; in CI it fails."""
    see_that_it_is_installed(SERVER)
    server = RedisServer(folder, options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
