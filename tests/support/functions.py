"""Handlers for tests: `[handlers.NAME] run = "tests.support.functions:NAME"`."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from opentelemetry import trace

from lanekeeper import Rejected


async def echo(given: Any) -> Any:
    return {"echo": given}


async def mebibytes(given: int) -> Any:
    return "x" * (given * 1024 * 1024)


async def traced(given: Any) -> Any:
    return trace.get_current_span().get_span_context().span_id


async def fails(given: Any) -> Any:
    raise ValueError(f"no good: {given}")


async def rejects(given: Any) -> Any:
    raise Rejected("never any good")


async def hangs(given: Any) -> Any:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        if given != "stubborn":
            raise
        await asyncio.sleep(3600)


async def returns_a_set(given: Any) -> Any:
    return {1, 2}


def doubled(given: Any) -> Any:
    print("a handler may print")
    return [given, given, os.getpid()]


def computes(given: Any) -> Any:
    while True:
        pass


def holds_the_lock(given: Any) -> Any:
    """Never lets another thread of its process run."""
    Path(given).write_text(str(os.getpid()))
    re.match(r"(a+)+$", "a" * 60 + "b")


async def together(given: list[Any]) -> list[Any]:
    """Each input with the number of those that were asked together; some say what is to happen."""
    if "all fail" in given and len(given) > 1:
        raise ValueError("no good")
    if "all rejected" in given:
        raise Rejected("never any good")
    if "hangs" in given:
        await asyncio.sleep(3600)
    return computed_together(given)


def computed_together(given: list[Any]) -> list[Any]:
    if "dies" in given:
        os._exit(3)
    if "one too few" in given:
        return given[1:]
    ends: dict[str, Any] = {"fails": ValueError("this one"), "rejected": Rejected("never"), "a set": {1}}
    return [ends.get(str(each), [each, len(given)]) for each in given]


def dies(given: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def rejects_too(given: Any) -> Any:
    raise Rejected("never any good")


def rejects_and_tells(given: Any) -> Any:
    """Rejects what is not null. Tells its process, in one way or the other."""
    if given is not None:
        raise Rejected(str(os.getpid()))
    return os.getpid()


class Unpicklable(Exception):
    def __init__(self, *, why: str) -> None:
        super().__init__(why)
        self.lock = threading.Lock()


def fails_oddly(given: Any) -> Any:
    raise Unpicklable(why="no good")


def surroundings(given: Any) -> Any:
    """The names of the environment as the kernel knows them, and the open descriptors."""
    environment = Path("/proc/self/environ").read_bytes().decode().split("\0")
    descriptors = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [environment, descriptors]


def waits_for(given: Any) -> Any:
    """Until there is a file of this name."""
    while not Path(given).exists():
        time.sleep(0.01)
    return given


def is_large(given: Any) -> Any:
    return "x" * int(given)


def sleeps(given: Any) -> Any:
    time.sleep(float(given))
    return os.getpid()


async def words(given: Any) -> Any:
    return given.split("\n" if "\n" in given else None)


async def waits_for_a_cancelled_task(given: Any) -> Any:
    other = asyncio.create_task(asyncio.sleep(3600))
    other.cancel()
    await other


async def calls_exit(given: Any) -> Any:
    sys.exit(3)


class NoException(BaseException):
    pass


async def raises_no_exception(given: Any) -> Any:
    raise NoException("that few catch")


def forks(given: Any) -> Any:
    if os.fork() == 0:
        return "from the copy"
    os.wait()
    return given


def starts_another(given: Any) -> Any:
    """Returns the other process, or hangs."""
    other = subprocess.Popen(["sleep", "3600"])
    if given is not None:
        Path(given).write_text(str(other.pid))
        time.sleep(3600)
    return other.pid
