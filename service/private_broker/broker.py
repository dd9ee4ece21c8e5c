"""A private broker: started for a block of code, and removed without a trace afterwards.

    async with private_broker() as broker:
        broker.amqp_url, broker.management_url, broker.version
        await broker.kill()      # SIGKILL, like a power cut
        await broker.start()     # the same data, ports and name

The broker runs in Docker if an engine answers and an image is available; else an installed rabbitmq-server is used;
else rabbitmq-server is installed (on Debian, as root). It listens only on loopback, on free ports, with a generated
password. A separate process owns the broker (`guard.py`), so that it is removed even if this process is killed.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lanekeeper.contract.problems import BrokerUnreachable
from service.private_broker.guard import SOURCES

Say = Callable[[str], None]


def say_on_stderr(text: str) -> None:
    """Print progress on standard error, where it does not mix with output."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class PrivateBroker:
    """A private broker: a RabbitMQ that was started for a block of code, and is removed at its end."""

    amqp_url: str = field(repr=False)
    """The AMQP URL with user and password; the virtual host is `/`."""
    management_url: str
    """The management API's URL without credentials, which are those of `amqp_url`."""
    version: str
    guard: "_Guard" = field(repr=False)

    async def kill(self) -> None:
        """Kill the broker with SIGKILL, like a power cut. Raises BrokerUnreachable if its guard has ended."""
        await asyncio.to_thread(self.guard.order, "kill")

    async def start(self) -> None:
        """After `kill`: start it again with the same data, ports and name, and wait until it is ready."""
        await asyncio.to_thread(self.guard.order, "start")


@asynccontextmanager
async def private_broker(
    *, sources: Sequence[str] = SOURCES, image: str | None = None, say: Say = say_on_stderr
) -> AsyncIterator[PrivateBroker]:
    """Run a broker inside the block. Raises BrokerUnreachable, which says what to install, if no source provides one.

    `sources`: the sources to try, in this order. `image`: the Docker image to use. `say` is called, from another
    thread, with a text about each step that takes long.
    """
    guard = _Guard(sources, image)
    try:
        # If this is cancelled, the thread keeps reading until the guard ends, which `release` below makes it do.
        yield await asyncio.to_thread(guard.ready, say)
    finally:
        guard.release()
        await _await_despite_cancellation(asyncio.to_thread(guard.wait))


@contextmanager
def guarded_broker(*, sources: Sequence[str] = SOURCES, image: str | None = None) -> Iterator[PrivateBroker]:
    """Run a private broker inside the block, for code without an event loop (see `private_broker`)."""
    guard = _Guard(sources, image)
    try:
        yield guard.ready(say_on_stderr)
    finally:
        guard.release()
        guard.wait()


async def _await_despite_cancellation(ending: Any) -> None:
    """Await `ending` until it is done, even if this task is cancelled meanwhile; raise the cancellation afterwards."""
    task = asyncio.ensure_future(ending)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class _Guard:
    """Starts the guard, the process that owns the private broker, and talks to it over pipes. When the pipe is closed,
    or this process ends, the guard removes the broker."""

    def __init__(self, sources: Sequence[str], image: str | None) -> None:
        command = [sys.executable, "-m", "service.private_broker.guard", "--sources", ",".join(sources)]
        # Not an asyncio subprocess: an event loop that is closed early kills its children before they can clean up.
        self._process = subprocess.Popen(
            command if image is None else [*command, "--image", image],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],  # from this folder Python can import `service`, even if it is not installed
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, say: Say) -> PrivateBroker:
        answer = self._answer("ready", say)
        return PrivateBroker(answer["amqp_url"], answer["management_url"], answer["version"], self)

    def order(self, command: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise BrokerUnreachable("the private broker's guard has ended") from error
        self._answer("done", say_on_stderr)

    def release(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self) -> None:
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _answer(self, kind: str, say: Say) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "say" in answer:
                say(answer["say"])
            elif "error" in answer:
                raise BrokerUnreachable(answer["error"])
            else:
                return answer[kind]
        raise BrokerUnreachable("the private broker's guard ended without a word")
