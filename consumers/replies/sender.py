"""Sends replies to queues, and by RabbitMQ's direct reply-to, that is, without a queue, to the channel on which the
request was published.

A broker before RabbitMQ 4.3.5 closes the connection that publishes to a forged direct reply-to address (docs/facts.md,
section 6). With such a broker the first reply to each direct reply-to address is sent over a separate connection. This
connection carries one reply at a time, so if the broker closes it, it is known which address was forged. If the broker
confirms the reply, the address is genuine, and further replies to this address use the ordinary connection.
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from consumers.replies.address import is_direct
from lanekeeper.amqp.confirming import Answer
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ConfirmUnknown, RequestProblem

KILLED_WITHIN_S = 2.0
"""If the confirm of a direct reply to an untested address does not come, the worker waits for at most this many seconds
for the reason why the connection was lost, which shows whether the broker closed it because the address is forged."""
TRIES = 3
"""To a broker before RabbitMQ 4.3.5, a direct reply is published at most this many times if the connection is lost each
time."""
KEPT = 1000
"""How many direct reply-to addresses a process remembers as forged (so that each of them closes the connection only
once), and how many it remembers as genuine; in both cases those that were tested last."""


class ReplySender:
    """Publishes replies to queues and to direct reply-to addresses. `own`: a publisher on a separate connection, for
    brokers before RabbitMQ 4.3.5, which close the connection that publishes to a forged address; None if the broker
    does not do that.

    Replies to direct reply-to are never published as `mandatory`, because brokers before 4.3 report such replies as
    unroutable although they were delivered (docs/facts.md, section 6).
    """

    def __init__(self, publisher: Publisher, *, own: Publisher | None) -> None:
        self._publisher = publisher
        self._own = own
        self._one_by_one = asyncio.Lock()
        self._forged: dict[str, None] = {}
        self._genuine: dict[str, None] = {}

    def needs_own_connection(self, address: str) -> bool:
        """Whether a reply to this address is sent over a connection of its own, apart from all other publishes, because
        the broker would close the connection if the address were forged."""
        return self._own is not None and is_direct(address)

    def refusal(self, address: str) -> RequestProblem | None:
        """The error with which a request is refused because its direct reply-to address is known to be forged; None for
        any other address."""
        return _forged() if address in self._forged else None

    async def send(self, message: Message, address: str, **how: Any) -> None:
        """Publish a message once, not `mandatory`. `how`: options of `Publisher.publish`. Raises RequestProblem if the
        address is forged, and the errors of `Publisher.publish`."""
        how |= {"exchange": "", "routing_key": address, "mandatory": False}
        if self._own is not None and self._is_unknown(address):
            return await self._test_address(self._own, message, address, how)
        try:
            await self._publisher.publish(message, **how)
        except ConfirmUnknown:  # this address may have closed the connection: the next message tests it again
            self._genuine.pop(address, None)
            raise

    async def write(self, message: Message, address: str, *, timeout_s: float) -> "asyncio.Future[Answer]":
        """Publish a message once without waiting for its confirm, and return the confirm as a future. If the address
        must first be tested over the separate connection, wait for the confirm there, and return a future that is
        already done. Raises the same errors as `send`."""
        if self._own is not None and self._is_unknown(address):
            await self.send(message, address, timeout_s=timeout_s, traced=False)
            confirmed: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            confirmed.set_result(None)
            return confirmed
        try:
            answer = await self._publisher.write(message, exchange="", routing_key=address, timeout_s=timeout_s)
        except ConfirmUnknown:
            self._genuine.pop(address, None)
            raise
        if address in self._genuine:
            answer.add_done_callback(partial(self._on_answer, address))
        return answer

    def _is_unknown(self, address: str) -> bool:
        """Whether this is a direct reply-to address that is not known to be genuine."""
        return address not in self._genuine and is_direct(address)

    def _on_answer(self, address: str, answer: "asyncio.Future[Answer]") -> None:
        if not answer.cancelled() and answer.exception() is not None:  # as in `send`: test the address again
            self._genuine.pop(address, None)

    async def _test_address(self, own: Publisher, message: Message, address: str, how: dict[str, Any]) -> None:
        """Publish a message over the separate connection of `own`, and remember whether the message's address is forged
        or genuine."""
        async with self._one_by_one:
            if (known := self.refusal(address)) is not None:
                raise known
            # wait until the connection is open, so that `loss` is that of the connection which publishes
            await own.connection.underlying()
            loss = own.connection.loss
            try:
                await own.publish(message, **how)
            except ConfirmUnknown as error:
                if not await _killed_by_the_broker(loss):
                    raise
                _remember(address, self._forged)
                raise _forged() from error
            _remember(address, self._genuine)

    async def send_surely(self, message: Message, address: str) -> None:
        """Publish a message, repeatedly if necessary, until the broker confirms it. If this broker closes connections
        that publish to forged addresses, a direct reply is published at most `TRIES` times. Raises PublishRefused as
        soon as the queue refuses the message, and the errors of `send`."""
        if not self.needs_own_connection(address):
            return await self._publisher.publish_surely(
                message, exchange="", routing_key=address, mandatory=not is_direct(address), refused_within_s=0
            )
        for _ in range(TRIES - 1):
            with suppress(ConfirmUnknown):  # the connection was lost, but not because of this address
                return await self.send(message, address)
        return await self.send(message, address)


def _remember(address: str, addresses: dict[str, None]) -> None:
    addresses[address] = None
    if len(addresses) > KEPT:
        del addresses[next(iter(addresses))]


def _forged() -> RequestProblem:
    return RequestProblem("forbidden_reply_to", "reply_to: a direct reply-to address that the broker did not make")


async def _killed_by_the_broker(loss: asyncio.Future[str]) -> bool:
    """Whether the broker closed the connection with the error 541 INTERNAL_ERROR, as it does if a client publishes to a
    forged direct reply-to address. `loss`: a future for the reason why the connection was lost."""
    try:
        async with asyncio.timeout(KILLED_WITHIN_S):
            return "INTERNAL_ERROR" in await asyncio.shield(loss)
    except TimeoutError:
        return False
