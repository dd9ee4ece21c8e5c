"""`python -m service.demo.run -- COMMAND …`: a command with a private broker around it.

The command finds LANEKEEPER_AMQP_URL and LANEKEEPER_MANAGEMENT_URL in its environment.

When the command has ended, or on Ctrl-C or SIGTERM at any second, everything that it left running is ended, and the
broker is taken down.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from service.demo.broker import GuardedBroker, guarded_broker
from service.demo.descendants import adopt_orphans, descendants, reap
from service.demo.guard import SOURCES
from topology.contract.problems import BrokerUnreachable

GRACE_S = 15
"""How long a command that was told to end may take, and then what it left behind."""


class Told(BaseException):
    """A signal told us to end. Not an Exception: nothing on the way may take it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


def main() -> int:
    """Run the command; its own exit code, 128 + the signal's number where a signal ended it, 1 without a broker."""
    options = argparse.ArgumentParser(prog="python -m service.demo.run")
    options.add_argument("--sources", default=",".join(SOURCES), help="where the broker may come from, in this order")
    options.add_argument("--image", help="the Docker image to take")
    options.add_argument("command", nargs="+", metavar="-- COMMAND …")
    chosen = options.parse_args()

    adopt_orphans()
    try:
        with _told(), guarded_broker(sources=chosen.sources.split(","), image=chosen.image) as broker:
            return _run(chosen.command, broker)
    except BrokerUnreachable as error:
        print(error, file=sys.stderr)
        return 1
    except Told as told:
        return 128 + told.number


@contextmanager
def _told() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Told: once, so that a second one does not cut short what the first began."""

    def tell(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Told(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for each in numbers:
        signal.signal(each, tell)
    yield


def _run(command: list[str], broker: GuardedBroker) -> int:
    environment = [f"LANEKEEPER_AMQP_URL={broker.amqp_url}", f"LANEKEEPER_MANAGEMENT_URL={broker.management_url}"]
    child = subprocess.Popen(["env", *environment, *command])
    try:
        code = child.wait()
        return code if code >= 0 else 128 - code
    except Told as told:
        # At a terminal Ctrl-C has reached the command as well; a second one would cut short its own cleaning up.
        if not (told.number is signal.SIGINT and os.isatty(0)):
            child.send_signal(told.number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
        raise
    finally:
        child.kill()
        child.wait()
        _end_the_rest(spare=broker.guard.pid)


def _end_the_rest(*, spare: int) -> None:
    """Give what the command left behind a moment to end by itself (it may be a guard that cleans up), then kill it."""
    until = time.monotonic() + GRACE_S
    while left := set(descendants(os.getpid())) - {spare, *descendants(spare)}:
        if time.monotonic() > until:
            for each in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
        for each in left:
            reap(each)
        time.sleep(0.02)  # nobody tells when a grandchild ends


if __name__ == "__main__":
    sys.exit(main())
