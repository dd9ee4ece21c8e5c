"""Answers control messages, with which clients cancel a request or fetch its result, and operators pause and resume
(docs/contract.md, "Control"). Every worker answers `status` and `probe`, from a queue of its own
(service/worker/running.py).

The routing key and the property `type` of a message both name the command. The brake's commands (`pause`, `resume`,
`pauses`) are accepted only from users in the setting `control.operators`, because a client that may cancel its own
requests must not pause those of others (docs/decisions/0024).

All workers share one queue, and each message goes to one of them. A cancellation is acknowledged only after it is
stored. The queue is read in order, so a cancellation waits for all messages before it. Therefore a message that exceeds
its tenant's limit must take very little time.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal

import structlog

from consumers.background import background_task
from consumers.batches.groups import GroupCancelling
from consumers.brake import Brake, read_pause, too_many
from consumers.claiming import Claiming
from consumers.clock import NowMs, moment_text, now_ms
from consumers.job import tenant_of, user_id_missing
from consumers.rate_limit import LogThrottle, RateLimit
from consumers.replies import JSON, PROBLEM, ReplyRule, ReplySender
from consumers.settle import FAULTS_AT_MOST, Settler
from consumers.state.base import (
    Cancelling,
    Completion,
    Found,
    Identity,
    Pause,
    PauseKind,
    StoredPauses,
    StoreUnavailable,
)
from consumers.state.groups import State, progress, unknown
from consumers.state.store import Store
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, TENANT, is_request_id, is_tenant
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerError,
    MessageTooLarge,
    RequestProblem,
    answer_too_large,
    invalid_request,
)
from lanekeeper.telemetry import signals
from topology.broker.consume import ChannelLost, Deliveries, Delivery, Session, supervised
from topology.broker.notices import Notices

MESSAGE_BYTES = 16 * 1024
KNOWN = (*n.CONTROL_KEYS, *n.BRAKE_KEYS, *n.WEBHOOK_COMMANDS, *n.ASKED_OF_ALL)
SHOWN = 80
BEHIND = "cancellations are waiting to be recorded"
LOOK_EVERY_S = 0.05
CATCH_UP_WITHIN_S = 5.0
"""After a worker has connected, its requests wait until it has stored the cancellations that are in the control queue,
but at most for this many seconds."""
QUIET_S = 0.5
"""If the worker's user may not read the length of the control queue, the queue counts as empty when nothing was
delivered for this many seconds."""
ROOM_WITHIN_S = 5.0
"""So long a message `result` waits until this process may hold the result."""
AT_ONCE_S = 5
"""A tenant may send at once as many control messages as its limit allows in this many seconds."""
REFUSED_AT_A_TIME = 32
RESULTS_BYTES = 512 * 1024
"""So much of the results that one message asks for is sent at a time, but at least one: a client that has not read them
yet would lose more."""
Ready = Callable[[list[str]], Awaitable[Mapping[str, int]]]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Command:
    """What a control message asks for."""

    kind: str
    identity: Identity
    """`results`: of none."""
    ids: Sequence[str] = ()
    """`results`: of these requests."""
    after: int = 0
    """`group`: which of its requests are listed."""


def read_command(message: Message, *, speakers: Collection[str], needs_user_id: bool) -> Command | None:
    """Return the command of a control message; None if all workers answer it (`status`, `probe`), from queues of their
    own. Raises RequestProblem if the message is invalid.

    `speakers`: the users that may act for other tenants, and so may name one in the body.
    """
    kind = kind_of(message)
    if kind in n.ASKED_OF_ALL:
        return None
    if needs_user_id and not message.user_id:
        raise user_id_missing()
    if kind == n.CHANGE_KEY:
        raise invalid_request(f"type {kind}: changing a request is not available in this version")
    body = object_in(message)
    id = body.get(kind)
    if kind == n.RESULTS_KEY:
        if not isinstance(id, list) or not id or not all(isinstance(each, str) and is_request_id(each) for each in id):
            raise invalid_request(
                f'body: allowed is {{"{kind}": ["<message_id>", …]}}, with "tenant" where they have one'
            )
        return Command(kind, Identity(_tenant(message, body.get("tenant"), speakers), ""), ids=id)
    if not isinstance(id, str):
        raise invalid_request(f'body: allowed is {{"{kind}": "<message_id>"}}, with "tenant" where it has one')
    if not is_request_id(id):
        raise invalid_request(f"{kind}: {id[:SHOWN]!r} can be no request's id: {REQUEST_ID}")
    after = body.get("after", 0)
    if type(after) is not int or not 0 <= after < 2**53:
        raise invalid_request("after: allowed is the `next` of the answer before")
    return Command(kind, Identity(_tenant(message, body.get("tenant"), speakers), id), after=after)


def _id_of(message: Message) -> str | None:
    body = _json_object(message) or {}
    ids = [id for kind in n.CONTROL_KEYS if isinstance(id := body.get(kind), str) and is_request_id(id)]
    return ids[0] if len(ids) == 1 else None


def object_in(message: Message) -> dict[str, object]:
    """The JSON object in the body. Raises RequestProblem."""
    if len(message.body) > MESSAGE_BYTES:
        raise invalid_request(f"body: {len(message.body)} bytes, allowed are {MESSAGE_BYTES}")
    body = _json_object(message)
    if body is None:
        raise invalid_request("body: not a JSON object")
    return body


def kind_of(message: Message) -> str:
    """What the message's type and its routing key both name. Raises RequestProblem."""
    found, key = message.type, message.routing_key
    if not found:
        raise invalid_request(f"type: it is missing; known are {', '.join(KNOWN)}, and the routing key says the same")
    if found not in KNOWN:
        raise invalid_request(f"type {found[:SHOWN]!r}: known are {', '.join(KNOWN)}")
    if found != key:
        raise invalid_request(f"routing key {key[:SHOWN]!r} and type {found!r} differ: they say the same")
    return found


