"""RabbitMQ 3.10, 4.0 and 4.3 in containers, owned by one process for all workers of a test session.

`python -m tests.support.keeper` listens on a socket in a folder whose path it prints. It starts each requested broker
once. When its standard input closes, it removes the containers, and stops Docker's engine if it had to start it. So
nothing stays, however the session ends. The session calls `keeping`; its workers call `ask`.
"""

import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.brokers import RunningBroker
from tests.support.engine import (
    Engine,
    Leaving,
    Steps,
    Unavailable,
    find_image,
    install,
    remove_node,
    start_rabbitmq,
    sweep,
)
from tests.support.with_broker import adopt_orphans, kill_all

VERSIONS = ("3.10", "4.0", "4.3")
FOLDER = "TESTS_KEEPER"
"""The environment variable that tells the workers of a session the folder of its keeper."""
SOCKET = "keeper"
BUILD_S = 600
"""Time limit for building one image on a slow machine."""
IMAGE_SCRIPT = Path(__file__).with_name("rabbitmq-image")


def ask(folder: str, what: str, version: str) -> dict[str, str]:
    """Ask the keeper for an `image` or a `broker` of a version. Raises Unavailable with the reason if there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(4 * BUILD_S)
        connection.connect(str(Path(folder) / SOCKET))
        connection.sendall(json.dumps({"what": what, "version": version}).encode() + b"\n")
        with connection.makefile("rb") as answers:
            answer: dict[str, str] = json.loads(answers.readline() or b'{"error": "the keeper of brokers has ended"}')
    if "error" in answer:
        raise Unavailable(answer["error"])
    return answer


@contextmanager
def keeping() -> Iterator[str]:
    """Run a keeper for as long as the block lasts; yields its folder, for `ask`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        start_new_session=True,  # so that Ctrl-C does not reach it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class Keeper:
    """Images and brokers by version, each made once."""

    def __init__(self, folder: Path) -> None:
        self.steps = Steps(say=lambda text: print(text, file=sys.stderr, flush=True))
        self.lock = threading.Lock()
        self._folder = folder
        self._engine = Engine(folder, steps=self.steps)
        self._images: dict[str, str] = {}
        self._without: dict[str, str] = {}
        """Versions without an image, and the reason; they are not tried again."""
        self._brokers: dict[str, RunningBroker] = {}
        self._containers: list[str] = []

    def answer(self, what: str, version: str) -> dict[str, str]:
        """The image or broker, or `error` with the reason. One at a time, because the machine may be small."""
        with self.lock:
            try:
                return self._image(version) if what == "image" else self._broker(version)
            except (Unavailable, Leaving) as error:
                return {"error": f"RabbitMQ {version}: {error}"}

    def close(self) -> None:
        self.steps.leaving.set()
        with self.lock:  # a thread that holds it notices `leaving`, and gives up
            for each in self._containers:
                with suppress(Exception):
                    remove_node(Steps(), each)
            self._engine.stop()
        kill_all()
        _unmount_below(self._folder)

    def _broker(self, version: str) -> dict[str, str]:
        if version not in self._brokers:
            image = self._image(version)["image"]
            self._brokers[version] = start_rabbitmq(image, steps=self.steps, keep=self._containers.append)
        started = self._brokers[version]
        return {"amqp_url": started.amqp_url, "management_url": started.management_url, "version": started.version}

    def _image(self, version: str) -> dict[str, str]:
        if version in self._without:
            raise Unavailable(self._without[version])
        if version not in self._images:
            try:
                self._images[version] = self._found_or_built(version)
            except Unavailable as error:
                self._without[version] = str(error)
                raise
        return {"image": self._images[version]}

    def _found_or_built(self, version: str) -> str:
        self.steps.say(f"looking for an image of RabbitMQ {version}")
        self._engine.ensure()
        sweep(self.steps)
        official, local = f"rabbitmq:{version}-management", f"debian-rabbitmq:{version}-management"
        if found := find_image(self.steps, official=official, local=local):
            return found
        if shutil.which("debootstrap") is None:
            install(self.steps, "debootstrap")
        self.steps.say(f"building {local} from Debian's packages (once)")
        code, said = self.steps.run(["env", f"TMPDIR={self._folder}", str(IMAGE_SCRIPT), version], within_s=BUILD_S)
        if code:
            raise Unavailable(f"no registry is reached, and {IMAGE_SCRIPT.name} failed:\n{said[-1500:]}")
        return local


def _unmount_below(folder: Path) -> None:
    # debootstrap mounts /proc in what it builds, and unmounts it only if it ends normally.
    for line in Path("/proc/mounts").read_text().splitlines():
        if (place := line.split()[1]).startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", place], check=False)


def main() -> None:
    """Serve until standard input closes; signals are ignored, so that none interrupts the cleaning up."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda *_: None)  # not SIG_IGN, which child processes would inherit
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="lanekeeper-tests-", ignore_cleanup_errors=True) as name:
        keeper = Keeper(Path(name))

        class Asked(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(json.dumps(keeper.answer(**json.loads(self.rfile.readline()))).encode() + b"\n")

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        with Server(str(Path(name) / SOCKET), Asked) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(name, flush=True)
            while os.read(0, 1024):
                pass
            try:
                server.shutdown()
            finally:
                keeper.close()


if __name__ == "__main__":
    main()
