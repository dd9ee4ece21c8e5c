"""The interface between `Client` and the two ways to send requests and receive answers, AMQP and HTTP, and what both
ways share."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self

from lanekeeper.contract.messages import BodyAddress, Message
from lanekeeper.contract.problems import AccessRefused, BrokerError, TopologyMismatch
from lanekeeper.errors import Cancelled, ControlRefused, NoReply, NotEnded
from lanekeeper.replies import Final, Part

if TYPE_CHECKING:
    from lanekeeper.amqp.depth import Depth

FIRST_PAUSE_S = 0.1
"""The first pause, in seconds, between two queries for the same request's result."""
PAUSE_CAP_S = 5.0
"""The longest pause, in seconds, between two queries for the same request's result."""


@dataclass(slots=True, kw_only=True)
class OutgoingRequest:
    """One request that a client publishes: its message, its caller's options, and the state of publishing it."""

    message: Message
    content: BinaryIO | None = None
    """The body, if the caller gave it as a file; the body of `message` is then empty."""
    key: str
    """The request's routing key: `<lane>.<application>.<task>`."""
    tenant: str | None
    chose_id: bool
    """Whether the caller chose the request's id."""
    publish_within_s: float
    """For how many seconds to try to publish the request."""
    absent_within_s: float | None
    """The time limit for publishing, in seconds, while there is no connection and nothing was sent yet; None: no
    shorter limit than `publish_within_s`."""
    full_within_s: float
    """The time limit for publishing, in seconds, while the lane's queue is full."""
    timeout_s: float | None
    """How many seconds the caller waits for the answer; None: without a limit."""
    end: float | None
    """When the caller's wait for the answer ends, by the event loop's clock; None: never."""

    may_be_published: bool = False
    """Whether one of the earlier tries to publish the request may have reached the broker."""
    kept: BodyAddress | None = None
    """The address and digest of the request's body, if it was put into the store for large bodies."""

    @property
    def id(self) -> str:
        assert self.message.message_id is not None
        return self.message.message_id


class Transport(Protocol):
    """How a `Client` reaches the workers: through the broker (`OverAmqp`) or through a gateway (`OverHttp`).

    The methods return and raise the same as the methods of `Client` with these names. `answer` corresponds to
    `Client.request`, and `replies` to `Client.stream`, but these two raise TimeoutError at `outgoing.end`.
    """

    @property
    def user(self) -> str:
        """The client's user on the broker; empty over HTTP, where the gateway identifies the caller by its API key."""
        ...

    @property
    def trouble(self) -> str | None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def publish(self, outgoing: OutgoingRequest) -> None: ...

    async def answer(self, outgoing: OutgoingRequest) -> Final: ...

    def replies(self, outgoing: OutgoingRequest) -> AsyncGenerator[Part | Final, None]: ...

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final: ...

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled: ...

    async def send_cancellation(self, id: str, *, tenant: str | None, within_s: float) -> None:
        """Send a cancellation within about `within_s`, without waiting for a worker's answer. Raises BrokerError,
        ControlRefused."""
        ...

    async def depth(self, lane: str) -> "Depth | None": ...


def time_in(timeout_s: float | None) -> float | None:
    """The time `timeout_s` seconds from now, by the event loop's clock; None if `timeout_s` is None."""
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s


async def until_ended(ask: Callable[[float | None], Awaitable[Final]], *, end: float | None) -> Final:
    """Call `ask`, which fetches a request's final reply, repeatedly until the request has ended. `ask` gets the number
    of seconds that are left until `end` (a time of the event loop's clock), and is called for the last time at `end`.

    If `end` is None, `ask` gets None and there is no time limit, but the first BrokerError ends the wait. Raises the
    last error of `ask`.
    """
    loop = asyncio.get_running_loop()
    pause_s = FIRST_PAUSE_S
    while True:
        asked_at = loop.time()
        try:
            return await ask(None if end is None else max(0.0, end - asked_at))
        except (AccessRefused, TopologyMismatch):
            raise
        except (NotEnded, NoReply, BrokerError, ControlRefused) as error:
            if isinstance(error, ControlRefused) and not error.is_passing:
                raise
            over = isinstance(error, BrokerError) if end is None else loop.time() >= end
            if over:
                raise
        again_at = asked_at + pause_s
        await asyncio.sleep(max(0.0, (again_at if end is None else min(again_at, end)) - loop.time()))
        pause_s = min(PAUSE_CAP_S, pause_s * 1.5)