def _json_object(message: Message) -> dict[str, object] | None:
    if len(message.body) > MESSAGE_BYTES:
        return None
    try:
        body = json.loads(message.body.decode())
        json.dumps(body, ensure_ascii=False).encode()  # raises for "\ud800", which is no character: no store takes it
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _tenant(message: Message, stated: object, speakers: Collection[str]) -> str:
    if stated is not None and not isinstance(stated, str):
        raise invalid_request("tenant: allowed is a string")
    tenant = tenant_of(message.user_id, stated, speakers)
    if stated is not None and tenant != stated:
        who = f"user {message.user_id!r}" if message.user_id else "a message without user_id"
        raise invalid_request(
            f"{who} may not speak for tenant {stated[:SHOWN]!r}: publish with user_id, "
            "as that tenant or as one of the setting `speakers`"
        )
    if tenant and not is_tenant(tenant):
        raise invalid_request(f"{'user_id' if stated is None else 'tenant'}: {TENANT}")
    return tenant


@dataclass(slots=True, eq=False)
class ControlAnswers:
    """Publishes the answers to control messages: to `result`, if the request has ended, the request's final reply; any
    other has the header `x-lane-control`. They are sent only to direct reply-to, to queues that the broker named, and
    to `lane.reply.<user_id>` of the message's user (threat T1 in docs/security.md). `notices`: sends the answers that
    are not results, many in one write and without confirms, because a client that gets no answer asks again."""

    sender: ReplySender
    _: KW_ONLY
    rule: ReplyRule
    notices: Notices
    refused: int = field(default=0, init=False)
    unanswered: int = field(default=0, init=False)
    _log_throttle: LogThrottle = field(default_factory=LogThrottle, init=False)

    async def send(self, message: Message, body: Mapping[str, Any], *, control: Literal["accepted", "pending"]) -> None:
        headers = {n.CONTROL: control}
        if "id" in body:
            headers[n.REQUEST_ID] = body["id"]
        await self._send(message, _answer(message, json.dumps(body).encode(), JSON, headers))

    async def refuse(self, message: Message, problem: RequestProblem) -> None:
        self._log_refusal(message, problem)
        id = _id_of(message)
        headers = {n.CONTROL: "error", **({} if id is None else {n.REQUEST_ID: id})}
        document = problem.document(request=id or "", attempts=0)
        await self._send(message, _answer(message, document, PROBLEM, headers), must_answer=True)

    def refuse_silently(self, message: Message, problem: RequestProblem) -> None:
        self._log_refusal(message, problem)
        self.unanswered += 1

    def _log_refusal(self, message: Message, problem: RequestProblem) -> None:
        self.refused += 1
        who = message.user_id or ""
        if count := self._log_throttle.count(f"{problem.code} {who}"):
            log.warning(
                signals.CONTROL_REFUSED,
                type=(message.type or "")[:40],
                key=message.routing_key[:40],
                user=who,
                reason=problem.brief,
                count=count,
                refused=self.refused,
            )

    async def replay(
        self, message: Message, completion: Completion, *, id: str, webhook: Mapping[str, Any] | None = None
    ) -> None:
        headers = {n.STATUS: completion.status, **completion.headers, n.REPLAYED: True, n.REQUEST_ID: id}
        if webhook is not None:
            headers[n.WEBHOOK_LOG] = json.dumps(webhook)
        content_type = PROBLEM if completion.status == "error" else JSON
        if not self._may_answer(message):
            return
        try:
            await self._publish(message, _answer(message, completion.body, content_type, headers))
        except MessageTooLarge as error:
            await self.refuse(message, answer_too_large(error.size, error.limit))

    async def _send(self, message: Message, answer: Message, *, must_answer: bool = False) -> None:
        if not self._may_answer(message, must_answer=must_answer):
            return
        address = message.reply_to or ""
        if self.sender.needs_own_connection(address) or not self.notices.send(answer, routing_key=address):
            await self._publish(message, answer)

    def _may_answer(self, message: Message, *, must_answer: bool = False) -> bool:
        address = message.reply_to or ""
        may = self.rule.allows_control(address, user=message.user_id)
        if not may and (address or must_answer):
            self.unanswered += 1
            if count := self._log_throttle.count(f"unanswered {message.user_id or ''}"):
                log.warning(signals.CONTROL_UNANSWERED, reply_to=address[:100], count=count, unanswered=self.unanswered)
        return may

    async def _publish(self, message: Message, answer: Message) -> None:
        address = message.reply_to or ""
        try:
            await self.sender.send(answer, address, traced=False)
        except MessageTooLarge:
            raise
        except (BrokerError, RequestProblem) as error:  # the client can ask again
            log.debug(signals.CONTROL_UNANSWERED, reply_to=address[:100], reason=str(error))


