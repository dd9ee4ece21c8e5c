"""Direct reply-to: replies without a queue, to the channel that published the request.

Before RabbitMQ 4.3.5 a forged address kills the connection that answers it (docs/facts.md, section 6). There the first
reply to an address is sent over a connection of its own, one at a time, so that we know which address killed it. An
address that has taken a reply is genuine: further replies use the ordinary connection.
"""

import asyncio
from typing import Any

from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ConfirmUnknown, RequestProblem

KILLED_WITHIN_S = 2.0
TRIES = 3
KEPT = 1000
"""How many forged addresses are remembered, so that each kills the connection only once; and as many genuine ones."""


class DirectSender:
    """Publishes to direct reply-to addresses. `own`: a publisher on a connection of its own, for brokers before 4.3.5.

    It never sets `mandatory`: brokers before 4.3 report delivered direct replies as unroutable (docs/facts.md, section
    6).
    """

    def __init__(self, publisher: Publisher, *, own: Publisher | None) -> None:
        self._publisher = publisher
        self._own = own
        self._one_by_one = asyncio.Lock()
        self._deadly: dict[str, None] = {}
        self._good: dict[str, None] = {}

    @property
    def is_apart(self) -> bool:
        """Whether direct replies have a separate connection."""
        return self._own is not None

    def refusal(self, address: str) -> RequestProblem | None:
        """The problem of an address that killed the connection before; None for any other."""
        return _deadly() if address in self._deadly else None

    async def send(self, message: Message, address: str, **how: Any) -> None:
        """Send it once. Raises RequestProblem if the address kills the connection, now or before; else as
        `Publisher.publish`."""
        how |= {"exchange": "", "routing_key": address, "mandatory": False}
        if self._own is None:
            await self._publisher.publish(message, **how)
        elif address in self._good:
            try:
                await self._publisher.publish(message, **how)
            except ConfirmUnknown:  # perhaps this address killed the connection: the next try finds out
                self._good.pop(address, None)
                raise
        else:
            await self._find_out(self._own, message, address, how)

    async def _find_out(self, own: Publisher, message: Message, address: str, how: dict[str, Any]) -> None:
        async with self._one_by_one:
            if (known := self.refusal(address)) is not None:
                raise known
            # make sure that the connection which is watched is the one that is open now
            await own.connection.underlying()
            loss = own.connection.loss
            try:
                await own.publish(message, **how)
            except ConfirmUnknown as error:
                if not await _killed_by_the_broker(loss):
                    raise
                _remember(address, self._deadly)
                raise _deadly() from error
            _remember(address, self._good)

    async def send_surely(self, message: Message, address: str) -> None:
        """Send it until the broker has it. Raises as `send`."""
        if self._own is None:
            return await self._publisher.publish_surely(message, exchange="", routing_key=address, mandatory=False)
        for left in reversed(range(TRIES)):
            try:
                return await self.send(message, address)
            except ConfirmUnknown:  # the connection was lost for another reason
                if not left:
                    raise
        return None


def _remember(address: str, among: dict[str, None]) -> None:
    among[address] = None
    if len(among) > KEPT:
        del among[next(iter(among))]


def _deadly() -> RequestProblem:
    return RequestProblem("forbidden_reply_to", "reply_to: a direct reply-to address that the broker did not make")


async def _killed_by_the_broker(loss: asyncio.Future[str]) -> bool:
    """Whether the broker ended the connection because of what was sent on it (541 INTERNAL_ERROR)."""
    try:
        async with asyncio.timeout(KILLED_WITHIN_S):
            return "INTERNAL_ERROR" in await asyncio.shield(loss)
    except TimeoutError:
        return False
