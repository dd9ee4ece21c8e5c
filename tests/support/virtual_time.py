"""An event loop in virtual time: when all tasks wait, its clock jumps to the next timer. Five minutes take a second."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class NothingLeft(AssertionError):
    """Every task waits and no timer is set: a task was never woken."""


class _Instant(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft("everything waits, and no timer is set")
        if timeout > 0:
            self.passed_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 1000 s."""

    _default_executor: Executor | None

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        return 1000.0 + self._instant.passed_s

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """In this thread: the loop's own would wait for another thread, for which no virtual time passes."""
        if self._default_executor is not None:
            self._default_executor.shutdown()


def virtually(story: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine that runs in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **given: P.kwargs) -> None:
        virtually(test(*args, **given))

    return run