def _answer(message: Message, body: bytes, content_type: str, headers: Mapping[str, Any]) -> Message:
    return Message(
        body=body,
        headers=headers,
        content_type=content_type,
        message_id=uuid.uuid4().hex,
        correlation_id=message.correlation_id,
        persistent=False,
    )


@dataclass(slots=True, eq=False)
class BrakeCommands:
    """`operators`: the broker's users that may pause."""

    brake: Brake
    store: StoredPauses
    _: KW_ONLY
    operators: Collection[str]
    known: Mapping[PauseKind, Collection[str]]
    now_ms: NowMs = now_ms
    _in_order: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def require_operator(self, message: Message) -> str:
        kind = kind_of(message)
        if message.user_id not in self.operators:
            raise RequestProblem(
                "forbidden_control",
                f"user {message.user_id or '(none)'!r} may not {kind}: publish with user_id, as one of the workers' "
                "setting control.operators (LANEKEEPER_CONTROL__OPERATORS)",
            )
        return kind

    async def carry_out(self, message: Message) -> dict[str, Any]:
        kind, body = self.require_operator(message), object_in(message)
        async with self._in_order:  # two messages about one lane must not overtake each other
            match kind:
                case n.PAUSE_KEY:
                    found = [await self._pause(body.get(kind))]
                case n.RESUME_KEY:
                    removed = await self.store.resume(str(body.get(kind)))
                    found = [] if removed is None else [removed]
                case _:
                    return {"pauses": [pause.as_json() for pause in await self.store.pauses()]}
            await self.brake.read()
        told = [pause.as_json() for pause in found]
        log.info(signals.BRAKE_ASKED, command=kind, user=message.user_id, pauses=told)
        return {"pauses": told}

    async def _pause(self, fields: object) -> Pause:
        if not isinstance(fields, dict):
            raise invalid_request('body: allowed is {"pause": {"kind": "…", "name": "…"}}')
        pause = read_pause(fields, now_ms=self.now_ms(), known=self.known)
        if not await self.store.pause(pause):
            raise too_many()
        return pause


