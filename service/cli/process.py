"""How a command runs, connects, prints, stops and ends. An error that ends it is printed in one line without a
traceback. The exit codes: 1 failed, 2 wrong use or settings, 130 stopped by a signal."""

import asyncio
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from lanekeeper.contract.problems import LanekeeperError, SettingsError
from service.telemetry import redaction

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from lanekeeper.amqp.connection import Connection
    from service.config.settings import Settings

T = TypeVar("T")
FAILED = 1
BAD_USE = 2
STOPPED = 130  # the exit code that shells report after Ctrl-C
SERVICE_NAME = "lanekeeper"
AT_ONCE_S = 5.0


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


def run_with_telemetry(
    settings: "Settings", main: "Callable[[TracerProvider | None], Coroutine[None, None, None]]"
) -> None:
    """Run a command that goes on until it is stopped. `main` gets the tracer provider; None: no spans are sent."""
    from service.telemetry import exporters, logs

    with (
        logs.configured(
            service=SERVICE_NAME,
            level=settings.log_level,
            format=settings.log_format,
            with_content=settings.log_content,
        ),
        exporters.exporting(settings.traces_url, service_name=SERVICE_NAME) as traces,
    ):
        run(main(traces))


@asynccontextmanager
async def connected(settings: "Settings", purpose: str) -> "AsyncIterator[Connection]":
    """A connection for a short command, named by its `purpose`. Raises BrokerUnreachable, AccessRefused."""
    from service.connections import connection_for
    from service.telemetry import logs

    with logs.configured(service=SERVICE_NAME, level="error"):
        async with connection_for(purpose, settings) as connection:
            yield connection


class StopSignals:
    """The first signal begins an orderly stop, once `armed` is set; else, and at the second, all ends at once."""

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self._task = task
        self.event = asyncio.Event()
        self.armed = False

    def __call__(self) -> None:
        if self.armed and not self.event.is_set():
            self.event.set()
        else:
            self._task.cancel()
            # The process is ended by force a little later, because some tasks may ignore the cancellation.
            asyncio.get_running_loop().call_later(AT_ONCE_S, os._exit, STOPPED)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Handle SIGINT and SIGTERM inside the block by the `StopSignals` that it gets."""
    task = asyncio.current_task()
    assert task is not None
    stop = StopSignals(task)
    with listening(stop):
        yield stop


@contextmanager
def listening(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on each SIGINT and SIGTERM that arrives inside the block."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def print_note(text: str) -> None:
    """Print a line on standard error, where it does not mix with a command's output."""
    print(redaction.lines(f"lanekeeper: {text}"), file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print a value as indented JSON, for the option `--json`."""
    print(redaction.json_text(json.dumps(value, indent=2, ensure_ascii=False)))


def printable(text: str) -> str:
    """What others wrote, on one line, in a form that cannot control the terminal."""
    return redaction.one_line(text)


def report(error: BaseException, *, debug: bool) -> int:
    """Print the error that ended a command on standard error, with `debug` its traceback too. Returns the exit code."""
    leaves = list(_leaves(error))
    real = [leaf for leaf in leaves if not isinstance(leaf, asyncio.CancelledError)] or leaves
    cause = next((leaf for leaf in real if isinstance(leaf, LanekeeperError)), real[0])
    if debug:
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(redaction.text(line), file=sys.stderr)
    if isinstance(cause, (KeyboardInterrupt, asyncio.CancelledError)):
        print_note("stopped")
        return STOPPED
    if isinstance(cause, SettingsError):
        print_note(str(cause))
        return BAD_USE
    if isinstance(cause, LanekeeperError):
        print_note(redaction.text(str(cause)))
        return FAILED
    text = redaction.text(str(cause)) or "no text"
    hint = "" if debug else "; a fault of ours: run `lanekeeper --debug …` for the traceback"
    print_note(f"unexpected {type(cause).__name__}: {text}{hint}")
    return FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
