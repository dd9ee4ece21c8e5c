"""Where a worker touches the world: every await of the core that is not its own. Here it waits for the world's turn.

An operation is asked, takes effect, and is answered: three moments, between which anything may happen. Its worker may
be gone by then; what was asked may take effect all the same.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

DELIVERY: ContextVar[object] = ContextVar("delivery")
"""Whose work this is, whatever task does it."""


@dataclass(eq=False)
class Operation:
    """One of a worker's, under way."""

    what: str
    about: str
    """The request's id; empty for what is about several."""
    owner: str
    effect: Callable[[], Any]
    lost: Callable[[str], Exception]
    """What its worker is told where it cannot be done, or where nobody knows."""
    answer: "asyncio.Future[Any]"
    is_done: bool = False
    result: Any = None
    is_hung: bool = False
    """It never ends by itself."""
    stays: bool = True
    """It may take effect when nobody waits for it any more."""

    @property
    def is_waited_for(self) -> bool:
        return not self.answer.done()

    @property
    def is_over(self) -> bool:
        """Nothing can come of it any more."""
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
    """The operations that one process has under way."""

    owner: str
    under_way: list[Operation] = field(default_factory=list)
    is_cut: bool = False
    """The process is gone: whatever of it still runs here touches nothing."""

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
