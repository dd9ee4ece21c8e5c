"""The seam under `Client`: how requests get to their lanes and answers come back. Over AMQP or over HTTP."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self

from lanekeeper.contract.messages import Kept, Message
from lanekeeper.errors import Cancelled
from lanekeeper.replies import Final, Part

if TYPE_CHECKING:
    from lanekeeper.amqp.depth import Depth


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request, as its caller wants it sent."""

    message: Message
    content: BinaryIO | None = None
    """The body, where it is a file: `message` is then empty."""
    key: str
    tenant: str | None
    chose_id: bool
    """Whether the caller chose the request's id."""
    publish_within_s: float
    """How long to try to publish."""
    absent_within_s: float | None
    """How long of that to wait for a broker that is not there, as long as nothing was published; None: all of it."""
    full_within_s: float
    """How long of that a full lane is tried again."""
    timeout_s: float | None
    """How long the caller waits for the answer; None: without a bound."""
    end: float | None
    """The moment (by the loop's clock) at which this time is over."""

    may_be_published: bool = False
    """Whether an earlier try may have reached the broker."""
    kept: Kept | None = None
    """Where the body was put that is too large for a message."""

    @property
    def id(self) -> str:
        assert self.message.message_id is not None
        return self.message.message_id


class Transport(Protocol):
    """`Client` says what each method returns and raises. `answer` and `replies` raise TimeoutError at `asked.end`."""

    @property
    def user(self) -> str:
        """Whom the other end knows this client as; empty if only the other end knows."""
        ...

    @property
    def trouble(self) -> str | None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def publish(self, asked: Asked) -> None: ...

    async def answer(self, asked: Asked) -> Final: ...

    def replies(self, asked: Asked) -> AsyncGenerator[Part | Final, None]: ...

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final: ...

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled: ...

    async def cancel_unheard(self, id: str, *, tenant: str | None, within_s: float) -> None:
        """Cancel without waiting for a worker, within about `within_s`. Raises BrokerError, ControlRefused."""
        ...

    async def depth(self, lane: str) -> "Depth | None": ...


def moment(timeout_s: float | None) -> float | None:
    """The moment `timeout_s` from now, by the loop's clock."""
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
