"""SIGINT and SIGTERM of a process that works until it is told to stop."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.cli.ending import STOPPED

AT_ONCE_S = 5.0


class Stop:
    """Handles SIGINT and SIGTERM. Before the work has begun the first ends the process at once; afterwards the first
    begins an orderly stop, and the second ends the process at once."""

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self._task = task
        self.event = asyncio.Event()
        self.armed = False

    def __call__(self) -> None:
        if self.armed and not self.event.is_set():
            self.event.set()
        else:
            self._task.cancel()
            # tasks that ignore the cancellation are not waited for
            asyncio.get_running_loop().call_later(AT_ONCE_S, os._exit, STOPPED)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Handle the signals inside this block."""
    task = asyncio.current_task()
    assert task is not None
    stop = Stop(task)
    with listening(stop):
        yield stop


@contextmanager
def listening(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGINT and SIGTERM."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
