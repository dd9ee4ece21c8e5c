"""Works on control messages: records cancellations, and answers questions for results.

All workers share one queue, so that one of them takes each message. A cancellation stays there until the store has it.
Many are worked on at once, so that the store writes them together. The queue is read in order, so a cancellation waits
for everything before it; therefore messages beyond a tenant's share must cost next to nothing (`allowance.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from consumers.claiming import Claiming
from consumers.control.allowance import Allowance, Due
from consumers.control.answer import Answers
from consumers.control.question import Question, id_of, read
from consumers.job import NowMs, moment_text
from consumers.settle import Settler
from consumers.share import Seldom
from consumers.state.base import Cancelling, Completion, Found, Identity, StoreUnavailable
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import AccessRefused, BrokerError, RequestProblem
from lanekeeper.telemetry import logs, signals
from topology.broker.deliveries import Deliveries
from topology.broker.session import ChannelLost, Delivery, Session

FAULTS_AT_MOST = 5
"""A message that causes an internal error is given up at this delivery, because requests wait until all cancellations
are stored."""
LOOK_EVERY_S = 0.05
CATCH_UP_WITHIN_S = 5.0
"""How long requests wait for the cancellations that came before the worker. Thousands are recorded in that time, and a
flood may never end. The rest is recorded while requests run; a request that is cancelled too late runs."""
QUIET_S = 0.5
"""If the user may not see the queue's length, it counts as empty after this time without a delivery."""
GATHER_S = 0.01
"""How long the first finished message waits for others, to be acknowledged with them: each write is a system call."""
AT_A_TIME = 32
"""After this many refused messages, other tasks get the event loop."""
Ready = Callable[[], Awaitable[Mapping[str, int]]]
"""How many messages wait in the control queue, under its name. Raises BrokerError."""
log = logs.logger()


