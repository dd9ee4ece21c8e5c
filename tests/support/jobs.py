"""What a worker works on, without a broker: a fake delivery records how it was settled, a fake publisher records what
was sent; pauses without a database, a pool without deliveries, a control queue with given messages.

They show the order of steps, not how a broker behaves: tests/broker is for that."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from consumers.attempt import Attempts
from consumers.batches.groups import GroupCancelling
from consumers.brake import Brake
from consumers.budget_gate import BudgetGate
from consumers.claiming import Claiming
from consumers.control import BrakeCommands, Control, ControlAnswers
from consumers.decoding import Decoding, Parsing
from consumers.failures import RetryPolicy
from consumers.flows.webhooks import Webhooks, WebhookSpec
from consumers.gates import Gate
from consumers.handler import Handler
from consumers.job import Chain, Decoded, Job, source_of
from consumers.large_bodies import Fetching, LargeAnswers
from consumers.lifecycle import Lifecycle
from consumers.limits.base import BudgetSpec
from consumers.limits.budgets import own_budgets
from consumers.limits.estimates import Estimates
from consumers.progress import Progress
from consumers.providers.breakers import Breakers
from consumers.providers.registry import Registry
from consumers.providers.routes import ProviderModels, Routes, RoutesSpec
from consumers.rate_limit import Parking
from consumers.replies import Replies, ReplyRetries, ReplyRule, ReplySender
from consumers.settle import Failpoints, Settler
from consumers.slots.pausing import Pausing
from consumers.state.base import Pause, StoreUnavailable
from lanekeeper.amqp.publisher import Confirm, Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import MessageTooLarge, PublishRefused
from lanekeeper.telemetry.tracing import Tracing
from tests.support.memory_store import MemoryStore
from topology.broker.consume import ChannelLost, Deliveries, Delivery, Session
from topology.broker.notices import Notices
from topology.codec import decoding
from topology.lanes import CRITICAL, LaneSpec

NAMES = Names()
NOW_MS = 1_790_000_000_000
BODY = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}'
REPLY_TO = "amq.gen-abcdefghijklmnopqrstuv"


@dataclass
class FakeDelivery(Delivery):
    """A delivery; writes into `log` how it was settled."""

    message: Message
    log: list[str]
    queue: str = "lane.critical"
    tag: int = 1
    redelivered: bool = False
    times_delivered: int | None = 1
    is_lost: bool = False
    cut_bytes: int = 0
    _session: Session | None = field(default=None, init=False)

    @override
    async def ack(self) -> None:
        await self._settled("ack")

    @override
    async def reject(self) -> None:
        await self._settled("reject")

    @override
    async def nack(self) -> None:
        await self._settled("nack")

    async def _settled(self, how: str) -> None:
        if self.is_lost:
            raise ChannelLost("channel lost")
        self.log.append(how)


@dataclass(frozen=True)
class Sent:
    message: Message
    exchange: str
    routing_key: str


@dataclass
class FakePublisher(Publisher):
    """Records what is published, or raises `failing[exchange]`."""

    log: list[str]
    sent: list[Sent] = field(default_factory=list)
    failing: dict[str, Exception] = field(default_factory=dict)
    unconfirmed: list[asyncio.Future[Confirm]] | None = None
    """If it is a list: the broker's answers to what is written; they are given by the test."""
    largest: int | None = None
    too_large: set[bytes] = field(default_factory=set)
    """Bodies for which it raises MessageTooLarge."""
    refused_within_s: list[float] = field(default_factory=list)
    """For how many seconds each message would have been repeated that was refused; here none is."""

    @override
    async def publish(self, message: Message, *, exchange: str, routing_key: str, **_: Any) -> None:
        if (error := self.failing.get(exchange)) is not None:
            self.log.append(f"failed: {exchange or 'reply'}")
            raise error
        if message.body in self.too_large:
            raise MessageTooLarge(len(message.body), 1)
        self.sent.append(Sent(message, exchange, routing_key))
        self.log.append(f"confirmed: {exchange or 'reply'}")

    @override
    async def publish_surely(
        self, message: Message, *, exchange: str, routing_key: str, refused_within_s: float = 60, **_: Any
    ) -> None:
        try:
            await self.publish(message, exchange=exchange, routing_key=routing_key)
        except PublishRefused:
            self.refused_within_s.append(refused_within_s)
            raise

    @override
    async def write(
        self, message: Message, *, exchange: str, routing_key: str, timeout_s: float = 10
    ) -> asyncio.Future[Confirm]:
        await self.publish(message, exchange=exchange, routing_key=routing_key)
        answer: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
        if self.unconfirmed is None:
            answer.set_result(None)
        else:
            self.unconfirmed.append(answer)
        return answer

    @override
    async def exceeded_limit(self, size: int) -> int | None:
        return None if self.largest is None or size <= self.largest else self.largest


