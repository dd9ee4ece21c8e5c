"""What is said on the control exchange: cancellations, which are recorded, and questions for results.

One queue for all workers, so that one of them does it. A cancellation stays there until the store has it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any

import structlog

from consumers.claiming import Claiming
from consumers.control_answer import Answers
from consumers.control_question import Question, id_of, read
from consumers.job import NowMs, moment_text
from consumers.settle import Settler
from consumers.state.base import Cancelling, Completion, Found, Identity, StoreUnavailable
from consumers.state.spec import LONGEST_WAIT_S
from topology import names as n
from topology import signals
from topology.broker.deliveries import Deliveries
from topology.broker.session import ChannelLost, Delivery, Session
from topology.contract.messages import Message
from topology.contract.problems import AccessRefused, BrokerError, RequestProblem

FAULTS_AT_MOST = 5
"""The delivery at which a message that we fail at is given up: all requests wait for those that are not recorded."""
LOOK_EVERY_S = 0.05
Ready = Callable[[], Awaitable[int]]
"""How many messages wait in the control queue. Raises BrokerError."""
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Control:
    """Reads the control queue, one message after the other."""

    def __init__(
        self,
        deliveries: Deliveries,
        *,
        claiming: Claiming,
        settler: Settler,
        answers: Answers,
        now_ms: NowMs,
        ready: Ready,
        speakers: Collection[str] = (),
    ) -> None:
        self._deliveries = deliveries
        self._claiming = claiming
        self._settler = settler
        self._answers = answers
        self._now_ms = now_ms
        self._speakers = speakers
        self._ready = ready
        self._is_behind = True
        self._is_reading = False
        self._session: Session | None = None

    @property
    def trouble(self) -> str | None:
        return self._deliveries.trouble

    @property
    def behind(self) -> str | None:
        """Why no request should be worked on yet: it may have been cancelled, while no worker or no store was there."""
        return "cancellations are waiting to be recorded" if self._is_behind else None

    async def run(self) -> None:
        """Read until stopped."""
        async with aclosing(self._deliveries.sessions()) as sessions:
            async for session in sessions:
                self._is_behind, self._session = True, session
                catching_up = asyncio.create_task(self._catch_up(session), name="control backlog")
                try:
                    async for delivery in session:
                        self._is_reading = True
                        await self._read(delivery)
                        self._is_reading = False
                except ChannelLost as lost:
                    log.warning(signals.DELIVERY_LOST, queue=self._deliveries.queue, error=str(lost))
                finally:
                    self._is_reading, self._session = False, None
                    catching_up.cancel()

    async def _catch_up(self, session: Session) -> None:
        """See when all that waited has been read: at first, and again after the store was away. Looked at, because a
        queue does not tell when it is empty."""
        while self._session is session:
            if not self._is_behind:
                await asyncio.sleep(LOOK_EVERY_S)
                self._is_behind = self._claiming.is_away
                continue
            try:
                waiting = await self._ready()
            except AccessRefused:
                waiting = 0  # a user that may not look at it
            except BrokerError:
                waiting = 1
            is_done = not (waiting or session.waiting or self._is_reading or self._claiming.is_away)
            self._is_behind = not is_done
            if not is_done:
                await asyncio.sleep(LOOK_EVERY_S)

    async def stop(self) -> None:
        """Read no more; `run` returns when what was taken has been recorded."""
        await self._deliveries.stop()

    async def _read(self, delivery: Delivery) -> None:
        """What cannot be carried out is refused, and what cannot be recorded goes back: never lost, never a loop."""
        message = delivery.message
        try:
            question = read(message, speakers=self._speakers)
            if question is not None:
                await self._carry_out(message, question)
        except RequestProblem as problem:
            await self._answers.refuse(message, problem, id=id_of(message))
        except StoreUnavailable as away:
            log.warning(signals.CONTROL_POSTPONED, type=message.type, reason=str(away))
            await self._settler.postpone(delivery)
            return
        except Exception:  # a fault of ours must not end the worker, and with the next one all the others
            log.exception(signals.HANDLER_FAILED, where="control", type=str(message.type)[:40])
            if (delivery.times_delivered or 1) < FAULTS_AT_MOST:
                await self._settler.put_back(delivery)
                return
            fault = RequestProblem("internal", "a fault of ours; the worker's log has it")
            await self._answers.refuse(message, fault, id=id_of(message))
        await self._settler.dismiss(delivery)

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
        told = {"id": identity.id, "outcome": came_to.value}
        if came_to is Cancelling.UNSEEN:
            return {**told, "kept_until": moment_text(self._now_ms() + LONGEST_WAIT_S * 1000)}
        return told


def _state(id: str, found: Found | None) -> dict[str, Any]:
    """What is known of a request that has not ended."""
    if found is None:
        return {"id": id, "status": "unknown", "attempts": 0}
    told = {"id": id, "status": "running" if found.running else "waiting", "attempts": found.attempts}
    return told if found.due_ms is None else {**told, "due_at": moment_text(found.due_ms)}
