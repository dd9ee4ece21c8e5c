"""A worker's operations on the outside world: every await of the core on something outside its process.

An operation is requested, takes effect, and is answered. The world decides when, and anything may happen between these
three moments. The worker may have crashed by then; the operation may take effect all the same.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

DELIVERY: ContextVar[object] = ContextVar("delivery")
"""The delivery that is being worked on, in whichever task."""


@dataclass(eq=False)
class Operation:
    """A pending operation of a worker."""

    what: str
    about: str
    """The request's id; empty for an operation on several requests."""
    owner: str
    effect: Callable[[], Any]
    lost: Callable[[str], Exception]
    """The error that its worker gets if it fails, or if its outcome is unknown."""
    answer: "asyncio.Future[Any]"
    is_done: bool = False
    result: Any = None
    is_hung: bool = False
    """Whether it never ends by itself."""
    stays: bool = True
    """Whether it may take effect after its worker has stopped waiting for it."""

    @property
    def is_waited_for(self) -> bool:
        return not self.answer.done()

    @property
    def is_over(self) -> bool:
        """Whether it can have no effect any more."""
        return not self.is_waited_for and (self.is_done or not self.stays)

    def __str__(self) -> str:
        return f"{self.owner} {self.what} {self.about}"

    def do(self) -> None:
        self.result, self.is_done = self.effect(), True

    def do_and_tell(self) -> None:
        self.do()
        self.tell()

    def tell(self) -> None:
        if not self.answer.done():
            self.answer.set_result(self.result)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class Edge:
    """The pending operations of one process."""

    owner: str
    under_way: list[Operation] = field(default_factory=list)
    is_cut: bool = False
    """Whether the process is gone: code of it that still runs can reach nothing."""

    async def reach(
        self,
        what: str,
        about: str,
        effect: Callable[[], Any],
        *,
        lost: Callable[[str], Exception],
        stays: bool = True,
    ) -> Any:
        if self.is_cut:
            raise asyncio.CancelledError
        answer = asyncio.get_running_loop().create_future()
        self.under_way.append(Operation(what, about, self.owner, effect, lost, answer, stays=stays))
        return await answer