@dataclass
class FakeNotices(Notices):
    log: list[str]
    bodies: list[bytes] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    @override
    def publish(self, body: bytes, *, exchange: str, routing_key: str) -> None:
        assert exchange == NAMES.events
        self.keys.append(routing_key)
        self.bodies.append(body)
        self.log.append(f"event: {json.loads(body)['event']}")

    @override
    def send(self, message: Message, *, routing_key: str) -> bool:
        """As if too many messages waited: answers to control messages are then published with a confirm."""
        return False


class Bench:
    """A settler with fakes around it. `log` lists the steps in their order."""

    def __init__(self, *, parking: Parking | None = None, spec: WebhookSpec | None = None) -> None:
        self.log: list[str] = []
        self.publisher = FakePublisher(self.log)
        self.notices = FakeNotices(self.log)
        self.lifecycle = Lifecycle(self.notices, names=NAMES, now_ms=lambda: NOW_MS)
        self.reply_sender = ReplySender(self.publisher, own=None)
        self.replies = Replies(self.reply_sender, rule=ReplyRule(names=NAMES))
        self.store = MemoryStore(self.log)
        self.claiming = Claiming(self.store)
        self.reply_retries = ReplyRetries()
        self.settler = Settler(
            self.publisher,
            replies=self.replies,
            reply_retries=self.reply_retries,
            claiming=self.claiming,
            lifecycle=self.lifecycle,
            names=NAMES,
            tracing=Tracing(),
            now_ms=lambda: NOW_MS,
            failpoints=Failpoints(),
            parking=parking or Parking(),
            large_answers=LargeAnswers(self.publisher),
            bodies=Fetching(None, most_bytes=0),
            webhooks=Webhooks(self.publisher, spec=spec or WebhookSpec(), names=NAMES, store=self.store),
        )

    def delivery(self, *, body: bytes = BODY, queue: str = "lane.critical", **properties: Any) -> FakeDelivery:
        fields = {
            "exchange": "lane.requests",
            "routing_key": "critical.shop.chat",
            "message_id": "m-1",
            "reply_to": REPLY_TO,
            "correlation_id": "c-1",
            **properties,
        }
        return FakeDelivery(Message(body=body, **fields), self.log, queue=queue)

    def job(self, *, lane: LaneSpec | None = CRITICAL, delivery: Delivery | None = None, **properties: Any) -> Job:
        found = delivery or self.delivery(**properties)
        return Job(found, lane=lane, source=source_of(found.message, NAMES), taken_ms=NOW_MS)

    def to(self, exchange: str) -> Message:
        (found,) = (each.message for each in self.publisher.sent if each.exchange == exchange)
        return found


async def granted(job: Job, decoded: Decoded) -> bool:
    return True


def attempts(
    registry: Registry,
    *,
    replies: Replies,
    lifecycle: Lifecycle,
    breakers: Breakers | None = None,
    pausing: Pausing | None = None,
    now_ms: Callable[[], int] = lambda: NOW_MS,
    budget_gate: BudgetGate | None = None,
) -> Attempts:
    """An `Attempts`. Unless `budget_gate` is given, its budget suffices for everything."""
    breakers, rng, spec = breakers or Breakers(), random.Random(5), BudgetSpec()
    claiming = Claiming(MemoryStore())
    return Attempts(
        registry,
        breakers=breakers,
        budget_gate=budget_gate
        or BudgetGate(
            own_budgets(spec),
            breakers,
            Estimates(first_output_tokens=5, first_bytes_per_token=3.5),
            spec=spec,
            now_ms=now_ms,
            on_wait=lambda job, wait: None,
        ),
        replies=replies,
        lifecycle=lifecycle,
        pausing=pausing or Pausing({}),
        policy=RetryPolicy(),
        now_ms=now_ms,
        rng=rng,
        call_begins=claiming.call_begins,
        keep_files=claiming.keep_files,
        hold_again=granted,
    )


def handler(
    attempts: Attempts,
    *,
    gates: Sequence[Gate],
    provider: str,
    replies: Replies,
    parsing: Parsing | None = None,
) -> Handler:
    """The steps of a request, with these gates; its only route is to `provider`."""
    return Handler(
        gates=gates,
        attempts=attempts,
        replies=replies,
        webhooks=Webhooks(FakePublisher([]), spec=WebhookSpec(), names=NAMES, store=MemoryStore()),
        exchange=NAMES.requests,
        failpoints=Failpoints(),
        decoding=Decoding(parsing or Parsing(), routes_of(provider).of),
    )


