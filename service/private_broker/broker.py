"""Provides a private broker: a RabbitMQ that is started for a block of code, and removed without a trace afterwards.

    async with private_broker() as broker:
        broker.amqp_url, broker.management_url, broker.version
        await broker.kill()      # SIGKILL, like a power cut
        await broker.start()     # the same data, ports and name

The broker runs in Docker if Docker's engine answers and an image is available. Otherwise an installed rabbitmq-server
is used; if there is none, rabbitmq-server is installed (possible only on Debian, as root). It listens only on loopback,
on free ports, with a generated password. A separate process owns the broker (`guard.py`), so that it is removed even if
this process is killed.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Self

from lanekeeper.contract.problems import BrokerUnreachable
from service.private_broker.guard import SOURCES

Say = Callable[[str], None]


def say_on_stderr(text: str) -> None:
    """Print progress on standard error, where it does not mix with output."""
    print(text, file=sys.stderr, flush=True)


class PrivateBroker:
    """A private broker: a RabbitMQ that was started for a block of code, and is removed at the end of the block. A
    separate process, the guard, owns the broker, and gets commands over a pipe. When `close` is called, or this process
    ends, the pipe is closed, and the guard removes the broker."""

    amqp_url: str
    """The AMQP URL with user and password; the virtual host is `/`."""
    management_url: str
    """The management API's URL without credentials, which are those of `amqp_url`."""
    version: str

    def __init__(self, sources: Sequence[str], image: str | None, say: Say) -> None:
        command = [sys.executable, "-m", "service.private_broker.guard", ",".join(sources)]
        # Not an asyncio subprocess: an event loop that is closed early kills its children before they can clean up.
        guard = subprocess.Popen(
            command if image is None else [*command, image],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],  # from this folder Python can import `service`, even if it is not installed
            start_new_session=True,
        )
        assert guard.stdin is not None
        assert guard.stdout is not None
        self.guard, self._commands, self._answers, self._say = guard, guard.stdin, guard.stdout, say

    def ready(self) -> Self:
        """Wait until the broker is ready. Raises BrokerUnreachable."""
        access = self._answer()
        self.amqp_url, self.management_url = access["amqp_url"], access["management_url"]
        self.version = access["version"]
        return self

    async def kill(self) -> None:
        """Kill the broker with SIGKILL, like a power cut. Raises BrokerUnreachable if its guard has ended."""
        await asyncio.to_thread(self._order, "kill")

    async def start(self) -> None:
        """Start the broker again after `kill`, with the same data, ports and name, and wait until it is ready."""
        await asyncio.to_thread(self._order, "start")

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._commands.close()
        self.guard.wait()
        self._answers.close()

    def _order(self, command: str) -> None:
        try:
            self._commands.write(f"{command}\n".encode())
            self._commands.flush()
        except (BrokenPipeError, ValueError) as error:
            raise BrokerUnreachable("the private broker's guard has ended") from error
        self._answer()

    def _answer(self) -> dict[str, str]:
        for line in self._answers:
            answer: dict[str, str] = json.loads(line)
            if "say" in answer:
                self._say(answer["say"])
            elif "error" in answer:
                raise BrokerUnreachable(answer["error"])
            else:
                return answer
        raise BrokerUnreachable("the private broker's guard ended without a word")


@asynccontextmanager
async def private_broker(
    *, sources: Sequence[str] = SOURCES, image: str | None = None, say: Say = say_on_stderr
) -> AsyncIterator[PrivateBroker]:
    """Run a broker inside the block. Raises BrokerUnreachable, which says what to install, if no source provides one.

    `sources`: where to get a broker from (`guard.SOURCES`), in the order in which they are tried. `image`: the Docker
    image to use. `say` is called, from another thread, with a text about each step that takes long.
    """
    # `close` is called without a thread: it blocks the event loop, so that no cancellation interrupts it.
    with closing(PrivateBroker(sources, image, say)) as broker:
        yield await asyncio.to_thread(broker.ready)  # if this is cancelled, the thread reads until the guard ends


@contextmanager
def guarded_broker(*, sources: Sequence[str] = SOURCES) -> Iterator[PrivateBroker]:
    """Run a private broker inside the block, for code without an event loop (see `private_broker`)."""
    with closing(PrivateBroker(sources, None, say_on_stderr)) as broker:
        yield broker.ready()