@dataclass(eq=False)
class Control:
    """Consumes the control queue, which all workers share, and carries out its messages (cancel, result)."""

    deliveries: Deliveries
    _: KW_ONLY
    claiming: Claiming
    settler: Settler
    answers: ControlAnswers
    ready: Ready
    kept_s: float
    per_tenant_s: float
    """How many messages of a tenant this process carries out in a second, and how many more it refuses with an answer.
    Still more are only counted and logged, which takes a tenth of a millisecond: all tenants' messages are in one
    queue, behind those of a tenant that sends too many."""
    brake: BrakeCommands
    store: Store
    cancelling: GroupCancelling
    speakers: Collection[str] = ()
    needs_user_id: bool = False
    now_ms: NowMs = now_ms

    def __post_init__(self) -> None:
        self._carried_out, self._refused = (
            RateLimit(per_s=self.per_tenant_s, at_once=AT_ONCE_S * self.per_tenant_s) for _ in range(2)
        )
        self._too_many = RequestProblem(
            "too_many_control_messages",
            f"a tenant may send {self.per_tenant_s:g} control messages a second, and {AT_ONCE_S} times as many at "
            "once; this one was not carried out: send it again later",
        )
        self._displaced_throttle = LogThrottle()
        self.displaced = 0
        self.behind: str | None = BEHIND
        """Not None while the control queue may have old cancellations, which were sent when no worker was connected or
        when the store was unavailable, so that no request should be worked on yet."""
        self._in_hand: set[int] = set()

    @property
    def trouble(self) -> str | None:
        return self.deliveries.trouble

    async def run(self) -> None:
        async with aclosing(self.deliveries.sessions()) as sessions:
            async for session in sessions:
                self.behind = BEHIND
                self._busy_at_s = asyncio.get_running_loop().time()
                async with background_task(self._catch_up(session), name="control backlog"):
                    try:
                        async with asyncio.TaskGroup() as reading:  # as many as the prefetch
                            await self._read_all(session, reading)
                    except* ChannelLost as lost:
                        log.warning(signals.DELIVERY_LOST, queue=self.deliveries.queue, error=str(lost.exceptions[0]))

    async def _read_all(self, session: Session, reading: asyncio.TaskGroup) -> None:
        self._in_hand, counted = set(), 0
        async for delivery in session:
            self._was_empty = False
            tenant = self._tenant(delivery.message)
            if (is_allowed := self._carried_out.take(tenant)) or self._refused.take(tenant):
                self._in_hand.add(delivery.tag)
                taking = supervised(
                    partial(self._take, is_allowed=is_allowed), delivery, on_fault=self.settler.reject_later
                )
                reading.create_task(taking, name=f"control {delivery.tag}")
                continue
            self.answers.refuse_silently(delivery.message, self._too_many)
            await self.settler.ack(delivery)
            counted += 1
            if counted % REFUSED_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _tenant(self, message: Message) -> str:
        user = message.user_id or ""
        if user in self.speakers:
            with suppress(RequestProblem):
                command = self._read_command(message)
                return command.identity.tenant if command is not None else user
        return user

    def _read_command(self, message: Message) -> Command | None:
        return read_command(message, speakers=self.speakers, needs_user_id=self.needs_user_id)

    async def _catch_up(self, session: Session) -> None:
        """Find out when the cancellations that waited in the control queue are recorded: the queue was found empty, or
        `CATCH_UP_WITHIN_S` is over. If the store becomes unavailable, begin again. Runs until it is cancelled.

        The broker is polled, because it does not announce that a queue is empty. The queue must be found empty twice,
        and no message may arrive in between, because a message on its way to this worker is counted neither by the
        broker nor by the worker."""
        loop = asyncio.get_running_loop()
        end_s, self._was_empty = loop.time() + CATCH_UP_WITHIN_S, False
        while True:
            if self.claiming.is_away:
                self.behind, end_s, self._was_empty = BEHIND, loop.time() + CATCH_UP_WITHIN_S, False
            elif self.behind is not None:
                waiting = await self._waiting(session)
                if waiting and loop.time() >= end_s:
                    log.warning(signals.CONTROL_BEHIND, waiting=waiting, waited_s=CATCH_UP_WITHIN_S)
                    self.behind = None
                elif not waiting and self._was_empty:
                    self.behind = None
                else:
                    self._was_empty = not waiting
            await asyncio.sleep(LOOK_EVERY_S)

    async def _waiting(self, session: Session) -> int:
        try:
            ready = sum((await self.ready([self.deliveries.queue])).values())
        except AccessRefused:  # this user may only consume: the queue counts as empty if no message arrives
            is_quiet = asyncio.get_running_loop().time() - self._busy_at_s > QUIET_S
            ready = 0 if is_quiet else 1
        except BrokerError:
            ready = 1
        return ready + session.waiting + len(self._in_hand)

    async def stop(self) -> None:
        await self.deliveries.stop()

    async def _take(self, delivery: Delivery, *, is_allowed: bool) -> None:
        try:
            if not is_allowed:
                await self.answers.refuse(delivery.message, self._too_many)
            elif not await self._handle(delivery):
                return
            await self.settler.ack(delivery)
        finally:
            self._in_hand.discard(delivery.tag)
            self._busy_at_s = asyncio.get_running_loop().time()

    async def _handle(self, delivery: Delivery) -> bool:
        message = delivery.message
        try:
            if delivery.cut_bytes:
                raise invalid_request(f"body: {delivery.cut_bytes} bytes, allowed are {MESSAGE_BYTES}")
            if message.type in n.BRAKE_KEYS:
                await self.answers.send(message, await self.brake.carry_out(message), control="accepted")
            elif message.type in n.WEBHOOK_COMMANDS:
                kind, body = self.brake.require_operator(message), object_in(message)
                answer = await self.settler.webhooks.carry_out(kind, body)
                await self.answers.send(message, answer, control="accepted")
            elif (command := self._read_command(message)) is not None:
                if command.kind == n.RESULTS_KEY:
                    await self._send_results(delivery, command)
                elif command.kind in (n.GROUP_KEY, n.CANCEL_GROUP_KEY):
                    await self.answers.send(message, await self._about_group(command), control="accepted")
                else:
                    await self._carry_out(delivery, command)
        except RequestProblem as problem:
            await self.answers.refuse(message, problem)
        except StoreUnavailable as away:
            log.warning(signals.CONTROL_POSTPONED, type=message.type, reason=str(away))
            await self.settler.nack_later(delivery)
            return False
        except Exception:  # an internal error must not end this worker and, after redelivery, every other one
            log.exception(signals.HANDLER_FAILED, where="control", type=str(message.type)[:40])
            if (delivery.times_delivered or FAULTS_AT_MOST) < FAULTS_AT_MOST:
                await self.settler.reject_later(delivery)
                return False
            # not delivered again: a worker that has connected takes no requests until this queue is empty
            fault = RequestProblem("internal", "a fault of ours; the worker's log has it")
            await self.answers.refuse(message, fault)
        return True

    async def _carry_out(self, delivery: Delivery, command: Command) -> None:
        message, identity = delivery.message, command.identity
        (ending,) = await self.claiming.endings([identity])
        size = 0 if ending is None else ending.size
        if command.kind == n.CANCEL_KEY:
            # the bytes of an outcome are not needed
            known = None if size else await self.claiming.find(identity)
            answer = await self._cancel(identity, attempts=0 if known is None else known.attempts)
            await self.answers.send(message, answer, control="accepted")
            return
        await _room(delivery, size)
        if (state := await self._replay(message, identity)) is not None:
            await self.answers.send(message, state, control="pending")

    async def _send_results(self, delivery: Delivery, command: Command) -> None:
        """Send the results that there are, up to a size, and at last how the other requests stand."""
        identities = [Identity(command.identity.tenant, id) for id in dict.fromkeys(command.ids)]
        sizes: dict[Identity, int] = {}
        states: list[Mapping[str, Any]] = []
        for identity, ending in zip(identities, await self.claiming.endings(identities), strict=True):
            if ending is None or ending.status is None:
                states.append(_state(identity.id, await self.claiming.find(identity)))
            elif sizes and sum(sizes.values()) + ending.size > RESULTS_BYTES:
                states.append({"id": identity.id, "status": "ended"})
            else:
                sizes[identity] = ending.size
        await _room(delivery, sum(sizes.values()))
        for identity in sizes:
            if (state := await self._replay(delivery.message, identity)) is not None:  # a dead letter, replayed
                states.append(state)
        await self.answers.send(delivery.message, {"results": states}, control="pending")

    async def _replay(self, message: Message, identity: Identity) -> Mapping[str, Any] | None:
        """Send a request's result; how it stands, if it has none."""
        found = await self.claiming.find(identity)
        if found is None or found.completion is None:
            return _state(identity.id, found)
        webhook = await self.settler.webhooks.describe(identity)
        await self.answers.replay(message, found.completion, id=identity.id, webhook=webhook)
        return None

    async def _about_group(self, command: Command) -> Mapping[str, Any]:
        group = await self.store.group(command.identity)
        if group is None or group.head.state is State.VOID or group.head.owner is not None:
            # a Message Batch is its API key's alone
            return {**unknown(command.identity.id), "requests": [], "next": command.after}
        if command.kind == n.CANCEL_GROUP_KEY:
            await self.cancelling.cancel(command.identity)
            group = await self.store.group(command.identity) or group
            return progress(group, now_ms=self.now_ms())
        members = await self.store.members(command.identity, after=command.after, bodies=False)
        listed = [{"id": each.id, "has_ended": each.completion is not None} for each in members]
        following = members[-1].position if members else command.after
        return {**progress(group, now_ms=self.now_ms()), "requests": listed, "next": following}

    async def _cancel(self, identity: Identity, *, attempts: int) -> dict[str, Any]:
        problem = RequestProblem("cancelled", "cancelled by its owner")
        ending = Completion(
            status="error",
            code=problem.code,
            body=problem.document(request=identity.id, attempts=attempts),
            headers={n.ATTEMPT: attempts},
            ended_ms=self.now_ms(),
        )
        result = await self.claiming.cancel(identity, ending)
        if result is Cancelling.DISPLACED:
            self.displaced += 1
            if count := self._displaced_throttle.count(identity.tenant):
                log.warning(
                    signals.CANCELLATION_DISPLACED, tenant=identity.tenant, count=count, displaced=self.displaced
                )
            result = Cancelling.UNSEEN
        answer = {"id": identity.id, "outcome": result.value}
        if result is Cancelling.UNSEEN:
            return {**answer, "kept_until": moment_text(self.now_ms() + round(self.kept_s * 1000))}
        return answer


async def _room(delivery: Delivery, size: int) -> None:
    try:
        async with asyncio.timeout(ROOM_WITHIN_S):  # longer it would hold up others' messages
            await delivery.room(size)
    except TimeoutError:
        raise RequestProblem(
            "too_many_control_messages", "this process sends as many large results as it can; send it again later"
        ) from None


def _state(id: str, found: Found | None) -> dict[str, Any]:
    if found is None:
        return {"id": id, "status": "unknown", "attempts": 0}
    state = {"id": id, "status": "running" if found.running else "waiting", "attempts": found.attempts}
    if found.stands:
        state["step"] = found.stands
    return state if found.due_ms is None else {**state, "due_at": moment_text(found.due_ms)}
