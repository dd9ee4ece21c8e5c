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
IN_MEMORY = ("--save", "", "--appendonly", "no")
START_S = 60


class RedisServer:
    """One server. After `kill`, `start` uses the same port; the data is gone."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ()) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://{LOOPBACK}:{self.port}/0"
        self._folder = folder
        self._arguments = ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(folder), *options]
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", SERVER, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < end, f"{SERVER} does not answer"
            time.sleep(0.01)

    def configure(self, text: str) -> None:
        """Sentinel writes to its file what it has learned."""
        file = self._folder / "redis.conf"
        file.write_text(text)
        self._arguments.insert(0, str(file))

    def kill(self) -> None:
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) in (b"+PONG\r\n", b"-NOAUTH")
        except OSError:
            return False


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A running server. If there is none and none can be installed, the test is skipped; in CI it fails."""
    with _running(RedisServer(folder, (*IN_MEMORY, *options))) as server:
        yield server


@contextmanager
def sentinel_server(folder: Path, service: str, primary: RedisServer, *, password: str) -> Iterator[RedisServer]:
    """A Sentinel that watches a primary by this name, and lets a replica take its place after a second."""
    server = RedisServer(folder, ("--sentinel",))
    lines = (
        f"sentinel monitor {service} {LOOPBACK} {primary.port} 1",
        f"sentinel auth-pass {service} {password}",
        f"sentinel down-after-milliseconds {service} 1000",
        f"sentinel failover-timeout {service} 3000",
    )
    server.configure("\n".join(lines))
    with _running(server):
        yield server


@contextmanager
def _running(server: RedisServer) -> Iterator[RedisServer]:
    see_that_it_is_installed(SERVER)
    try:
        server.start()
        yield server
    finally:
        server.kill()
