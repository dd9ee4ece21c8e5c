"""Runs a command, and prints the error that ended it in one line without a traceback. The exit codes: 1 failed, 2 wrong
use or settings, 130 stopped by a signal."""

import asyncio
import logging
import sys
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from lanekeeper.contract.problems import LanekeeperError, SettingsError
from service.telemetry import redaction

T = TypeVar("T")
FAILED = 1
BAD_USE = 2
STOPPED = 130  # the exit code that shells report after Ctrl-C


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on uvloop, which is faster than asyncio's own loop."""
    import uvloop

    # aiormq's log is silenced, because Lanekeeper itself logs each connection that fails or is lost.
    library = logging.getLogger("aiormq")
    before = library.level
    library.setLevel(logging.CRITICAL)
    try:
        return uvloop.run(main)
    finally:
        library.setLevel(before)


def report(error: BaseException, *, debug: bool) -> int:
    """Print the error that ended a command on standard error, with `debug` its traceback too. Returns the exit code."""
    cause = _innermost(error)
    if debug:
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(redaction.text(line), file=sys.stderr)
    if isinstance(cause, (KeyboardInterrupt, asyncio.CancelledError)):
        print("lanekeeper: stopped", file=sys.stderr)
        return STOPPED
    if isinstance(cause, SettingsError):
        print(f"lanekeeper: {cause}", file=sys.stderr)
        return BAD_USE
    if isinstance(cause, LanekeeperError):
        print(f"lanekeeper: {redaction.text(str(cause))}", file=sys.stderr)
        return FAILED
    text = redaction.text(str(cause)) or "no text"
    hint = "" if debug else "; a fault of ours: run `lanekeeper --debug …` for the traceback"
    print(f"lanekeeper: unexpected {type(cause).__name__}: {text}{hint}", file=sys.stderr)
    return FAILED


def _innermost(error: BaseException) -> BaseException:
    """The error in an exception group that is reported to the user: the first LanekeeperError, else the first error
    that is no cancellation. An exception that is not a group is returned as it is."""
    leaves = list(_leaves(error))
    real = [leaf for leaf in leaves if not isinstance(leaf, asyncio.CancelledError)]
    return next((leaf for leaf in real if isinstance(leaf, LanekeeperError)), (real or leaves)[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
