"""The guard: a process that owns a private broker, and removes it when the guard's standard input closes.

Its standard input is a pipe, and only the process that started the guard holds the other end. So the pipe closes
whenever that process ends, even if it is killed, and the guard then cleans up before it ends itself. It runs in its own
session, where Ctrl-C does not reach it.

On standard input the guard gets the lines `kill` and `start`. On standard output it writes JSON objects, one a line:
{"say": …} for steps that take long, {"amqp_url": …, "management_url": …, "version": …} after the start, {"done": …}
when it has carried out a command, and {"error": …} as the last line if it cannot go on.
"""

import json
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.private_broker import container, install, node
from service.private_broker.descendants import adopt_orphans, kill_all
from service.private_broker.source import Leaving, Steps, TooSlow, Unavailable

SOURCES = ("docker", "installed", "install")
"""All sources of a private broker, in the order in which they are tried: Docker, an installed RabbitMQ, and one that is
installed for this purpose."""
Server = container.Container | node.Node


def report(**fields: object) -> None:
    """Send a JSON object with these fields to the process that started the guard. Raises Leaving if that process has
    ended."""
    try:
        os.write(1, (json.dumps(fields) + "\n").encode())
    except BrokenPipeError:
        raise Leaving from None


@dataclass(slots=True)
class Guard:
    """Owns a private broker: starts it from the first of `sources` that can provide one (Docker or an installed
    RabbitMQ), carries out the commands `kill` and `start`, and removes it at the end. Its files are in `folder`."""

    folder: str
    sources: Sequence[str]
    image: str | None
    steps: Steps
    commands: queue.SimpleQueue[str]
    server: Server | None = None

    def run(self) -> None:
        try:
            server, version = self._start()
            report(amqp_url=server.access.amqp_url, management_url=server.access.management_url, version=version)
            while (command := self.commands.get()) and not self.steps.leaving.is_set():
                {"kill": server.kill, "start": server.start}[command]()
                report(done=command)
        finally:
            self._remove()

    def _start(self) -> tuple[Server, str]:
        """Start a broker from the first source that can provide one. Returns the broker and the version of its
        RabbitMQ."""
        problems: list[str] = []
        for source in self.sources:
            try:
                return self._start_from(source)
            except Unavailable as error:
                problems.append(str(error))
        raise Unavailable("\n".join([install.ADVICE, *problems]))

    def _start_from(self, source: str) -> tuple[Server, str]:
        for is_last_try in (False, False, True):
            self.server = self._make(source)
            try:
                return self.server, self.server.start()
            except Unavailable as error:
                self._remove()
                # The start is repeated, because another process may have taken a port before the broker listened on it.
                if is_last_try or isinstance(error, TooSlow):
                    raise
        raise AssertionError("the last round returns or raises")

    def _make(self, source: str) -> Server:
        folder = Path(tempfile.mkdtemp(dir=self.folder))  # another one for each try
        if source == "docker":
            if not container.engine_answers(self.steps):
                raise Unavailable("Docker: no engine answers")
            container.sweep(self.steps)
            image = self.image or container.find_image(self.steps)
            if image is None:
                raise Unavailable(f"Docker: {container.OFFICIAL} is not here and cannot be pulled")
            return container.Container(folder, image=image, steps=self.steps)
        if source == "install" and node.installed() is None:
            install.install(self.steps, "rabbitmq-server", services=install.SERVICES)
        return node.Node(folder, steps=self.steps)

    def _remove(self) -> None:
        """Remove the broker and all descendant processes."""
        if self.server is not None:
            self.server.remove()
        self.server = None
        kill_all()


def _listen(commands: queue.SimpleQueue[str], leave: Callable[[], None]) -> None:
    # Standard input is unbuffered, because Python cannot end while a thread waits in its buffered reader.
    for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115  it stays open as long as the process
        commands.put(line.decode().strip())
    leave()


def main() -> int:
    """Guard one broker until standard input ends. The command line's arguments are the sources to try, separated by
    commas, and perhaps the Docker image to use. Returns the exit code: 0, or 1 if no source could provide a broker."""
    sources, *images = sys.argv[1:]
    steps = Steps(say=lambda text: report(say=text))
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()

    def leave(*_: object) -> None:
        steps.leaving.set()
        commands.put("")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    threading.Thread(target=_listen, args=(commands, leave), name="lifeline", daemon=True).start()
    adopt_orphans()
    try:
        with tempfile.TemporaryDirectory(prefix="lanekeeper-broker-", ignore_cleanup_errors=True) as folder:
            Guard(folder, sources.split(","), images[0] if images else None, steps, commands).run()
    except Leaving:
        pass
    except Unavailable as error:
        report(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
