"""Sends replies: the parts of a streamed answer, the final reply, and the final reply again if its queue refused it.

Replies go to queues, or by RabbitMQ's direct reply-to, that is, without a queue, to the channel on which the request
was published. The final reply is a persistent message, and the worker waits for its confirm.

Replies to a gateway in this process do not go through the broker: if the process ends, so do its callers' connections.

Parts are not persistent. What comes for an address while its last publish is under way goes out with the next one, and
in one message if the requester reads that. A lost part does not fail the attempt, because the final reply has the whole
answer.

A broker before RabbitMQ 4.3.5 closes the connection that publishes to a forged direct reply-to address (docs/facts.md,
section 6). With such a broker the first reply to each direct reply-to address is sent over a separate connection. This
connection carries one reply at a time, so if the broker closes it, it is known which address was forged. If the broker
confirms the reply, the address is genuine, and further replies to this address use the ordinary connection.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal

import structlog
from cachetools import LRUCache

from consumers.dialects import DIALECTS
from consumers.job import Job
from consumers.state.base import Completion
from lanekeeper.amqp.publisher import Confirm, Publisher
from lanekeeper.amqp.replies import DirectReplies
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import ANTHROPIC_MESSAGES, Names
from lanekeeper.contract.problems import (
    PROBLEMS,
    AccessRefused,
    BrokerError,
    ClientMisused,
    ConfirmUnknown,
    MessageTooLarge,
    ProviderFailure,
    PublishRefused,
    RequestProblem,
    Unroutable,
    answer_too_large,
)
from lanekeeper.replies import Part
from lanekeeper.telemetry import signals

JSON = "application/json"
JSON_LINES = "application/jsonl"
PROBLEM = "application/problem+json"
PART_TIMEOUT_S = 5.0
KILLED_WITHIN_S = 2.0
"""If the confirm of a direct reply to an untested address does not come, the worker waits for at most this many seconds
for the reason why the connection was lost."""
TRIES = 3
ADDRESSES_KEPT = 1000
log = structlog.get_logger()


class ReplySender:
    """Publishes replies to queues and to direct reply-to addresses.

    Replies to direct reply-to are never published as `mandatory`, because brokers before 4.3 report such replies as
    unroutable although they were delivered (docs/facts.md, section 6).
    """

    def __init__(self, publisher: Publisher, *, own: Publisher | None) -> None:
        self._publisher = publisher
        self._own = own
        self._one_by_one = asyncio.Lock()
        self._forged: LRUCache[str, None] = LRUCache(ADDRESSES_KEPT)
        self._genuine: LRUCache[str, None] = LRUCache(ADDRESSES_KEPT)

    def needs_own_connection(self, address: str) -> bool:
        return self._own is not None and is_direct(address)

    def refusal(self, address: str) -> RequestProblem | None:
        return _forged() if address in self._forged else None

    async def send(self, message: Message, address: str, **how: Any) -> None:
        how |= {"exchange": "", "routing_key": address, "mandatory": False}
        if self._own is not None and self._is_unknown(address):
            return await self._test_address(self._own, message, address, how)
        try:
            await self._publisher.publish(message, **how)
        except ConfirmUnknown:  # this address may have closed the connection: the next message tests it again
            self._genuine.pop(address, None)
            raise

    async def write(self, message: Message, address: str, *, timeout_s: float) -> "asyncio.Future[Confirm]":
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
        await own.connection.underlying()  # not one after the other, if it cannot be opened
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
                self._forged[address] = None
                raise _forged() from error
            self._genuine[address] = None

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
"""The names that the broker itself gives to queues. Clients cannot create such a queue (docs/facts.md, section 6)."""
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
        named."""
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


