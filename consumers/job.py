"""Defines `Job`: one delivery while a worker works on it. The result of a job is an outcome (`outcomes.py`)."""

import asyncio
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from opentelemetry.trace import INVALID_SPAN, Span

from consumers.clock import moment_ms
from consumers.failures import AccountError, ProviderError
from consumers.limits.base import Amounts, CallInProgress, Reservation
from consumers.progress import Progress
from consumers.state.base import Completion, Fingerprint, Held, Identity, InGroup, Labels, Stop
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import encodable, is_request_id
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PROBLEMS, ProviderFailure, RequestProblem, invalid_request
from lanekeeper.telemetry import tracing
from topology.broker.consume import Delivery
from topology.codec.decoding import Published, Request, app_of, deadline_of, published
from topology.codec.headers import ADDRESS_LENGTH, BatchHop, FlowHop, group_size, read_fresh, read_hop, split_tail
from topology.lanes import LaneSpec

CONSUMER_TIMEOUT_S = 1800.0
"""RabbitMQ's default consumer timeout, in seconds: the broker takes a delivery back that is not settled within this
time, and delivers it again, without end (docs/facts.md, section 7). `tests/consumers/test_held_deliveries.py` adds up
the limits of all waits between delivery and acknowledgement, and compares the sum with this."""
ASK_WITHIN_S = 10.0
CLAIM_WITHIN_S = 30.0
ATTEMPT_WITHIN_S = 1200.0
FAST = "-fast"
"""Ends the name of an account of fast mode."""
STORE_WITHIN_S = 180.0
SETTLE_WITHIN_S = 200.0
"""For how many seconds a worker tries to settle a delivery: to store its outcome, and to publish its reply."""
KEPT_AFTER_MS: Final = 60_000
"""For so long after its deadline the store keeps what it knows of a request that waits, or of a pipeline."""
MODEL_LISTED: Final = 128
"""How many characters of a model's name lists show: it is what the requester wrote."""
HIGHEST_PRIORITY: Final = 9
_DELAYED_BASE: Final = HIGHEST_PRIORITY + 1
_DELAYED_WITHOUT_PRIORITY: Final = _DELAYED_BASE + HIGHEST_PRIORITY + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One provider that may be called for a request, and the model that is requested from it."""

    provider: str
    model: str
    name: str
    """The provider's own name for the model, which the call contains."""
    account: str
    """The account against whose rate limits the call counts."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The providers that may be called for one request, in order of preference. There is at least one, unless the
    request's model is forbidden."""

    routes: tuple[Route, ...] = ()
    forbidden: str = ""

    def in_fast_mode(self) -> "Chain":
        """With the accounts of fast mode, whose limits are apart from the model's."""
        return replace(self, routes=tuple(replace(route, account=f"{route.account}{FAST}") for route in self.routes))


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded request, its lane, and the providers that may be called for it."""

    request: Request
    lane: LaneSpec
    chain: Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePosition:
    """Where the pipeline of a job stands: its step, the one that follows (None: it is the last), and its state."""

    step: str
    following: str | None
    flow: FlowHop
    state: bytes

    def identity(self, request: Identity) -> Identity:
        """Under which the outcome of the step is stored. With the input in it, because a dead letter may be edited
        before it is replayed."""
        return Identity(request.tenant, f"{request.id}#{self.step}~{self.flow.digest}")


def group_in(headers: Mapping[str, Any], *, key: str) -> InGroup | None:
    """What a request with these headers, which may be malformed, and this routing key says of its group."""
    id, webhook = headers.get(n.GROUP), headers.get(n.WEBHOOK)
    if not (isinstance(id, str) and is_request_id(id)):
        return None
    if not isinstance(webhook, str) or len(webhook) > ADDRESS_LENGTH or not webhook.isprintable():
        webhook = ""
    return InGroup(id, group_size(headers), key if key.isprintable() else "", webhook)


def state_identity(request: Identity, flow: FlowHop) -> Identity:
    """Under which the state of a pipeline is stored while it waits for the items of a step."""
    return Identity(request.tenant, f"{request.id}#{flow.step}~{flow.digest}.state")


@dataclass(frozen=True, slots=True)
class Reserved:
    """The provider and model that will be called for a job, and the part of the account's rate limits that is reserved
    for the call."""

    route: Route
    reservation: Reservation


class LostCall(NamedTuple):
    """A call that has to be paid for, or may have to be, although its answer is not the request's: it failed, or was a
    refusal, after which another model was asked. `cost_usd`: None if only the amounts are known."""

    model: str
    used: Amounts
    cost_usd: float | None = None


@dataclass(slots=True, kw_only=True)
class Attempted:
    """What is known about the attempt that is made for a delivery, that is, about its one or two calls to providers."""

    started_ms: int
    run_ms: int = 0
    usage: Amounts | None = None
    cost_usd: float | None = None
    saved_usd: float = 0.0
    lost: tuple[LostCall, ...] = ()
    error: ProviderError | None = None
    counts: bool = True
    """Whether the attempt counts against the request's limit of attempts. False if the provider was down."""