def routes_of(*providers: str) -> Routes:
    """Routes to these providers; each has every model."""
    return Routes(RoutesSpec(providers=tuple(ProviderModels(name=each) for each in providers)))


def read(job: Job, chain: Chain | None = None, *, now_ms: int = NOW_MS) -> Job:
    """The job, with its request decoded. Without a `chain` it goes to a provider "one"."""
    assert job.lane
    hop = job.hop if job.trusted else None
    request = decoding.decode(job.message, lane=job.lane, request_id=job.id, hop=hop, now_ms=now_ms)
    chain = chain or routes_of("one").of(job.lane_name, job.identity.tenant, request.model)
    job.decoded = Decoded(request, job.lane, chain)
    return job


def decoded(job: Job) -> Decoded:
    """The decoded request of a job (see `read`), with its lane and chain."""
    assert job.decoded
    return job.decoded


class HeldPauses:
    """`StoredPauses` in memory."""

    def __init__(self, *pauses: Pause) -> None:
        self.held = {pause.id: pause for pause in pauses}
        self.is_away = self.is_full = False

    async def pauses(self) -> Sequence[Pause]:
        if self.is_away:
            raise StoreUnavailable("away")
        return list(self.held.values())

    async def pause(self, pause: Pause) -> bool:
        if not self.is_full:
            self.held[pause.id] = pause
        return not self.is_full

    async def resume(self, id: str) -> Pause | None:
        return self.held.pop(id, None)


def a_pause(kind: str = "lane", name: str = "batch", **given: Any) -> Pause:
    fields = {"since_ms": NOW_MS, "until_ms": None, "who": "ann@desk", "why": "too dear", **given}
    return Pause(kind=kind, name=name, **fields)  # type: ignore[arg-type]


class FakeSession(Session):
    """Delivers the given messages, then waits until it is stopped. `ends`: it ends after the last one instead."""

    def __init__(self, log: list[str], deliveries: Sequence[FakeDelivery], *, ends: bool = False) -> None:
        self._log = log
        self._left = list(deliveries)
        self.stopped = asyncio.Event()
        if ends:
            self.stopped.set()

    @property
    @override
    def waiting(self) -> int:
        return len(self._left)

    @override
    def __aiter__(self) -> "FakeSession":
        return self

    @override
    async def __anext__(self) -> FakeDelivery:
        if not self._left:
            await self.stopped.wait()
            raise StopAsyncIteration
        return self._left.pop(0)


class FakeDeliveries(Deliveries):
    """Deliveries that have a single session."""

    queue = "lane.control"
    trouble = None

    def __init__(self, session: FakeSession) -> None:
        self._only = session

    @override
    async def sessions(self) -> AsyncGenerator[Session, None]:
        yield self._only

    @override
    async def stop(self) -> None:
        self._only.stopped.set()

    @override
    async def stopped(self) -> None:
        await self._only.stopped.wait()

    @property
    @override
    def is_stopping(self) -> bool:
        return self._only.stopped.is_set()


async def none_waits(queues: list[str]) -> dict[str, int]:
    return {"lane.control": 0}


def answers_of(bench: Bench) -> ControlAnswers:
    return ControlAnswers(bench.reply_sender, rule=ReplyRule(names=NAMES), notices=bench.notices)


def control(bench: Bench, session: FakeSession, **given: Any) -> Control:
    """The reader of a control queue whose deliveries are those of `session`."""
    brake = BrakeCommands(
        Brake(),
        bench.store,
        operators=("ops",),
        known={"lane": ("critical", "normal", "batch"), "provider": ("anthropic",)},
        now_ms=lambda: NOW_MS,
    )
    given = {"ready": none_waits, "kept_s": 86_400, "per_tenant_s": 100, **given}
    given = {"answers": answers_of(bench), "brake": brake, **given}
    return Control(
        FakeDeliveries(session),
        claiming=bench.claiming,
        settler=bench.settler,
        store=bench.store,
        cancelling=GroupCancelling(bench.store),
        now_ms=lambda: NOW_MS,
        speakers=("gateway",),
        **given,
    )


class Told(Progress):
    """Records what is told of a request's steps."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    @override
    def publish_event(self, kind: str, **detail: Any) -> None:
        self.told.append((kind, detail))
