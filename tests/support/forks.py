"""Processes that begin as forks of one that has already imported Lanekeeper, because the imports are most of a start.

`python -m tests.support.forks FD` is that process: it reads orders from the socket FD, and ends when that is closed.
`begin` starts it when it is first needed. A fork has its own environment, folder, arguments and standard streams, and
ends like any other process.
"""

import asyncio
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

HOUSE = Path(__file__).parents[2]
IMPORTED = (
    "consumers.state",
    "consumers.state.redis.shared_budget",
    "lanekeeper.over_amqp",
    "service.checks",
    "service.status",
    "service.cli.commands",
    "service.cli.requests",
    "service.cli.serve",
    "service.cli.simulate",
    "service.config.loading",
    "service.gateway.app",
    "service.gateway.server",
    "service.simulated.app",
    "service.telemetry.logs",
    "service.telemetry.exporters",
    "service.worker.assembly",
    "service.worker.running",
)
"""All that a worker, a gateway and a short command use; some of it is imported only by the commands that need it."""
Session = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Forked:
    """A running fork, with what tests use of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, session: Session, *, out: asyncio.StreamReader, err: asyncio.StreamReader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = out
        self.stderr = err
        self._ended = asyncio.create_task(self._wait(*session))

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, or -n if signal n ended it."""
        return await asyncio.shield(self._ended)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Wait for its end; returns the rest of its output."""
        out, err, _ = await asyncio.gather(self.stdout.read(), self.stderr.read(), self.wait())
        return out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _wait(self, told: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        self.returncode = int(await told.readline())
        writer.close()
        return self.returncode


async def begin(module: str, *line: str, environ: Mapping[str, str], folder: Path, text: str = "") -> Forked:
    """Start `python -m MODULE LINE …` as a fork; `text` is its standard input."""
    order = {"module": module, "line": line, "environ": dict(environ), "folder": str(folder), "text": text}
    out, its_out = os.pipe()
    err, its_err = os.pipe()
    ours, its = socket.socketpair()
    ours.setblocking(False)
    try:
        socket.send_fds(_server(), [b"!"], [its.fileno(), its_out, its_err])
    finally:
        its.close()
        os.close(its_out)
        os.close(its_err)
    told, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(json.dumps(order).encode() + b"\n")
    pid = int(await told.readline())
    return Forked(pid, (told, writer), out=await _reader(out), err=await _reader(err))


async def _reader(descriptor: int) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0))
    return reader


@functools.cache
def _server() -> socket.socket:
    ours, its = socket.socketpair()
    foreign = ("LANEKEEPER_", "ANTHROPIC_", "OTEL_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    with its:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(its.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            cwd=HOUSE,
            env=environ,
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
    return ours


def main() -> None:
    """Fork for each order, until nobody can give one any more."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else the first collection in each fork would copy all pages
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for the forks
    while True:
        told, descriptors, _, _ = socket.recv_fds(orders, 1, 3)
        if not told:
            return
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(*descriptors)
            return
        for each in descriptors:
            os.close(each)


def _keep(connection: int, out: int, err: int) -> None:
    """In the first fork: start a second one that runs the order, and tell when and how it ends."""
    with socket.socket(fileno=connection) as session, session.makefile("rb") as lines:
        order = json.loads(lines.readline())
        if (pid := os.fork()) != 0:
            os.close(out)
            os.close(err)
            session.sendall(f"{pid}\n".encode())
            _, status = os.waitpid(pid, 0)
            with suppress(OSError):  # the session may have left meanwhile
                session.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)
    _run(out, err, **order)


def _run(
    out: int, err: int, *, module: str, line: Sequence[str], environ: Mapping[str, str], folder: str, text: str
) -> None:
    given, giving = os.pipe()
    os.write(giving, text.encode())
    os.close(giving)
    for standard, opened in enumerate((given, out, err)):
        os.dup2(opened, standard)
        os.close(opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.path.insert(0, folder)
    sys.argv[1:] = line
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