class Source(Enum):
    """Where a message was published. Only if a worker published it are its internal headers trusted."""

    REQUESTER = auto()
    DELAY = auto()
    SIDE = auto()


class Job:
    """A delivery while a worker works on it: its message, and what is known about its request so far. `speakers`: the
    users that may publish for other tenants."""

    def __init__(
        self,
        delivery: Delivery,
        *,
        lane: LaneSpec | None,
        source: Source,
        taken_ms: int,
        speakers: Collection[str] = (),
    ) -> None:
        message, headers = delivery.message, delivery.message.headers
        self.delivery = delivery
        self.message = message
        self.lane = lane
        self.lane_name = lane.name if lane else "none"
        self.source = source
        self.trusted = source is not Source.REQUESTER
        self.id = message.message_id or uuid.uuid4().hex
        self.routing_key = message.routing_key
        self.app = app_of(message.routing_key)
        if self.trusted:
            self.hop = read_hop(headers)
            message.priority = original_priority(message.priority)
        else:
            self.hop = read_fresh(headers, user_id=message.user_id, expiration=message.expiration)
        self.batch: BatchHop | None = self.hop.batch
        self.batch_result: bytes | None = None
        """The line of the batch's results that answers it; then no provider is called."""
        if self.batch is not None and self.batch.result_bytes:
            message.body, self.batch_result = split_tail(message.body, self.batch.result_bytes)
            self.batch = replace(self.batch, result_bytes=0)
        # a republished dead letter names its tenant in a header, which counts if its sender may speak for others
        stated = headers.get(n.TENANT) or (headers.get(n.USER_ID) if n.DEAD_AT in headers else None)
        self.identity = Identity(tenant_of(self.hop.user_id, stated, speakers), self.id)
        self.taken_ms = taken_ms
        self.decoded: Decoded | None = None
        self.claim: Held | None = None
        """The claim that this process holds for the request."""
        self.progress: Progress | None = None
        self.reserved: Reserved | None = None
        self.attempted: Attempted | None = None
        self.in_progress: CallInProgress | None = None
        self.completion: Completion | None = None
        self.span: Span = INVALID_SPAN
        self.standing: PipelinePosition | None = None
        self.died = False
        self.renewals = 0
        """How often its claim was renewed."""
        self.noting: asyncio.Task[None] | None = None
        """Notes in the store that it waits."""
        self.stopped: Stop | None = None
        self.waiting: Interruptible | None = None

    def stop(self, why: Stop) -> None:
        self.stopped = why
        if self.waiting is not None:
            self.waiting.end()

    def interruptible(self, seconds: float | None) -> "Interruptible":
        """A context manager that ends the wait in its block when `stop` is called, or after `seconds` (None: no time
        limit). Execution then continues after the block, without an exception."""
        return Interruptible(self, seconds)

    def log_fields(self) -> dict[str, str | int]:
        fields: dict[str, str | int] = {"request": self.id, "lane": self.lane_name, "attempt": self.attempts}
        if self.trace_id is not None:
            fields["trace_id"] = self.trace_id
        return fields

    @property
    def trace_id(self) -> str | None:
        return tracing.trace_id_of(self.span, self.message.headers)

    @property
    def is_item(self) -> bool:
        """Whether it is an item of a pipeline's fan-out. It has no reply, and is no dead letter."""
        return self.hop.flow is not None and self.hop.flow.item_of != ""

    def parks(self, code: str) -> bool:
        """Whether the request is kept as a dead letter if it ends with this error."""
        problem = PROBLEMS[code]
        if problem.is_the_callers:
            by_header = self.message.headers.get(n.PARK_INVALID) not in (False, "false")
            if not by_header or (self.lane is not None and not self.lane.park_invalid):
                return False
        return problem.parked and not self.is_item

    @property
    def step(self) -> str:
        if self.standing is not None:
            return self.standing.step
        return "" if self.hop.flow is None else self.hop.flow.step

    @property
    def redelivered(self) -> bool:
        return self.delivery.redelivered or self.hop.redelivered

    @property
    def came_before(self) -> bool:
        return self.redelivered or not self.hop.is_fresh

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The properties of this message (such as the hash of its body) by which the store recognises that another
        message with the same id is a different request."""
        message = self.message
        sha256 = message.headers.get(n.BODY_SHA256)
        compared = (
            message.reply_to, message.correlation_id, message.routing_key, message.timestamp_s, message.priority,
            message.app_id, message.headers.get(n.SENT_MS), message.headers.get(n.TRACEPARENT),
        )  # fmt: skip
        flow = self.hop.flow
        if flow is not None:  # the message of a step is another one than that of the step before
            compared += (flow,)  # type: ignore[assignment]
        return Fingerprint(
            body_hash=bytes.fromhex(flow.body_hash)
            if flow is not None and flow.body_hash
            else content_hash(sha256 if isinstance(sha256, str) else message.body),
            mark=blake2b(repr(compared).encode(errors="replace"), digest_size=16).digest(),
            # a message in a side queue that was not delivered before has no claim; only its original may have one
            redelivered=self.delivery.redelivered if self.source is Source.SIDE else self.redelivered,
            nonce=(b"s" if self.source is Source.SIDE else b"q") + uuid.uuid4().bytes[:7],
            dead_at_ms=None if self.hop.dead_at is None else moment_ms(self.hop.dead_at),
            group=self.group,
            labels=self.labels,
            keep_until_ms=self._keep_until_ms(),
        )

    @property
    def labels(self) -> Labels:
        lane = "" if self.lane is None else self.lane.name
        model = "" if self.decoded is None else self.decoded.request.model
        return Labels(lane, encodable(self.app), encodable(model[:MODEL_LISTED]))

    def _keep_until_ms(self) -> int:
        if self.hop.flow is not None:
            return self.hop.flow.deadline_ms + KEPT_AFTER_MS
        if self.decoded is not None and self.decoded.request.pipeline:
            return self.decoded.request.deadline_ms + KEPT_AFTER_MS
        return 0

    @property
    def group(self) -> InGroup | None:
        """What the request says of its group."""
        if self.is_item or not is_request_id(self.id):
            return None
        return group_in(self.message.headers, key=self.routing_key)

    @property
    def attempts(self) -> int:
        return self.hop.attempts + (1 if self.attempted is not None and self.attempted.counts else 0)

    @property
    def deaths(self) -> int:
        return self.hop.deaths + self.died

    @property
    def wait_ms(self) -> int:
        return self.waited_ms(self.taken_ms if self.attempted is None else self.attempted.started_ms)

    @property
    def run_ms(self) -> int:
        return 0 if self.attempted is None else self.attempted.run_ms

    @property
    def ran_ms(self) -> int:
        """How many ms all attempts of the request ran so far."""
        return self.hop.ran_ms + self.run_ms

    @property
    def last_failure(self) -> str:
        if self.attempted is None:
            return f"; {self.hop.errors[0]}" if self.hop.errors else ""
        return "" if self.failure is None else f"; {self.failure}"

    @property
    def provider_failure(self) -> ProviderFailure | None:
        error = None if self.attempted is None else self.attempted.error
        return None if error is None else error.failure

    @property
    def failure(self) -> str | None:
        if self.attempted is None or (error := self.attempted.error) is None:
            return None
        told = error.reason if isinstance(error, AccountError) else error.detail
        return f"attempt {max(1, self.attempts)}: {told}"

    def waited_ms(self, until_ms: int) -> int:
        if self.decoded is not None:
            return max(0, until_ms - self.decoded.request.start_ms)
        return max(0, until_ms - max(self.published.ms, self.hop.due_ms or 0))

    @cached_property
    def deadline_ms(self) -> int | None:
        if self.lane is None:
            return None
        hop = self.hop if self.trusted else None
        try:
            return deadline_of(self.message, lane=self.lane, hop=hop, now_ms=self.taken_ms)
        except RequestProblem:
            return None

    @property
    def published(self) -> Published:
        if self.decoded is not None:
            return self.decoded.request.published
        return published(self.message, self.hop, now_ms=self.taken_ms)


class Interruptible:
    """The wait of a job inside a block (`Job.interruptible`)."""

    __slots__ = ("_job", "_limit")

    def __init__(self, job: Job, seconds: float | None) -> None:
        self._job = job
        self._limit = asyncio.timeout(seconds)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._job.waiting = self
        if self._job.stopped is not None:
            self.end()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._job.waiting = None  # from now on there is no wait that `Job.stop` could end
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            return True
        return isinstance(error, TimeoutError) and self._limit.expired()

    @property
    def until_s(self) -> float | None:
        return self._limit.when()

    def end(self) -> None:
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def reschedule(self, until_s: float | None) -> None:
        """Change the time limit: the wait now ends at `until_s`, by the event loop's clock (None: no limit)."""
        if self._job.stopped is None and not self._limit.expired():
            self._limit.reschedule(until_s)


