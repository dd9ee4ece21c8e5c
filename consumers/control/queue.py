"""Works on control messages: records cancellations of requests (`cancel`), and answers questions for their results
(`result`), and pauses and resumes what operators name.

All workers share one queue, and each message goes to one of them. A cancellation is acknowledged only after it is
stored. Many messages are worked on at once, so that the store writes several cancellations together. The queue is read
in order, so a cancellation waits for all messages before it. Therefore a message that exceeds its tenant's limit must
take very little time (`Allowance`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from enum import Enum, auto
from functools import partial
from typing import Any

from consumers.claiming import Claiming
from consumers.clock import NowMs, moment_text
from consumers.control.brake import BrakeCommands
from consumers.control.messages import Command, ControlAnswers, read_command
from consumers.rate_limit import LogThrottle, RateLimit
from consumers.settle import Settler
from consumers.state.base import Cancelling, Completion, Found, Identity, StoreUnavailable
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import AccessRefused, BrokerError, RequestProblem
from lanekeeper.telemetry import logs, signals
from topology.broker.consume import ChannelLost, Deliveries, Delivery, Session

FAULTS_AT_MOST = 5
"""A control message that causes an internal error at each of this many deliveries is refused at the last of them. It is
not delivered again, because a worker that has just connected takes no requests until the control queue is empty."""
LOOK_EVERY_S = 0.05
CATCH_UP_WITHIN_S = 5.0
"""After a worker has connected, its requests wait until it has stored the cancellations that are in the control queue,
but at most for this many seconds, in which thousands of cancellations are stored. If there are more, the rest is stored
while requests run, so that a request may run although it was cancelled."""
QUIET_S = 0.5
"""If the worker's user may not read the length of the control queue, the queue counts as empty when nothing was
delivered for this many seconds."""
GATHER_S = 0.01
REFUSED_AT_A_TIME = 32
Ready = Callable[[list[str]], Awaitable[Mapping[str, int]]]
log = logs.logger()


class Control:
    """Consumes the control queue, which all workers share, and carries out its messages (cancel, result)."""

    def __init__(
        self,
        deliveries: Deliveries,
        *,
        claiming: Claiming,
        settler: Settler,
        answers: ControlAnswers,
        now_ms: NowMs,
        ready: Ready,
        kept_s: float,
        per_tenant_s: float,
        brake: BrakeCommands,
        speakers: Collection[str] = (),
        needs_user_id: bool = False,
    ) -> None:
        self._deliveries = deliveries
        self._claiming = claiming
        self._settler = settler
        self.answers = answers
        self._brake = brake
        self._now_ms = now_ms
        self._read_command = partial(read_command, speakers=speakers, needs_user_id=needs_user_id)
        self._ready = ready
        self._kept_s = kept_s
        self._allowance = Allowance(per_tenant_s=per_tenant_s, speakers=speakers, read_command=self._read_command)
        self._displaced_throttle = LogThrottle()
        self.displaced = 0
        self._is_behind = True
        """True while the control queue may have old cancellations, which were sent when no worker was connected or when
        the store was unavailable, so that no request should be worked on yet."""
        self._received = 0
        self._in_hand: set[int] = set()
        self._done: list[Delivery] = []
        self._busy_at_s = 0.0

    @property
    def trouble(self) -> str | None:
        return self._deliveries.trouble

    @property
    def behind(self) -> str | None:
        return "cancellations are waiting to be recorded" if self._is_behind else None

    async def run(self) -> None:
        async with aclosing(self._deliveries.sessions()) as sessions:
            async for session in sessions:
                self._is_behind = True
                self._busy_at_s = asyncio.get_running_loop().time()
                catching_up = asyncio.create_task(self._catch_up(session), name="control backlog")
                try:
                    async with asyncio.TaskGroup() as reading:  # as many as the prefetch
                        await self._read_all(session, reading)
                except* ChannelLost as lost:
                    log.warning(signals.DELIVERY_LOST, queue=self._deliveries.queue, error=str(lost.exceptions[0]))
                finally:
                    catching_up.cancel()

    async def _read_all(self, session: Session, reading: asyncio.TaskGroup) -> None:
        self._in_hand, self._done, counted = set(), [], 0
        async for delivery in session:
            self._received += 1
            verdict = self._allowance.decide(delivery.message)
            if verdict is not Verdict.COUNTED:
                self._in_hand.add(delivery.tag)
                reading.create_task(self._take(delivery, verdict, session, reading), name=f"control {delivery.tag}")
                continue
            self.answers.refuse_silently(delivery.message, self._allowance.problem)
            self._acknowledge(delivery, session, reading)
            counted += 1
            if counted % REFUSED_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _acknowledge(self, delivery: Delivery, session: Session, reading: asyncio.TaskGroup) -> None:
        if not self._done:
            reading.create_task(self._acknowledge_all(session), name="control acknowledging")
        self._done.append(delivery)

    async def _acknowledge_all(self, session: Session) -> None:
        await asyncio.sleep(GATHER_S)
        done, self._done = self._done, []
        await self._settler.ack_together(session, done, in_hand=self._in_hand)

    async def _catch_up(self, session: Session) -> None:
        """Find out when the cancellations that waited in the control queue are recorded: set `_is_behind` to False when
        the queue was found empty, or `CATCH_UP_WITHIN_S` is over. If the store becomes unavailable, set `_is_behind` to
        True and begin again. This method runs until it is cancelled.

        The broker is polled, because it does not announce that a queue is empty. The queue must be found empty twice,
        and no message may arrive in between, because a message on its way to this worker is counted neither by the
        broker nor by the worker."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + CATCH_UP_WITHIN_S
        empty_after: int | None = None
        while True:
            if self._claiming.is_away:
                self._is_behind, end_s, empty_after = True, loop.time() + CATCH_UP_WITHIN_S, None
            elif self._is_behind:
                waiting = await self._waiting(session)
                if waiting and loop.time() >= end_s:
                    log.warning(signals.CONTROL_BEHIND, waiting=waiting, waited_s=CATCH_UP_WITHIN_S)
                    self._is_behind = False
                elif waiting:
                    empty_after = None
                else:
                    self._is_behind, empty_after = empty_after != self._received, self._received
            await asyncio.sleep(LOOK_EVERY_S)

    async def _waiting(self, session: Session) -> int:
        """How many control messages wait in the queue or are worked on."""
        try:
            ready = sum((await self._ready([self._deliveries.queue])).values())
            return ready + session.waiting + len(self._in_hand)
        except AccessRefused:  # this user may only consume: the queue counts as empty if no message arrives
            is_quiet = asyncio.get_running_loop().time() - self._busy_at_s > QUIET_S
            return session.waiting + len(self._in_hand) or (0 if is_quiet else 1)
        except BrokerError:
            return session.waiting + len(self._in_hand) or 1

    async def stop(self) -> None:
        await self._deliveries.stop()

    async def _take(self, delivery: Delivery, verdict: "Verdict", session: Session, reading: asyncio.TaskGroup) -> None:
        try:
            if verdict is Verdict.REFUSED:
                await self.answers.refuse(delivery.message, self._allowance.problem)
            elif not await self._handle(delivery):
                return
            self._acknowledge(delivery, session, reading)
        finally:
            self._in_hand.discard(delivery.tag)
            self._busy_at_s = asyncio.get_running_loop().time()

    async def _handle(self, delivery: Delivery) -> bool:
        """Carry out a control message. Return True if it may be acknowledged, False if it was returned to the queue.

        An invalid message is refused. A message is returned to the queue if the store is unavailable, or after an
        internal error. But if an internal error occurs when the message is delivered for the `FAULTS_AT_MOST`th time or
        later, the message is refused, so that it is not redelivered without end."""
        message = delivery.message
        try:
            if message.type in n.BRAKE_KEYS:
                await self.answers.tell(message, await self._brake.carry_out(message), control="accepted")
            elif (command := self._read_command(message)) is not None:
                await self._carry_out(message, command)
        except RequestProblem as problem:
            await self.answers.refuse(message, problem)
        except StoreUnavailable as away:
            log.warning(signals.CONTROL_POSTPONED, type=message.type, reason=str(away))
            await self._settler.nack_later(delivery)
            return False
        except Exception:  # an internal error must not end this worker and, after redelivery, every other one
            log.exception(signals.HANDLER_FAILED, where="control", type=str(message.type)[:40])
            if (delivery.times_delivered or 1) < FAULTS_AT_MOST:
                await self._settler.reject_later(delivery)
                return False
            fault = RequestProblem("internal", "a fault of ours; the worker's log has it")
            await self.answers.refuse(message, fault)
        return True

    async def _carry_out(self, message: Message, command: Command) -> None:
        identity = command.identity
        if command.kind == n.CANCEL_KEY:
            answer = await self._cancel(identity)
            await self.answers.tell(message, answer, control="accepted")
            return
        found = await self._claiming.find(identity)
        if found is not None and found.completion is not None:
            await self.answers.replay(message, found.completion, id=identity.id)
        else:
            await self.answers.tell(message, _state(identity.id, found), control="pending")

    async def _cancel(self, identity: Identity) -> dict[str, Any]:
        known = await self._claiming.find(identity)
        attempts = known.attempts if known else 0
        problem = RequestProblem("cancelled", "cancelled by its owner")
        ending = Completion(
            status="error",
            code=problem.code,
            body=problem.document(request=identity.id, attempts=attempts),
            headers={n.ATTEMPT: attempts},
            ended_ms=self._now_ms(),
        )
        result = await self._claiming.cancel(identity, ending)
        if result is Cancelling.DISPLACED:
            self.displaced += 1
            if count := self._displaced_throttle.count(identity.tenant):
                log.warning(
                    signals.CANCELLATION_DISPLACED, tenant=identity.tenant, count=count, displaced=self.displaced
                )
            result = Cancelling.UNSEEN
        answer = {"id": identity.id, "outcome": result.value}
        if result is Cancelling.UNSEEN:
            return {**answer, "kept_until": moment_text(self._now_ms() + round(self._kept_s * 1000))}
        return answer


