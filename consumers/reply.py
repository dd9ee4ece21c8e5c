"""Replies: where they may go, and what they say. The final one is persistent and confirmed, the parts before it not."""

import asyncio
import re
import uuid
from collections.abc import Sequence
from typing import Any

import structlog

from consumers.job import Job
from consumers.state.base import Completion
from topology import names as n
from topology import signals
from topology.broker.publisher import Publisher
from topology.contract.messages import Message
from topology.contract.problems import (
    PROBLEMS,
    AccessRefused,
    BrokerError,
    ConfirmUnknown,
    MessageTooLarge,
    PublishRefused,
    RequestProblem,
    Unroutable,
    answer_too_large,
)
from topology.names import Names

JSON = "application/json"
PROBLEM = "application/problem+json"
PART_TIMEOUT_S = 5.0
KILLED_WITHIN_S = 2.0
DIRECT_TRIES = 3
DEADLY_KEPT = 1000
"""Forged direct reply-to addresses that are remembered, so that each kills the connection once, not at every part."""
_BROKER_NAMED = re.compile(r"amq\.gen-[A-Za-z0-9_-]{22}")
"""A queue that the broker named: nobody can create one by hand (facts.md, section 6)."""
_DIRECT = re.compile(r"amq\.rabbitmq\.reply-to\.[A-Za-z0-9._+/=-]{1,200}")
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Replies:
    """Publishes replies to the default exchange.

    `direct` is a publisher on a connection of its own, for direct reply-to on brokers before 4.3.5, where a forged
    address kills the connection that answers it (facts.md, section 6); None where that is mended.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        names: Names,
        direct: Publisher | None = None,
        allow: Sequence[re.Pattern[str]] | None = None,
    ) -> None:
        self._publisher = publisher
        self._direct = direct
        self._one_by_one = asyncio.Lock()
        self._deadly: dict[str, None] = {}
        self._names = names
        self._allow = allow

    def refusal(self, job: Job) -> RequestProblem | None:
        """Why a reply may not go where the request says; None where it may, or where it wants no reply."""
        address = job.message.reply_to
        if not address or self._may_answer(address):
            return None
        return RequestProblem(
            "forbidden_reply_to",
            f"reply_to {address[:100]!r}: allowed are a queue that the broker named, direct reply-to, "
            f"{self._names.reply_prefix}…, or a queue of the application's own",
        )

    async def final(self, job: Job, completion: Completion, *, replayed: bool = False) -> bool:
        """Send how a request ended, in one try. False: the reply queue refuses it (it is full), and nothing was sent.

        A requester that has gone is no error. Raises BrokerError where the broker does not take it.
        """
        if completion.code and not PROBLEMS[completion.code].answered:
            return True
        # a cancellation that was recorded before the request came knows nothing of its wait
        wait = {n.WAIT_MS: job.wait_ms, n.RUN_MS: job.run_ms, n.WAIT_FROM: job.published.by}
        headers: dict[str, Any] = {n.STATUS: completion.status, n.REQUEST_ID: job.id, **wait, **completion.headers}
        if replayed:
            headers[n.REPLAYED] = True
        is_answer = completion.status == "ok"
        try:
            return await self._final(
                job, body=completion.body, content_type=JSON if is_answer else PROBLEM, headers=headers
            )
        except MessageTooLarge as error:  # kept when the broker took more; what is told then has to be short
            log.error(signals.ANSWER_UNSENT, request=job.id, lane=job.lane_name, size=error.size, limit=error.limit)
            told = answer_too_large(error.size, error.limit).document(request=job.id, attempts=job.attempts)
            return await self._final(job, body=told, content_type=PROBLEM, headers={**headers, n.STATUS: "error"})

    def parts(self, job: Job) -> "Parts":
        """Sends one event of the stream each time it is called."""
        return Parts(self, job)

    def _may_answer(self, address: str) -> bool:
        if len(address) > 255 or address in self._deadly:
            return False
        ours = address.startswith(f"{self._names.namespace}.") and not address.startswith(self._names.reply_prefix)
        if ours or address == self._names.namespace:
            return False
        if address.startswith("amq.") and not (_BROKER_NAMED.fullmatch(address) or _DIRECT.fullmatch(address)):
            return False
        return self._allow is None or any(pattern.fullmatch(address) for pattern in self._allow)

    async def _final(self, job: Job, *, body: bytes, content_type: str, headers: dict[str, Any]) -> bool:
        address = job.message.reply_to
        if address in self._deadly:
            raise _deadly()
        if not address or not self._may_answer(address):
            return True
        message = Message(
            body=body,
            headers=headers,
            content_type=content_type,
            message_id=uuid.uuid4().hex,
            correlation_id=job.message.correlation_id,
        )
        try:
            if _DIRECT.fullmatch(address):
                await self._to_direct(message, address)
            else:
                await self._publisher.publish_surely(message, exchange="", routing_key=address, refused_within_s=0)
        except Unroutable:
            log.info(signals.REPLY_UNROUTABLE, id=job.id, lane=job.lane_name)
        except AccessRefused as error:
            raise RequestProblem("internal", f"the worker's user may not send replies: {error}") from error
        except PublishRefused:
            return False
        return True

    async def _to_direct(self, message: Message, address: str) -> None:
        """Not mandatory: brokers before 4.3 report delivered direct replies as unroutable (facts.md, section 6)."""
        if self._direct is None:
            await self._publisher.publish_surely(message, exchange="", routing_key=address, mandatory=False)
            return
        for left in reversed(range(DIRECT_TRIES)):
            try:
                await self._to_direct_alone(self._direct, message, address)
            except ConfirmUnknown:  # the connection was lost by a fault of its own
                if not left:
                    raise
            else:
                return

    async def _to_direct_alone(self, publisher: Publisher, message: Message, address: str, **how: Any) -> None:
        """One at a time, parts too: what kills the connection must be known, or somebody else would be taken for it.

        Raises RequestProblem for an address that killed it, now or before; else as `Publisher.publish`.
        """
        async with self._one_by_one:
            if address in self._deadly:
                raise _deadly()
            await publisher.connection.underlying()  # so that it is the connection that is open now whose loss we watch
            loss = publisher.connection.loss
            try:
                await publisher.publish(message, exchange="", routing_key=address, mandatory=False, **how)
            except ConfirmUnknown as error:
                if not await _killed_by_the_broker(loss):
                    raise
                self._deadly[address] = None
                if len(self._deadly) > DEADLY_KEPT:
                    del self._deadly[next(iter(self._deadly))]
                raise _deadly() from error

    async def part(self, job: Job, address: str, *, part: str, seq: int, body: bytes) -> None:
        """A part that cannot be sent is no failure of the attempt: the final reply is what counts.

        Raises RequestProblem for an address that nothing may be sent to, and for a part that is too large: the whole
        answer would be, too. There is no sense in going on.
        """
        headers: dict[str, Any] = {n.REQUEST_ID: job.id, n.ATTEMPT: job.attempts, n.PART: part, n.SEQ: seq}
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        message = Message(
            body=body,
            headers=headers,
            content_type=JSON,
            correlation_id=job.message.correlation_id,
            persistent=False,
        )
        how: dict[str, Any] = {"timeout_s": PART_TIMEOUT_S, "traced": False}
        try:
            if self._direct is not None and _DIRECT.fullmatch(address):
                await self._to_direct_alone(self._direct, message, address, **how)
            else:
                await self._publisher.publish(message, exchange="", routing_key=address, mandatory=False, **how)
        except MessageTooLarge as error:
            raise answer_too_large(error.size, error.limit) from error
        except BrokerError as error:
            log.info(signals.PART_LOST, id=job.id, lane=job.lane_name, reason=str(error))


class Parts:
    """The parts of one attempt, counted from 0.

    An attempt after the first announces itself before its first event: forget what came so far. So does what begins
    again within an attempt.
    """

    def __init__(self, replies: Replies, job: Job) -> None:
        self._replies = replies
        self._job = job
        self._seq = -1
        self._restarted = False
        self.has_sent = False
        """Whether the requester was sent anything that an attempt after this one must have it forget."""

    async def __call__(self, event: bytes, /) -> None:
        if not (address := self._job.message.reply_to):
            return
        self.has_sent = True
        if self._seq < 0 and (self._restarted or self._job.attempts > 1 or self._job.redelivered):
            self._seq += 1
            await self._replies.part(self._job, address, part="restart", seq=self._seq, body=b"{}")
        self._seq += 1
        await self._replies.part(self._job, address, part="event", seq=self._seq, body=event)

    def restart(self) -> bool:
        """What comes now is of another call; whether anything had been sent."""
        had_begun = self._seq >= 0
        if had_begun:
            self._seq, self._restarted = -1, True
        return had_begun


def _deadly() -> RequestProblem:
    return RequestProblem("forbidden_reply_to", "reply_to: a direct reply-to address that the broker did not make")


async def _killed_by_the_broker(loss: asyncio.Future[str]) -> bool:
    """Whether the broker ended the connection over what was sent on it (541 INTERNAL_ERROR)."""
    try:
        async with asyncio.timeout(KILLED_WITHIN_S):
            return "INTERNAL_ERROR" in await asyncio.shield(loss)
    except TimeoutError:
        return False