@dataclass(slots=True, eq=False)
class Replies:
    """Publishes replies to the default exchange. `loses_large_parts`: a part of a stream that is too large for a
    message is left out, because the whole answer can be stored outside the broker; else the request ends with an error,
    because the final reply would be too large too. `here`: the replies that a gateway in this process waits for."""

    sender: ReplySender
    _: KW_ONLY
    rule: ReplyRule
    loses_large_parts: bool = False
    here: DirectReplies | None = None
    _outboxes: "dict[str, Outbox]" = field(init=False, default_factory=dict)

    def refusal(self, job: Job) -> RequestProblem | None:
        address = job.message.reply_to
        if not address:
            return None
        if self.rule.allows(address, user=job.hop.user_id):
            return self.sender.refusal(address)
        return self.rule.refusal(address, user=job.hop.user_id)

    async def final(self, job: Job, completion: Completion, *, replayed: bool = False) -> bool:
        """Send the final reply. Return False if the reply queue is full and refused it."""
        if completion.code and not PROBLEMS[completion.code].answered:
            return True
        # the completion of a request that was cancelled before it arrived has no headers about its wait: add them here
        wait = {n.WAIT_MS: job.wait_ms, n.RUN_MS: job.run_ms, n.WAIT_FROM: job.published.by}
        headers: dict[str, Any] = {n.STATUS: completion.status, n.REQUEST_ID: job.id, **wait, **completion.headers}
        if replayed:
            headers[n.REPLAYED] = True
        is_answer = completion.status == "ok"
        try:
            return await self._final(
                job, body=completion.body, content_type=JSON if is_answer else PROBLEM, headers=headers
            )
        except MessageTooLarge as error:  # stored while the broker accepted larger messages: send a short error
            log.error(signals.ANSWER_UNSENT, size=error.size, limit=error.limit)
            problem = answer_too_large(error.size, error.limit)
            body = problem.document(request=job.id, attempts=job.attempts, trace=job.trace_id)
            return await self._final(job, body=body, content_type=PROBLEM, headers={**headers, n.STATUS: "error"})

    async def _final(self, job: Job, *, body: bytes, content_type: str, headers: dict[str, Any]) -> bool:
        address = job.message.reply_to
        if not address or not self.rule.allows(address, user=job.hop.user_id):
            return True
        message = Message(
            body=body,
            headers=headers,
            content_type=content_type,
            message_id=uuid.uuid4().hex,
            correlation_id=job.message.correlation_id,
        )
        if self.here is not None and self.here.add(message.correlation_id, message):
            return True
        try:
            await self.sender.send_surely(message, address)
        except Unroutable:
            log.info(signals.REPLY_UNROUTABLE)
        except AccessRefused as error:
            raise RequestProblem("internal", f"the worker's user may not send replies: {error}") from error
        except PublishRefused:
            return False
        return True

    def outbox(self, address: str) -> "Outbox":
        """That of the parts for an address, while any are under way."""
        if (found := self._outboxes.get(address)) is None:
            found = self._outboxes[address] = Outbox(self, address, on_empty=partial(self._outboxes.pop, address))
        return found


PAUSES_S = (1, 2, 4, 8, 16, 30)
"""The pauses, in seconds, before the second and each later try to send a reply to a full queue."""
MAX_WAITING = 1000
MOST_OF_ONE = 10
"""One tenant may have at most `MAX_WAITING` divided by this number of replies that wait because their queue is full.
For requests without a tenant (without `user_id`) the same limit applies to each reply queue."""
WARN_EVERY_MS = 1000


