"""Exit codes of commands: 0 done, 1 failed, 2 bad use. Errors are printed in one line, without a traceback."""

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
STOPPED = 130  # as shells have it for Ctrl-C


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on the faster loop."""
    import uvloop

    # aiormq logs each connection that fails or is lost; we log these ourselves.
    library = logging.getLogger("aiormq")
    before = library.level
    library.setLevel(logging.CRITICAL)
    try:
        return uvloop.run(main)
    finally:
        library.setLevel(before)


def told(error: BaseException, *, debug: bool) -> int:
    """Print an error on standard error. Returns the exit code."""
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
    said = redaction.text(str(cause)) or "no text"
    hint = "" if debug else "; a fault of ours: run `lanekeeper --debug …` for the traceback"
    print(f"lanekeeper: unexpected {type(cause).__name__}: {said}{hint}", file=sys.stderr)
    return FAILED


def _innermost(error: BaseException) -> BaseException:
    """The error inside an exception group: the first of Lanekeeper's own, if there is one."""
    leaves = list(_leaves(error))
    real = [each for each in leaves if not isinstance(each, asyncio.CancelledError)]
    return next((each for each in real if isinstance(each, LanekeeperError)), (real or leaves)[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