def content_hash(content: bytes | str) -> bytes:
    """The hash by which the bodies of two messages are compared. `content`: the body, or its SHA-256 in hex if the body
    is not in the message."""
    known = content if isinstance(content, bytes) else content.lower().encode()
    return blake2b(known, digest_size=16).digest()


def tenant_of(user_id: str | None, stated: object, speakers: Collection[str]) -> str:
    """The tenant of a request: its user, or the tenant that its header names (`stated`), if the user is one of
    `speakers` (users that may publish for other tenants). The result is "" if the tenant is unknown."""
    if user_id in speakers and isinstance(stated, str):
        return stated
    return user_id or ""


def user_id_missing() -> RequestProblem:
    """The error for a message without the property `user_id`, where this is required."""
    return invalid_request(
        "user_id: missing; publish with the property user_id, the name of the user that is connected: "
        "without it nobody can tell whose request this is"
    )


def source_of(message: Message, names: Names) -> Source:
    """Where a message was published, according to its exchange."""
    if message.exchange.startswith(names.side_prefix):
        return Source.SIDE
    if message.exchange == names.due_exchange or message.exchange.startswith(names.delay_prefix):
        return Source.DELAY
    return Source.REQUESTER


def side_priority(priority: int | None, *, is_fresh: bool) -> int | None:
    """The priority with which a request is published to a side queue: `priority`, which its requester set (0 to 9, or
    none) or, after a delay or a retry, that plus 10 (20 without one)."""
    if is_fresh:
        return priority
    return _DELAYED_WITHOUT_PRIORITY if priority is None else _DELAYED_BASE + min(priority, HIGHEST_PRIORITY)


def original_priority(priority: int | None) -> int | None:
    """The priority that the requester set, computed from the request's priority in a side queue."""
    if priority is None or priority < _DELAYED_BASE:
        return priority
    return None if priority >= _DELAYED_WITHOUT_PRIORITY else priority - _DELAYED_BASE