class ReplyRetries:
    """Decides whether a reply that a full queue has refused is sent again later, and when; limits how many replies wait
    in this way; and counts the replies that are given up."""

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        self.max_waiting = max_waiting
        self._waiting: list[tuple[int, tuple[str, str]]] = []
        self._next_warning_ms = 0
        self.given_up = 0

    def pause_ms(self, job: Job, *, now_ms: int) -> int | None:
        tenant = job.identity.tenant
        whose = ("tenant", tenant) if tenant else ("queue", job.message.reply_to or "")
        self._waiting = [(back_ms, owner) for back_ms, owner in self._waiting if back_ms > now_ms]
        of_one = sum(owner == whose for _, owner in self._waiting)
        is_full = len(self._waiting) >= self.max_waiting or of_one >= max(1, self.max_waiting // MOST_OF_ONE)
        if is_full or job.hop.reply_try >= len(PAUSES_S):
            self.given_up += 1
            is_due = now_ms >= self._next_warning_ms
            if is_due:
                self._next_warning_ms = now_ms + WARN_EVERY_MS
            tell = log.warning if is_due else log.debug
            tell(signals.REPLY_GIVEN_UP, tries=job.hop.reply_try + 1, given_up=self.given_up)
            return None
        pause_ms = 1000 * PAUSES_S[job.hop.reply_try]
        self._waiting.append((now_ms + pause_ms, whose))
        return pause_ms


WAITING_BYTES = 256 * 1024
"""How many bytes the parts for one address that wait for the publish before them may have together, each counted with
`PART_OVERHEAD`; a larger part waits alone."""
PART_OVERHEAD = 256
KEPT_BYTES = 64 * 1024
"""How much of a stream is kept at most before its first content; usually it is one event."""
SEVERAL = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""The correlation ids that need no escapes in a message of several parts."""


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingPart:
    of: "Parts"
    kind: str
    seq: int
    body: bytes


class Outbox:
    """The parts for one address. While the last publish is under way, what comes waits, and goes out with the next."""

    def __init__(self, replies: Replies, address: str, *, on_empty: Callable[[], object]) -> None:
        self._replies = replies
        self._address = address
        self._on_empty = on_empty
        self._waiting: list[_WaitingPart] = []
        self._bytes = 0
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._publishing: asyncio.Task[None] | None = None

    def has_room(self, size: int) -> bool:
        return not self._waiting or self._bytes + size + PART_OVERHEAD <= WAITING_BYTES

    async def room(self) -> None:
        await asyncio.shield(self._next)

    def add(self, part: _WaitingPart) -> "asyncio.Future[None]":
        """The future is done when the part has been confirmed, or is lost."""
        self._waiting.append(part)
        self._bytes += len(part.body) + PART_OVERHEAD
        if self._publishing is None:
            # without the context of this request: the parts are those of several
            self._publishing = asyncio.create_task(self._publish(), name="parts", context=Context())
        return self._next

    async def _publish(self) -> None:
        sent = self._next
        try:
            while self._waiting:
                parts, self._waiting, self._bytes = self._waiting, [], 0
                sent, self._next = self._next, asyncio.get_running_loop().create_future()
                await self._send(parts)
                sent.set_result(None)
        finally:
            self._on_empty()
            for each in (sent, self._next):
                if not each.done():
                    each.set_result(None)

    async def _send(self, parts: Sequence[_WaitingPart]) -> None:
        groups = [[part] for part in parts if not part.of.reads_several]
        if several := [part for part in parts if part.of.reads_several]:
            groups.append(several)
        answers = {}
        for group in groups:
            message = _several(group) if len(group) > 1 else _single(group[0])
            try:
                answer = await self._replies.sender.write(message, self._address, timeout_s=PART_TIMEOUT_S)
                answers[answer] = group
            except (BrokerError, ClientMisused, RequestProblem) as error:
                for part in group:
                    part.of.lose(error)
        if answers:
            await asyncio.wait(answers, timeout=PART_TIMEOUT_S)
        for answer, group in answers.items():
            if not answer.done():
                why: object = f"no confirm within {PART_TIMEOUT_S:g} s"
            else:
                refused = None if answer.exception() else answer.result()
                why = answer.exception() or (refused and refused.__name__)
            for part in group if why else ():
                part.of.lose(why)


def _single(part: _WaitingPart) -> Message:
    job = part.of.job
    headers: dict[str, Any] = {
        n.REQUEST_ID: job.id, n.ATTEMPT: job.attempts, n.PART: part.kind, n.SEQ: part.seq,
    }  # fmt: skip
    if job.lane is not None:
        headers[n.LANE_NAME] = job.lane.name
    return Message(
        body=part.body,
        headers=headers,
        content_type=JSON,
        correlation_id=job.message.correlation_id,
        persistent=False,
    )


def _several(parts: Sequence[_WaitingPart]) -> Message:
    """One line of JSON for each part."""
    lines = [
        b'["%b","%b",%d,%b]'
        % ((part.of.job.message.correlation_id or "").encode(), part.kind.encode(), part.seq, _in_one_line(part.body))
        for part in parts
    ]
    return Message(body=b"\n".join(lines), headers={n.PART: n.SEVERAL}, content_type=JSON_LINES, persistent=False)


def _in_one_line(body: bytes) -> bytes:
    return body.replace(b"\r", b" ").replace(b"\n", b" ") if b"\n" in body or b"\r" in body else body


class Parts:
    """Sends the parts of one attempt's stream to the requester, numbered from 0. Call this object with each event of
    the provider.

    A part `restart` tells the requester to discard the events so far. It is sent as soon as a call fails whose events
    were sent and another one may follow, with the provider's error; and before the first event, if the requester may
    have events of an attempt that could not say so.
    """

    def __init__(self, replies: Replies, job: Job, *, keeps: bool = False) -> None:
        """`keeps`: keep the events before the first one of content, until that comes or `release` is called, because an
        answer without content may be replaced by another one."""
        self._replies = replies
        self.job = job
        self._keeps = keeps
        self._seq = -1
        self._has_begun = False
        self._loss: object = None
        self._has_lost = False
        self._sent: asyncio.Future[None] | None = None
        dialect = ANTHROPIC_MESSAGES if job.decoded is None else job.decoded.request.dialect
        self._content = DIALECTS[dialect].content
        self.flow = False
        self.on_flow: Callable[[], None] = lambda: None
        self.has_sent = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.is_open = not self._keeps
        headers, correlation_id = job.message.headers, job.message.correlation_id or ""
        self.reads_several = headers.get(n.PARTS_TOGETHER) in (True, "true") and bool(SEVERAL.fullmatch(correlation_id))

    async def __call__(self, event: bytes, /) -> None:
        if not self.flow and self._content in event:
            self.flow = True
            self.on_flow()
        if self.is_open:
            await self._pass_on(event)
            return
        self._kept.append(event)
        self._kept_bytes += len(event)
        if self.flow or self._kept_bytes > KEPT_BYTES:
            await self.release(self.taken())

    def taken(self) -> Sequence[bytes]:
        """What is kept, which is not kept any longer."""
        events, self._kept, self._kept_bytes = self._kept, [], 0
        return events

    async def release(self, events: Sequence[bytes]) -> None:
        """Send these events, and keep no more."""
        self.is_open = True
        for event in events:
            await self._pass_on(event)

    async def _pass_on(self, event: bytes) -> None:
        address, progress = self.job.message.reply_to, self.job.progress
        if not address and progress is None:
            return
        self.has_sent = self._has_begun = True
        if self._seq < 0 and (self.job.attempts > 1 or self.job.redelivered):
            await self._send(address, "restart", b"{}")
        await self._send(address, "event", event)

    async def restart(self, failed: ProviderFailure | None = None) -> bool:
        """Whether events of the call that has failed had been sent."""
        had_begun, self._has_begun, self.flow = self._has_begun, False, False
        self.is_open = not self._keeps
        self.taken()
        if had_begun:
            self._seq = -1
            body = json.dumps({} if failed is None else failed.members, ensure_ascii=False).encode()
            with suppress(RequestProblem):  # the next event raises it too
                await self._send(self.job.message.reply_to, "restart", body)
        return had_begun

    def lose(self, why: object) -> None:
        self._loss = why

    async def confirmed(self) -> None:
        if self._sent is not None:
            await asyncio.shield(self._sent)
        self._note_loss()

    async def _send(self, address: str | None, part: Literal["event", "restart"], body: bytes) -> None:
        self._seq += 1
        if not address:
            if self.job.progress is not None:
                self.job.progress.part(part, body)
            return
        here = self._replies.here
        if here is not None and here.add(self.job.message.correlation_id, Part(kind=part, seq=self._seq, body=body)):
            return
        self._raise_problem()
        while not (outbox := self._replies.outbox(address)).has_room(len(body)):
            await outbox.room()  # it may be another outbox afterwards
        self._sent = outbox.add(_WaitingPart(self, part, self._seq, body))
        if len(body) > WAITING_BYTES:
            await asyncio.shield(self._sent)
            self._raise_problem()

    def _raise_problem(self) -> None:
        """Raises RequestProblem if the address is forged, or a part is too large and the answer will be, too."""
        loss = self._loss
        if isinstance(loss, MessageTooLarge) and not self._replies.loses_large_parts:
            raise answer_too_large(loss.size, loss.limit, setting="LANEKEEPER_BODIES__URL") from loss
        if isinstance(loss, RequestProblem):
            raise loss
        self._note_loss()

    def _note_loss(self) -> None:
        if self._loss is not None and not self._has_lost:
            self._has_lost = True  # logged once for each attempt, because a full queue refuses all later parts too
            log.info(signals.PART_LOST, reason=str(self._loss))