class Control:
    """Reads the control queue."""

    def __init__(
        self,
        deliveries: Deliveries,
        *,
        claiming: Claiming,
        settler: Settler,
        answers: Answers,
        now_ms: NowMs,
        ready: Ready,
        kept_s: float,
        per_tenant_s: float,
        speakers: Collection[str] = (),
        needs_user_id: bool = False,
    ) -> None:
        self._deliveries = deliveries
        self._claiming = claiming
        self._settler = settler
        self._answers = answers
        self._now_ms = now_ms
        self._question = partial(read, speakers=speakers, needs_user_id=needs_user_id)
        self._ready = ready
        self._kept_s = kept_s
        self._allowance = Allowance(per_tenant_s=per_tenant_s, speakers=speakers, question=self._question)
        self._displaced = Seldom()
        self.displaced = 0
        """Cancellations of unseen requests that were forgotten because their tenant sent newer ones."""
        self._is_behind = True
        self._received = 0
        self._in_hand: set[int] = set()
        self._done: list[Delivery] = []
        self._busy_at_s = 0.0
        self._session: Session | None = None

    @property
    def trouble(self) -> str | None:
        return self._deliveries.trouble

    @property
    def behind(self) -> str | None:
        """Why no request should be worked on yet: cancellations may be unread that came while there was no worker or no
        store."""
        return "cancellations are waiting to be recorded" if self._is_behind else None

    async def run(self) -> None:
        async with aclosing(self._deliveries.sessions()) as sessions:
            async for session in sessions:
                self._is_behind, self._session = True, session
                self._busy_at_s = asyncio.get_running_loop().time()
                catching_up = asyncio.create_task(self._catch_up(session), name="control backlog")
                try:
                    async with asyncio.TaskGroup() as reading:  # as many as the prefetch
                        await self._read_all(session, reading)
                except* ChannelLost as lost:
                    log.warning(signals.DELIVERY_LOST, queue=self._deliveries.queue, error=str(lost.exceptions[0]))
                finally:
                    self._session = None
                    catching_up.cancel()

    async def _read_all(self, session: Session, reading: asyncio.TaskGroup) -> None:
        """Read messages, and start a task for each one that is not merely counted. Raises ChannelLost."""
        self._in_hand, self._done, counted = set(), [], 0
        async for delivery in session:
            self._received += 1
            due = self._allowance.due(delivery.message)
            if due is not Due.COUNTED:
                self._in_hand.add(delivery.tag)
                reading.create_task(self._take(delivery, due, session, reading), name=f"control {delivery.tag}")
                continue
            self._answers.refuse_silently(delivery.message, self._allowance.problem)
            self._acknowledge(delivery, session, reading)
            counted += 1
            if counted % AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _acknowledge(self, delivery: Delivery, session: Session, reading: asyncio.TaskGroup) -> None:
        """Acknowledge it soon, together with others."""
        if not self._done:
            reading.create_task(self._acknowledge_all(session), name="control acknowledging")
        self._done.append(delivery)

    async def _acknowledge_all(self, session: Session) -> None:
        await asyncio.sleep(GATHER_S)
        done, self._done = self._done, []
        await self._settler.ack_together(session, done, in_hand=self._in_hand)

    async def _catch_up(self, session: Session) -> None:
        """Find out when the backlog has been read, or takes too long: at first, and again after the store was away.

        This polls, because the broker does not announce that a queue is empty. The queue must be found empty twice in a
        row: a message that the broker has sent and that has not arrived yet is counted by neither side."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + CATCH_UP_WITHIN_S
        empty_after: int | None = None
        """The number of messages that had arrived when the queue was last found empty."""
        while self._session is session:
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
        """How many control messages are not finished; at least 1 if that is unknown."""
        try:
            ready = sum((await self._ready()).values())
            return ready + session.waiting + len(self._in_hand)
        except AccessRefused:  # this user may only consume: the queue is empty if nothing comes
            is_quiet = asyncio.get_running_loop().time() - self._busy_at_s > QUIET_S
            return session.waiting + len(self._in_hand) or (0 if is_quiet else 1)
        except BrokerError:
            return session.waiting + len(self._in_hand) or 1

    async def stop(self) -> None:
        """Read no more; `run` returns when the messages that were taken are finished."""
        await self._deliveries.stop()

    async def _take(self, delivery: Delivery, due: Due, session: Session, reading: asyncio.TaskGroup) -> None:
        try:
            if due is Due.REFUSED:
                message = delivery.message
                await self._answers.refuse(message, self._allowance.problem, id=id_of(message))
            elif not await self._is_done_with(delivery):
                return
            self._acknowledge(delivery, session, reading)
        finally:
            self._in_hand.discard(delivery.tag)
            self._busy_at_s = asyncio.get_running_loop().time()

    async def _is_done_with(self, delivery: Delivery) -> bool:
        """Carry out a message; True if it may be acknowledged. An invalid message is refused. A cancellation that
        cannot be recorded is returned to the queue; after `FAULTS_AT_MOST` internal errors it is refused, so that it is
        not redelivered for ever."""
        message = delivery.message
        try:
            question = self._question(message)
            if question is not None:
                await self._carry_out(message, question)
        except RequestProblem as problem:
            await self._answers.refuse(message, problem, id=id_of(message))
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
            await self._answers.refuse(message, fault, id=id_of(message))
        return True

    async def _carry_out(self, message: Message, question: Question) -> None:
        """Raises StoreUnavailable."""
        identity = question.identity
        if question.kind == n.CANCEL_KEY:
            outcome = await self._cancel(identity)
            await self._answers.tell(message, outcome, id=identity.id, as_="accepted")
            return
        found = await self._claiming.find(identity)
        if found is not None and found.completion is not None:
            await self._answers.replay(message, found.completion, id=identity.id)
        else:
            await self._answers.tell(message, _state(identity.id, found), id=identity.id, as_="pending")

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
        came_to = await self._claiming.cancel(identity, ending)
        if came_to is Cancelling.DISPLACED:
            self.displaced += 1
            if count := self._displaced.count(identity.tenant):
                log.warning(
                    signals.CANCELLATION_DISPLACED, tenant=identity.tenant, count=count, displaced=self.displaced
                )
            came_to = Cancelling.UNSEEN
        told = {"id": identity.id, "outcome": came_to.value}
        if came_to is Cancelling.UNSEEN:
            return {**told, "kept_until": moment_text(self._now_ms() + round(self._kept_s * 1000))}
        return told


def _state(id: str, found: Found | None) -> dict[str, Any]:
    """The answer about a request that has not ended."""
    if found is None:
        return {"id": id, "status": "unknown", "attempts": 0}
    told = {"id": id, "status": "running" if found.running else "waiting", "attempts": found.attempts}
    return told if found.due_ms is None else {**told, "due_at": moment_text(found.due_ms)}
