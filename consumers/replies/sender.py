"""Sends replies to queues, and by RabbitMQ's direct reply-to, that is, without a queue, to the channel on which the
request was published.

A broker before RabbitMQ 4.3.5 closes the connection that publishes to a forged direct reply-to address (docs/facts.md,
section 6). With such a broker the first reply to each direct reply-to address is sent over a separate connection. This
connection carries one reply at a time, so if the broker closes it, it is known which address was forged. If the broker
confirms the reply, the address is genuine, and further replies to this address use the ordinary connection.
"""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lanekeeper.amqp.publisher import Confirm, Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import ConfirmUnknown, RequestProblem

KILLED_WITHIN_S = 2.0
"""If the confirm of a direct reply to an untested address does not come, the worker waits for at most this many seconds
for the reason why the connection was lost, which shows whether the broker closed it because the address is forged."""
TRIES = 3
KEPT = 1000


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
        return self._own is not None and is_direct(address)

    def refusal(self, address: str) -> RequestProblem | None:
        return _forged() if address in self._forged else None

    async def send(self, message: Message, address: str, **how: Any) -> None:
        """Publish a message once, not `mandatory`."""
        how |= {"exchange": "", "routing_key": address, "mandatory": False}
        if self._own is not None and self._is_unknown(address):
            return await self._test_address(self._own, message, address, how)
        try:
            await self._publisher.publish(message, **how)
        except ConfirmUnknown:  # this address may have closed the connection: the next message tests it again
            self._genuine.pop(address, None)
            raise

    async def write(self, message: Message, address: str, *, timeout_s: float) -> "asyncio.Future[Confirm]":
        """Publish a message once without waiting for its confirm, and return the confirm as a future."""
        if self._own is not None and self._is_unknown(address):
            await self.send(message, address, timeout_s=timeout_s, traced=False)
            confirmed: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
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
        return address not in self._genuine and is_direct(address)

    def _on_answer(self, address: str, answer: "asyncio.Future[Confirm]") -> None:
        if not answer.cancelled() and answer.exception() is not None:  # as in `send`: test the address again
            self._genuine.pop(address, None)

    async def _test_address(self, own: Publisher, message: Message, address: str, how: dict[str, Any]) -> None:
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
    try:
        async with asyncio.timeout(KILLED_WITHIN_S):
            return "INTERNAL_ERROR" in await asyncio.shield(loss)
    except TimeoutError:
        return False


LONGEST = 255
_BROKER_NAMED = re.compile(r"amq\.gen-[A-Za-z0-9_-]{22}")
"""The pattern of the names that the broker itself gives to queues. Clients cannot create a queue with such a name
(docs/facts.md, section 6)."""
_DIRECT = re.compile(r"amq\.rabbitmq\.reply-to\.[A-Za-z0-9._+/=-]{1,200}")
_USER = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The pattern of the user names that `topology export` allows. Dots are excluded, because otherwise the queue
`lane.reply.a.b` could belong to the user `a` or to the user `a.b`."""
_SHOWN = 100


def is_direct(address: str) -> bool:
    """Whether a reply address has the form of a direct reply-to address (`amq.rabbitmq.reply-to.…`)."""
    return _DIRECT.fullmatch(address) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRule:
    """Says to which addresses replies may be sent. A worker may publish to every queue, so without this rule a
    requester could name a queue in `reply_to` to which it may not publish itself (threat T1 in docs/security.md).
    `bound`: the mode; `allow`: patterns, one of which an address must match as well; None: there is no such condition.

    open    (not `bound`) Allowed are addresses that the broker has named (queues `amq.gen-…`, direct reply-to), queues
            `lane.reply.…`, and any queue whose name begins neither with `lane.` nor with `amq.`. A requester who knows
            the name of another client's queue can make a worker send replies there.
    bound   Allowed are direct reply-to, and the queues `lane.reply.<user_id>` and `lane.reply.<user_id>.…` of the
            request's user. Other queues are not allowed, because it is unknown to which user they belong.
    """

    names: Names
    allow: Sequence[re.Pattern[str]] | None = None
    bound: bool = False

    def allows(self, address: str, *, user: str | None) -> bool:
        if len(address) > LONGEST:
            return False
        may = self._is_bound(address, user) if self.bound else self._is_open(address)
        return may and (self.allow is None or any(pattern.fullmatch(address) for pattern in self.allow))

    def allows_control(self, address: str, *, user: str | None) -> bool:
        """Whether the answer to a control message (cancel, result) may be sent to an address. Allowed are direct
        reply-to, the user's own reply queues (`lane.reply.<user_id>`) and, in mode `open`, queues that the broker has
        named. `user`: the `user_id` of the control message."""
        if len(address) > LONGEST:
            return False
        return self._is_bound(address, user) or (not self.bound and _BROKER_NAMED.fullmatch(address) is not None)

    def refusal(self, address: str, *, user: str | None) -> RequestProblem:
        reply = self.names.reply_prefix
        if not self.bound:
            may = f"a queue that the broker named, direct reply-to, {reply}…, or a queue of the application's own"
        elif user is None:
            may = f"direct reply-to, or with the property user_id, which the broker checks, {reply}<user_id>"
        elif _USER.fullmatch(user):
            may = f"direct reply-to, {reply}{user}, or {reply}{user}.…"
        else:
            may = "direct reply-to"
        return RequestProblem("forbidden_reply_to", f"reply_to {address[:_SHOWN]!r}: allowed are {may}")

    def _is_open(self, address: str) -> bool:
        namespace = self.names.namespace
        if address == namespace or (
            address.startswith(f"{namespace}.") and not address.startswith(self.names.reply_prefix)
        ):
            return False
        return not address.startswith("amq.") or bool(_BROKER_NAMED.fullmatch(address) or is_direct(address))

    def _is_bound(self, address: str, user: str | None) -> bool:
        if is_direct(address):
            return True
        own = f"{self.names.reply_prefix}{user}"
        return user is not None and _USER.fullmatch(user) is not None and f"{address}.".startswith(f"{own}.")
