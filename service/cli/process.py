"""Runs a command that goes on until somebody stops it, such as a worker: sets up its logs and traces, and handles
SIGINT and SIGTERM."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from service.cli.ending import STOPPED, run

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from service.config.settings import Settings

SERVICE_NAME = "lanekeeper"
AT_ONCE_S = 5.0
"""After a second signal, the process exits after this many seconds at most, even if a task has not ended."""


def run_with_telemetry(
    settings: "Settings", main: "Callable[[TracerProvider | None], Coroutine[None, None, None]]"
) -> None:
    """Run `main` with logs and traces as configured in the settings. `main` is called with OpenTelemetry's tracer
    provider, or None if no spans are sent."""
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


class Stop:
    """Handles SIGINT and SIGTERM. Before `armed` is set, a signal ends the process at once. Afterwards the first signal
    begins an orderly stop, and the second ends the process at once. `task`: the process's main task."""

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self._task = task
        self.event = asyncio.Event()
        """Set when the orderly stop begins."""
        self.armed = False
        """Whether the process has begun its work; the process sets this to True."""

    def __call__(self) -> None:
        if self.armed and not self.event.is_set():
            self.event.set()
        else:
            self._task.cancel()
            # The process is ended by force a little later, because some tasks may ignore the cancellation.
            asyncio.get_running_loop().call_later(AT_ONCE_S, os._exit, STOPPED)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM while the `with` block runs, by the `Stop` that is yielded to the block."""
    task = asyncio.current_task()
    assert task is not None
    stop = Stop(task)
    with listening(stop):
        yield stop


@contextmanager
def listening(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on each SIGINT and SIGTERM that arrives while the `with` block runs."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