def _state(id: str, found: Found | None) -> dict[str, Any]:
    if found is None:
        return {"id": id, "status": "unknown", "attempts": 0}
    state = {"id": id, "status": "running" if found.running else "waiting", "attempts": found.attempts}
    return state if found.due_ms is None else {**state, "due_at": moment_text(found.due_ms)}


AT_ONCE_S = 5
"""A tenant may send at once as many control messages as its limit allows in this many seconds, so that it can cancel
many requests at once."""


class Verdict(Enum):
    """Says what happens to a control message: it is carried out, refused with an answer, or refused without one."""

    CARRIED_OUT = auto()
    REFUSED = auto()
    COUNTED = auto()


class Allowance:
    """Limits how many control messages a tenant may send. Each process counts only those that it receives itself.

    All tenants' messages are in one queue, behind those of a tenant that sends too many, so refusing one must be cheap:
    above a second limit of the same size it is only counted and logged, which takes a tenth of a millisecond. The body
    is read only for a user of `speakers`, because these name the tenant there."""

    def __init__(
        self, *, per_tenant_s: float, speakers: Collection[str], read_command: Callable[[Message], Command | None]
    ) -> None:
        self._limit = RateLimit(per_s=per_tenant_s, at_once=AT_ONCE_S * per_tenant_s)
        self._answered = RateLimit(per_s=per_tenant_s, at_once=AT_ONCE_S * per_tenant_s)
        self._speakers = frozenset(speakers)
        self._read_command = read_command
        self.problem = RequestProblem(
            "too_many_control_messages",
            f"a tenant may send {per_tenant_s:g} control messages a second, and {AT_ONCE_S} times as many at "
            "once; this one was not carried out: send it again later",
        )

    def decide(self, message: Message) -> Verdict:
        tenant = self._tenant(message)
        if self._limit.take(tenant):
            return Verdict.CARRIED_OUT
        return Verdict.REFUSED if self._answered.take(tenant) else Verdict.COUNTED

    def _tenant(self, message: Message) -> str:
        user = message.user_id or ""
        if user in self._speakers:
            with suppress(RequestProblem):
                command = self._read_command(message)
                return command.identity.tenant if command is not None else user
        return user
