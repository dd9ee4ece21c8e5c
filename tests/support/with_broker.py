"""`python -m tests.support.with_broker -- COMMAND …`: runs a command with a private broker.

The command gets LANEKEEPER_AMQP_URL and LANEKEEPER_MANAGEMENT_URL in its environment.

When the command has ended, or on Ctrl-C or SIGTERM at any moment, every process that it left running is ended, and the
broker is removed.
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from lanekeeper.contract.problems import BrokerUnreachable
from service.private_broker import SOURCES, PrivateBroker, say_on_stderr
from tests.support.descendants import adopt_orphans, descendants, reap

GRACE_S = 15
"""How long a command may take to end after its signal."""
LEFT_S = 5
"""How long processes that it left behind may continue before they get SIGTERM."""
CLEANING_UP_S = 60
"""How long they may take after that: one may be a guard with its own broker, or Docker's engine."""
POLL_S = 0.02


@contextmanager
def private_broker_beside(sources: Sequence[str] = SOURCES) -> Iterator[PrivateBroker]:
    """`private_broker` for code without an event loop."""
    with closing(PrivateBroker()) as broker:
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
    options.add_argument("command", nargs="+", metavar="-- COMMAND …")
    chosen = options.parse_args()

    adopt_orphans()
    signals = Signals()
    signals.listen()
    code = 1
    try:
        with private_broker_beside(chosen.sources.split(",")) as broker:
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
