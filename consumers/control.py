"""What is said on the control exchange: cancellations, which are recorded, and questions for results.

One queue for all workers, so that one of them does it. A cancellation stays there until the store has it.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from typing import Any

import structlog

from consumers.claiming import Claiming
from consumers.job import NowMs, tenant_of
from consumers.settle import Settler
from consumers.state.base import Completion, Identity, StoreUnavailable
from topology import names as n
from topology import signals
from topology.broker.deliveries import Deliveries
from topology.broker.publisher import Publisher
from topology.broker.session import ChannelLost, Delivery, Session
from topology.contract.messages import Message
from topology.contract.problems import AccessRefused, BrokerError, LanekeeperError, RequestProblem

MESSAGE_BYTES = 4096
ID_CHARACTERS = 255
BROKER_NAMED = "amq.gen-"
FAULTS_AT_MOST = 5
"""The delivery at which a message that we fail at is given up: all requests wait for those that are not recorded."""
LOOK_EVERY_S = 0.05
Ready = Callable[[], Awaitable[int]]
"""How many messages wait in the control queue. Raises BrokerError."""
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ControlRefused(LanekeeperError):
    """A control message that says nothing we know, or asks for another tenant's request."""


class Control:
    """Reads the control queue, one message after the other."""

    def __init__(
        self,
        deliveries: Deliveries,
        *,
        claiming: Claiming,
        settler: Settler,
        publisher: Publisher,
        now_ms: NowMs,
        ready: Ready,
        speakers: Collection[str] = (),
    ) -> None:
        self._deliveries = deliveries
        self._claiming = claiming
        self._settler = settler
        self._publisher = publisher
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
            await self._answer(message, *await self._carry_out(message))
        except ControlRefused as refused:
            log.warning(signals.CONTROL_REFUSED, type=str(message.type)[:40], reason=str(refused))
            await self._answer(message, {"error": str(refused)}, status="error")
        except StoreUnavailable as away:
            log.warning(signals.CONTROL_REFUSED, type=str(message.type)[:40], reason=str(away))
            await self._settler.postpone(delivery)
            return
        except Exception:  # a fault of ours must not end the worker, and with the next one all the others
            log.exception(signals.HANDLER_FAILED, where="control", type=str(message.type)[:40])
            if (delivery.times_delivered or 1) < FAULTS_AT_MOST:
                await self._settler.put_back(delivery)
                return
        await self._settler.dismiss(delivery)

    async def _carry_out(self, message: Message) -> tuple[Mapping[str, Any] | Completion, str]:
        """What to answer, and under which status. Raises ControlRefused, StoreUnavailable."""
        match message.type:
            case n.CANCEL_KEY:
                identity = self._identity(message)
                known = await self._claiming.find(identity)
                ending = self._cancelled(identity.id, attempts=known.attempts if known else 0)
                came_to = await self._claiming.cancel(identity, ending)
                return {"id": identity.id, "outcome": came_to.value}, "ok"
            case n.RESULT_KEY:
                identity = self._identity(message)
                found = await self._claiming.find(identity)
                if found is not None and found.completion is not None:
                    return found.completion, found.completion.status
                status = "unknown" if found is None else "running" if found.running else "waiting"
                return {"id": identity.id, "status": status, "attempts": found.attempts if found else 0}, "pending"
        raise ControlRefused(f"type {str(message.type)[:40]!r}: known are {n.CANCEL_KEY} and {n.RESULT_KEY}")

    def _identity(self, message: Message) -> Identity:
        """Of which request it speaks. Another's only for users that may speak for others."""
        if len(message.body) > MESSAGE_BYTES:
            raise ControlRefused(f"body: {len(message.body)} bytes, allowed are {MESSAGE_BYTES}")
        try:
            said = json.loads(message.body.decode())
            json.dumps(said, ensure_ascii=False).encode()  # "\ud800" is no character: no store could keep it
        except (ValueError, RecursionError):
            raise ControlRefused("body: not a JSON object") from None
        id = said.get(message.type) if isinstance(said, dict) else None
        if not isinstance(id, str) or not 0 < len(id) <= ID_CHARACTERS:
            raise ControlRefused(
                f'body: allowed is {{"{message.type}": "<message_id>"}}, with "tenant" where it has one'
            )
        tenant = said.get("tenant")
        if tenant is not None and not isinstance(tenant, str):
            raise ControlRefused("tenant: allowed is a string")
        believed = tenant_of(message.user_id, tenant, self._speakers)
        if tenant is not None and believed != tenant:
            raise ControlRefused(
                f"user {message.user_id!r} may not speak for tenant {tenant[:80]!r}: publish with user_id, "
                "as that tenant or as one of the setting `speakers`"
            )
        return Identity(believed, id)

    def _cancelled(self, id: str, *, attempts: int) -> Completion:
        problem = RequestProblem("cancelled", "cancelled by its owner")
        return Completion(
            status="error",
            code=problem.code,
            body=problem.document(request=id, attempts=attempts),
            headers={n.ATTEMPT: attempts},
            ended_ms=self._now_ms(),
        )

    async def _answer(self, question: Message, found: Mapping[str, Any] | Completion, status: str) -> None:
        """To a queue that the broker named, and to no other (threat T1). Whoever has gone wants no answer."""
        address = question.reply_to or ""
        if not address.startswith(BROKER_NAMED):
            return
        headers: dict[str, Any] = {n.STATUS: status}
        content_type = "application/json"
        if isinstance(found, Completion):
            body = found.body
            if found.status == "error":
                content_type = "application/problem+json"
            headers |= {**found.headers, n.REPLAYED: True, n.REQUEST_ID: self._identity(question).id}
        else:
            body = json.dumps(found).encode()
        message = Message(
            body=body,
            headers=headers,
            content_type=content_type,
            message_id=uuid.uuid4().hex,
            correlation_id=question.correlation_id,
            persistent=False,
        )
        with suppress(BrokerError):
            await self._publisher.publish(message, exchange="", routing_key=address, mandatory=False, traced=False)
