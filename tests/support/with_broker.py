"""`python -m tests.support.with_broker -- COMMAND …`: runs a command with a private broker.

The command gets LANEKEEPER_AMQP_URL and LANEKEEPER_MANAGEMENT_URL in its environment; if it has the first already, it
uses that broker.

When the command has ended, or on Ctrl-C or SIGTERM at any moment, every process that it left running is ended, and the
broker is removed. On Linux that includes daemons: Erlang leaves processes behind (`epmd`, `erl_child_setup`,
`inet_gethost`), each in its own session, so no process group contains them all. A "child subreaper" becomes the parent
of all its orphaned descendants, so they can be found by walking from parent to child."""

import argparse
import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lanekeeper.contract.problems import BrokerUnreachable
from tests.support.private_broker import SOURCES, PrivateBroker, say_on_stderr

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
KILLED_WITHIN_S = 10.0


def adopt_orphans() -> None:
    """Make this process the parent of all processes that its descendants leave behind. Does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """The ids of all processes below `root`, parents first. Empty if there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # The name in brackets may contain spaces and brackets; the parent is the second field after it.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(root, ()))
    for process in found:
        found += children.get(process, ())
    return found


def kill_all() -> None:
    """Kill all descendants of this process, and wait until they have ended. `adopt_orphans` must have been called
    before, so that orphaned descendants are found too."""
    until = time.monotonic() + KILLED_WITHIN_S
    while (found := descendants(os.getpid())) and time.monotonic() < until:
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
            reap(process)
        time.sleep(0.01)  # polling: the kernel does not notify us when a grandchild becomes our child


def reap(process: int) -> None:
    """Collect a child that has ended, so that it does not stay as a zombie; does nothing for other processes."""
    with suppress(ChildProcessError):
        os.waitpid(process, os.WNOHANG)


GRACE_S = 15
"""How long a command may take to end after its signal."""
LEFT_S = 5
"""How long processes that it left behind may continue before they get SIGTERM."""
CLEANING_UP_S = 60
"""How long they may take after that: one may be a guard with its own broker, or Docker's engine."""
POLL_S = 0.02


@contextmanager
def private_broker_beside(sources: Sequence[str] = SOURCES, kept: Path | None = None) -> Iterator[PrivateBroker]:
    """`private_broker` for code without an event loop."""
    with closing(PrivateBroker(kept)) as broker:
        asyncio.run(broker.begin(sources, None, say_on_stderr))
        yield broker


class Told(BaseException):
    """A signal told us to end. Not an Exception, so that no `except Exception` on the way catches it."""


@dataclass(slots=True)
class Signals:
    """SIGINT, SIGTERM and SIGHUP: the first one is noted, and raises Told if that is safe; later ones are ignored."""

    told: signal.Signals | None = None
    raising: bool = True

    def listen(self) -> None:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.told is None:
            self.told = signal.Signals(number)
            if self.raising:
                raise Told


def main() -> int:
    """Run the command. Returns its exit code; 128 + the number of the signal that ended it; 1 without a broker."""
    options = argparse.ArgumentParser(prog="python -m tests.support.with_broker")
    options.add_argument("--sources", default=",".join(SOURCES), help="where the broker may come from, in this order")
    options.add_argument("--kept", type=Path, metavar="FOLDER", help="where the broker's data stay; default: nowhere")
    options.add_argument("command", nargs="+", metavar="-- COMMAND …")
    chosen = options.parse_args()
    if os.environ.get("LANEKEEPER_AMQP_URL"):
        os.execvp(chosen.command[0], chosen.command)

    adopt_orphans()
    signals = Signals()
    signals.listen()
    code = 1
    ends = "which is removed at the end" if chosen.kept is None else f"with the data in {chosen.kept}"
    say_on_stderr(f"starting a broker, {ends} …")
    try:
        with private_broker_beside(chosen.sources.split(","), chosen.kept) as broker:
            # From here on Told could come after a process has started but before we know it, and leave it behind.
            signals.raising = False
            code = _run(chosen.command, broker, signals)
    except BrokerUnreachable as error:
        print(error, file=sys.stderr)
    except Told:
        pass
    finally:
        signals.raising = False
        _end_the_rest()
    return code if signals.told is None else 128 + signals.told


def _run(command: list[str], broker: PrivateBroker, signals: Signals) -> int:
    environment = [f"LANEKEEPER_AMQP_URL={broker.amqp_url}", f"LANEKEEPER_MANAGEMENT_URL={broker.management_url}"]
    # If we are killed, the command gets SIGTERM, because its broker is removed.
    bound = []
    if sys.platform == "linux" and shutil.which("setpriv"):
        # we may have been killed before setpriv had set the signal
        is_ours = 'test "$PPID" = "$0" && exec "$@"'
        bound = ["setpriv", "--pdeathsig", "TERM", "sh", "-c", is_ours, str(os.getpid())]
    child = subprocess.Popen([*bound, "env", *environment, *command])
    try:
        while signals.told is None and child.poll() is None:
            time.sleep(POLL_S)
        if signals.told is not None:
            # At a terminal the command got Ctrl-C too; a second signal would interrupt its cleaning up.
            if not (signals.told is signal.SIGINT and os.isatty(0)):
                child.send_signal(signals.told)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
    finally:
        child.kill()
        child.wait()
        assert broker.owner is not None
        _end_the_rest(spare=broker.owner.pid)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_the_rest(*, spare: int | None = None) -> None:
    """Wait `LEFT_S` for the remaining processes, then send SIGTERM, and SIGKILL only after `CLEANING_UP_S` more."""
    began = time.monotonic()
    told: set[int] = set()
    while left := set(descendants(os.getpid())) - (set() if spare is None else {spare, *descendants(spare)}):
        waited_s = time.monotonic() - began
        for each in left:
            with suppress(ProcessLookupError, PermissionError):
                if waited_s > LEFT_S + CLEANING_UP_S:
                    os.kill(each, signal.SIGKILL)
                elif waited_s > LEFT_S and each not in told:
                    told.add(each)
                    os.kill(each, signal.SIGTERM)
            reap(each)
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
