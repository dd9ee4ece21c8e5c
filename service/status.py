"""Collects the status of the lanes: asks all workers, reads the queues' lengths from the broker, and combines both.

Only workers know which requests run and how long these waited; only the broker knows how many requests wait in queues.
So a status question is published to the control exchange, and every worker answers it with numbers that it has in
memory; in addition the broker is asked for the queues' lengths. Quantiles of several workers are read from their merged
sketches (`packed`), which the answers contain, not from the quantiles of each.
"""

import asyncio
import base64
import binascii
import json
import uuid
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ddsketch import DDSketch
from ddsketch.ddsketch import BaseDDSketch
from ddsketch.pb.ddsketch_pb2 import DDSketch as Packed
from ddsketch.pb.proto import DDSketchProto
from google.protobuf.message import DecodeError

from consumers.lifecycle import FAILURES
from consumers.limits.base import CONCURRENCY
from consumers.slots.activity import ACCURACY, WINDOWS
from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.amqp.replies import Arrivals, DirectReplies
from lanekeeper.contract.messages import Depth, Message
from lanekeeper.contract.names import CONTROL, PROBE_KEY, STATUS_KEY, Names
from lanekeeper.contract.problems import AccessRefused, BrokerError, Unroutable
from lanekeeper.replies import ControlRefused, NoReply
from lanekeeper.telemetry.tracing import Tracing
from service.config.names import variable
from topology import delays
from topology.lanes import LaneSpec

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading an answer that is not as expected may raise."""
QUIET_S = 0.3
LONGEST_S = 2.0
PROBED_WITHIN_S = 50.0
ADDED = (
    "running", "due_slots", "extra_slots", "waits_since_delivery", "answered", "failed", "retried", "buried",
    "throughput_per_min",
)  # fmt: skip
SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SKETCH_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatus:
    """One lane, over all workers; what workers report is None if none answered."""

    lane: str
    depth: int | None
    """How many requests of the lane wait: in its queues (the intake with new requests, the due queue with retried and
    delayed ones, the side queues), and in workers that have received them but have no free slot for them. None if the
    user may not read the queues' lengths."""
    consumers: int | None
    """How many consumers the lane's intake queue has, as the broker counts them. This includes scouts, the further
    consumers that workers add if requests wait for a slot (docs/fairness.md). None if the user may not read the queues'
    lengths."""
    workers: int
    running: int | None
    longest_s: int | None
    """For how long a worker has had the one of them that began first."""
    slots: int | None
    """How many requests of the lane's intake queue (new requests) all workers together can work on at the same time.
    This includes slots that other lanes have lent, and slots that were added because requests waited too long."""
    due_slots: int | None
    extra_slots: int | None
    slots_limit: str | None
    """The limit because of which the lane gets no more slots although its requests wait too long: `slots_max`, or a
    limit of the provider (rpm, itpm, otpm, …: requests, input tokens, output tokens a minute). None: its requests do
    not wait too long, or it may get more slots."""
    wait_ms: Mapping[str, Mapping[str, int | None]] | None
    """How long the attempts of the last 5 minutes (`5m`) and of the last hour (`1h`) had waited: `p50`, `p95` and `p99`
    over all workers together, at most 2 % off, and how many attempts they were (`count`)."""
    run_ms: Mapping[str, Mapping[str, int | None]] | None
    waits_since_delivery: int | None
    answered: int | None
    failed: int | None
    buried: int | None
    retried: int | None
    throughput_per_min: int | None
    deferred_for: Mapping[str, int] | None
    limited: Mapping[str, int] | None
    """How many of the running requests hold a slot while they wait for a limit of their provider, by limit (`rpm`)."""
    delayed: int | None
    delayed_for: Mapping[str, Mapping[str, int]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What `lanekeeper status` shows about all lanes, and about the workers that answered."""

    lanes: tuple[LaneStatus, ...]
    workers: tuple[str, ...]
    troubles: tuple[str, ...] = ()
    """Why workers take no work, or lanes no requests."""
    accounts: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """For each account (a provider with a line of models) and each of its limits (`rpm`, `itpm`, `otpm`,
    `concurrency`): what it allows (`limit`), what is `left` of it, and what is `used`."""
    reserves: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For each account, the part of its limits that is kept for each lane."""
    waiting: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()
    pauses: tuple[Mapping[str, str | None], ...] = ()
    schedules: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    breakers: tuple[str, ...] = ()
    spent: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """What lanes and tenants have used since the workers started. The keys are "lane" or "tenant", then the name of a
    lane or tenant, then `requests`, `tokens`, `usd` (dollars) or `saved_usd`."""
    tenants: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    """For each lane and each of its latest tenants: how many requests are `running`, and how many are `in_hand`
    (received by a worker, and waiting for a slot). Since the workers started: how many requests were `begun`, and how
    many were `set_aside` (moved to a side queue, so that other tenants do not wait behind them); and `waited_ms`, the
    sum of `waits` waits."""
    prices_as_of: str | None = None
    in_delays: int | None = None
    dead: int | None = None
    caps: tuple[str, ...] = ()
    """The caps of which nothing is left, or less than a request needed."""
    in_batches: int | None = None
    """How many requests are gathered for providers' batches, or are in one. None: the broker does not tell."""
    batch_tickets: int = 0
    """How many batches wait for the next look at them; between looks they are in the delay queues."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """What became of batches, and of requests in them, since the workers started."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Of all workers together: how many bytes of messages they hold and may hold, how many messages have no room, and
    how many processes of theirs the kernel has killed for memory (`kills`)."""
    undelivered: int = 0
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    control: Mapping[str, int] = field(default_factory=dict)
    webhooks: Mapping[str, int] = field(default_factory=dict)
    failures: tuple[Mapping[str, Any], ...] = ()
    simulated: tuple[str, ...] = ()

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


async def collect_status(connection: Connection, *, lanes: Sequence[LaneSpec], names: Names) -> Status:
    """Raises BrokerUnreachable; AccessRefused if the user may not ask workers; TopologyMismatch."""
    answers = await gather(connection, names=names)
    queues = [
        queue for lane in lanes for queue in (names.intake(lane.name), names.due(lane.name), *_sides(lane, names))
    ]
    found: dict[str, Depth] = {}
    with suppress(AccessRefused):  # some users may ask the workers, but not read the queues' lengths
        found |= await depths(connection, queues)
    for others in (_delays(names), [names.dead], [names.batches]):
        with suppress(BrokerError):  # the topology may be of another version
            found |= await depths(connection, others)
    return merge(answers, found, lanes=lanes, names=names)


@asynccontextmanager
async def asked(connection: Connection, question: Message, names: Names) -> AsyncIterator[Arrivals]:
    """Publish a control message, and collect the workers' answers inside the block. Raises BrokerError."""
    direct = DirectReplies()
    publisher = Publisher(connection, tracing=Tracing(), on_channel=direct.consume)
    try:
        with direct.expecting(question) as arrived:
            key = question.type or ""
            await publisher.publish(question, exchange=names.control, routing_key=key, traced=False)
            direct.published(arrived)
            yield arrived
    finally:
        await direct.close()


async def gather(connection: Connection, *, names: Names) -> list[Mapping[str, Any]]:
    """All workers' answers: until none has come for `QUIET_S`, at most for `LONGEST_S`."""
    question = Message(
        body=b"{}",
        content_type="application/json",
        type=STATUS_KEY,
        message_id=uuid.uuid4().hex,
        persistent=False,
        expiration=str(round(1000 * LONGEST_S)),  # a copy goes to `lane.control`, and must not stay there
    )
    answers: list[Mapping[str, Any]] = []
    with suppress(TimeoutError, Unroutable):  # the latter: no worker has bound a queue
        async with asked(connection, question, names) as arrived:
            now_s = asyncio.get_running_loop().time
            end = now_s() + LONGEST_S
            while now_s() < end:
                answer = await arrived.next(end=min(end, now_s() + QUIET_S))
                with suppress(ValueError, RecursionError):
                    told = json.loads(answer.body)
                    answers.append(told if isinstance(told, dict) else {"lanes": None})  # `merge` names it
    return answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """How a provider stands after all workers were asked to probe it now. `state`: `called` (it was not paused),
    `resumed` (its probes succeeded) or `paused` (one failed), `reason` and `error` then say why."""

    provider: str
    state: str
    workers: Mapping[str, Mapping[str, str]]


async def probe_provider(connection: Connection, provider: str, *, names: Names, user: str) -> Probed | None:
    """None if no worker has this provider. Raises ControlRefused if `user` is none of the workers' operators, NoReply,
    BrokerError."""
    question = Message(
        body=json.dumps({PROBE_KEY: provider}).encode(),
        content_type="application/json",
        type=PROBE_KEY,
        message_id=uuid.uuid4().hex,
        user_id=user,
        persistent=False,
        expiration=str(round(1000 * LONGEST_S)),  # a copy goes to `lane.control`, and must not stay there
    )
    found: dict[str, Mapping[str, str]] = {}
    refused: Mapping[str, Any] | None = None
    with suppress(TimeoutError, Unroutable):
        async with asked(connection, question, names) as arrived:
            now_s = asyncio.get_running_loop().time
            began_s = now_s()
            while True:
                is_probing = not found or any(each["state"] == "probing" for each in found.values())
                end = began_s + (PROBED_WITHIN_S if found and is_probing else LONGEST_S)
                answer = await arrived.next(end=end if is_probing else now_s() + QUIET_S)
                told = json.loads(answer.body)
                if answer.headers.get(CONTROL) == "error":  # or by a worker of a version that knows no probes
                    refused = told
                    continue
                found[str(told["worker"])] = {
                    name: str(told[name]) for name in told if name not in ("worker", "provider")
                }
    if not found:
        if refused is not None:
            raise ControlRefused(dict(refused))
        raise NoReply(f"no worker answered within {LONGEST_S:g} s")
    states = {each["state"] for each in found.values()}
    worst = next((state for state in ("paused", "probing", "resumed", "called") if state in states), None)
    return None if worst is None else Probed(provider=provider, state=worst, workers=found)


def merge(
    answers: Sequence[Mapping[str, Any]], found: Mapping[str, Depth], *, lanes: Sequence[LaneSpec], names: Names
) -> Status:
    """One status of the workers' answers and the queues' lengths (`found`). Workers of other versions answer too, so an
    answer that cannot be read is left out, and named among the troubles."""
    try:
        return _merged(answers, found, lanes=lanes, names=names)
    except UNREADABLE:
        pass
    readable: list[Mapping[str, Any]] = []
    unread: list[str] = []
    for answer in answers:
        try:
            _merged([*readable, answer], found, lanes=lanes, names=names)
            readable.append(answer)
        except UNREADABLE:
            worker = answer.get("worker")
            unread.append(f"{worker if isinstance(worker, str) else 'a worker'} sends a status that cannot be read")
    status = _merged(readable, found, lanes=lanes, names=names)
    return replace(status, troubles=(*status.troubles, *unread))


def _merged(
    answers: Sequence[Mapping[str, Any]], found: Mapping[str, Depth], *, lanes: Sequence[LaneSpec], names: Names
) -> Status:
    tenants, batches = _sums(answers, "tenants"), _sums(answers, "batches")
    gathering, in_hand, tickets = _ready(found, [names.batches]), batches.pop("waiting", 0), batches.pop("tickets", 0)
    known = {lane.name: _sides(lane, names) for lane in lanes}
    names_of_lanes = dict.fromkeys([*known, *(name for answer in answers for name in answer.get("lanes", ()))])
    return Status(
        lanes=tuple(
            _lane(
                name,
                [answer["lanes"][name] for answer in answers if name in answer.get("lanes", ())],
                limited=_limited(name, answers),
                intake=found.get(names.intake(name)),
                due=found.get(names.due(name)),
                aside=sum(found[queue].ready for queue in known.get(name, ()) if queue in found)
                + sum(figures["in_hand"] for figures in tenants.get(name, {}).values()),
            )
            for name in names_of_lanes  # workers may know further lanes
        ),
        workers=tuple(sorted(str(answer.get("worker", "?")) for answer in answers)),
        troubles=(*_troubles(answers), *_full(lanes, found, names)),
        accounts=_accounts(answers),
        reserves={account: lanes for answer in answers for account, lanes in answer.get("reserves", {}).items()},
        waiting=tuple(sorted(_waiting(answers))),
        paused=tuple(sorted(_paused(answers))),
        pauses=tuple({pause["id"]: pause for answer in answers for pause in answer.get("pauses", ())}.values()),
        schedules=_schedules(answers),
        breakers=tuple(
            sorted(
                {
                    f"{name}: {breaker_text(breaker)}"
                    for answer in answers
                    for name, breaker in answer.get("breakers", {}).items()
                }
            )
        ),
        spent=_sums([answer for answer in answers if not answer.get("simulated")], "spent"),
        in_delays=_ready(found, _delays(names)),
        dead=_ready(found, [names.dead]),
        caps=tuple(sorted({cap for answer in answers for cap in answer.get("caps", ())})),
        batch_tickets=tickets,
        in_batches=None if gathering is None else gathering + in_hand,
        batches=batches,
        memory=_sums(answers, "memory"),
        undelivered=sum(answer.get("undelivered", 0) for answer in answers),
        dead_letters=_sums(answers, "dead_letters"),
        control=_sums(answers, "control"),
        webhooks=_sums(answers, "webhooks"),
        failures=_last_failures(answers),
        simulated=tuple(sorted(str(answer.get("worker", "?")) for answer in answers if answer.get("simulated"))),
        tenants=tenants,
        prices_as_of=next((answer["prices_as_of"] for answer in answers if "prices_as_of" in answer), None),
    )


def _last_failures(answers: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    found = [failure for answer in answers for failure in answer.get("failures", ())]
    return tuple(sorted(found, key=lambda failure: -int(failure["at_ms"]))[:FAILURES])


def _troubles(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for answer in answers:
        for why in answer.get("troubles", ()):
            yield f"{answer.get('worker', '?')} takes no work: {why}"


def _full(lanes: Sequence[LaneSpec], found: Mapping[str, Depth], names: Names) -> Iterator[str]:
    for lane in lanes:
        intake = found.get(names.intake(lane.name))
        if intake is not None and intake.ready >= lane.max_length:
            limit = variable(("lanes", lane.name, "max_length"))
            yield f"lane {lane.name} is full ({limit}={lane.max_length}): publishers are refused"


def _schedules(answers: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """What the workers tell of each schedule; only the one that publishes knows what is wrong with it."""
    told = [each for answer in answers for each in answer.get("schedules", {}).items()]
    return dict(sorted(told, key=lambda each: any(each[1].get(what) for what in ("trouble", "failed", "late_since"))))


def _accounts(answers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """The accounts as the worker sees them that has the least left. Calls that run are added up."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for answer in answers:
        for account, limits in answer.get("accounts", {}).items():
            for limit, figures in limits.items():
                known = found.setdefault(account, {}).get(limit)
                if limit == CONCURRENCY:
                    used = figures["used"] + (0 if known is None else known["used"])
                    found[account][limit] = {**figures, "used": used}
                elif known is None or figures["left"] < known["left"]:
                    found[account][limit] = figures
    return found


def _sums(answers: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for answer in answers:
        _add(total, answer.get(what, {}))
    return total


def _add(total: dict[str, Any], figures: Mapping[str, Any]) -> None:
    for name, figure in figures.items():
        if isinstance(figure, Mapping):
            _add(total.setdefault(name, {}), figure)
        else:
            total[name] = round(total.get(name, 0) + figure, 6)


def _waiting(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for answer in answers:
        for account, lanes in answer.get("waiting", {}).items():
            for lane, entry in lanes.items():
                found.setdefault((lane, entry["reason"], account), []).append(entry)
    limits = _accounts(answers)
    for (lane, reason, account), entries in found.items():
        oldest_s = max(entry["oldest_s"] for entry in entries)
        count = sum(entry["count"] for entry in entries)
        guessed = (
            "" if all(one.get("is_known", True) for one in entries) else " (a guess: nobody has told this limit yet)"
        )
        known = limits.get(account, {}).get(reason)
        of = account if known is None else f"{account}, whose limit is {known['limit']:.0f}"
        yield f"{lane}: {count} wait for {reason}{guessed} of {of}; the first for {oldest_s:.1f} s"


def _limited(lane: str, answers: Sequence[Mapping[str, Any]]) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for answer in answers:
        for lanes in answer.get("waiting", {}).values():
            if lane in lanes:
                found[lanes[lane]["reason"]] += lanes[lane]["count"]
    return dict(found)


def _paused(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found: dict[str, tuple[float, str]] = {}
    for answer in answers:
        for name, pause in answer.get("paused", {}).items():
            text = f"{pause['reason']} ({pause['error']}), probed again in {pause['probe_in_s']:.0f} s"
            found[name] = max(found.get(name, (0.0, "")), (pause["for_s"], text))
    for name, (for_s, text) in found.items():
        yield f"{name}: paused for {for_s:.0f} s: {text}"


def breaker_text(breaker: Mapping[str, Any]) -> str:
    """A worker's open circuit breaker, with the last call's error, which workers before 0.5 do not tell."""
    why = f" after {breaker['error']}" if breaker.get("error") else ""
    return f"{breaker['state']}{why}, asked again in {breaker['retry_in_s']} s"


def _delays(names: Names) -> list[str]:
    return [names.delay(level) for level in range(delays.LEVELS)]


def _ready(found: Mapping[str, Depth], queues: Sequence[str]) -> int | None:
    return sum(found[queue].ready for queue in queues) if all(queue in found for queue in queues) else None


def _sides(lane: LaneSpec, names: Names) -> list[str]:
    return [names.side(lane.name, number) for number in range(lane.side_queues)]


def _lane(
    lane: str,
    figures: Sequence[Mapping[str, Any]],
    *,
    limited: Mapping[str, int],
    intake: Depth | None,
    due: Depth | None,
    aside: int,
) -> LaneStatus:
    def times(what: str) -> dict[str, Mapping[str, int | None]] | None:
        if not figures:
            return None
        told = [of_worker.get(what, {}) for of_worker in figures]
        return {window: quantiles(merged_sketch(each.get(window) for each in told)) for window in WINDOWS}

    def total(*fields: str) -> int | None:
        return sum(of_worker.get(field, 0) for of_worker in figures for field in fields) if figures else None

    delayed_for: dict[str, dict[str, int]] = {}
    for of_worker in figures:
        for reason, delayed in of_worker.get("delayed_for", {}).items():
            total_of = delayed_for.setdefault(reason, {"count": 0, "last_in_s": 0})
            total_of["count"] += delayed["count"]
            total_of["last_in_s"] = max(total_of["last_in_s"], delayed["last_in_s"])

    return LaneStatus(
        lane=lane,
        depth=None if intake is None or due is None else intake.ready + due.ready + aside,
        consumers=None if intake is None else intake.consumers,
        workers=len(figures),
        longest_s=max((int(of_worker.get("longest_s", 0)) for of_worker in figures), default=None),
        slots=total("slots", "extra_slots"),
        slots_limit=", ".join(sorted({limit for of_worker in figures if (limit := of_worker.get("slots_limit"))}))
        or None,
        wait_ms=times("waits"),
        run_ms=times("runs"),
        deferred_for=_sums(figures, "deferred_for") if figures else None,
        limited=limited if figures else None,
        delayed=sum(of_reason["count"] for of_reason in delayed_for.values()) if figures else None,
        delayed_for=delayed_for if figures else None,
        **{name: total(name) for name in ADDED},
    )


# ---- sketches of waits and run times ---------------------------------------------------------------------------------


def packed_sketch(sketch: BaseDDSketch) -> str:
    """A sketch as text, for a worker's answer."""
    data: bytes = DDSketchProto.to_proto(sketch).SerializeToString()  # type: ignore[no-untyped-call]
    return base64.b64encode(zlib.compress(data)).decode()


def unpacked_sketch(text: object) -> BaseDDSketch | None:
    """The sketch in this text; None if there is none, or another version's."""
    if not isinstance(text, str) or len(text) > SKETCH_BYTES:
        return None
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text), SKETCH_BYTES)
        sketch: BaseDDSketch = DDSketchProto.from_proto(Packed.FromString(data))  # type: ignore[no-untyped-call]
    except (binascii.Error, zlib.error, ValueError, DecodeError):
        return None
    return sketch


def merged_sketch(texts: Iterable[object]) -> BaseDDSketch:
    """One sketch of all values in these; what cannot be read is left out."""
    total = DDSketch(ACCURACY)
    for text in texts:
        if (sketch := unpacked_sketch(text)) is not None:
            try:
                total.merge(sketch)
            except ValueError:  # of a version with another accuracy
                continue
    return total


def quantiles(sketch: BaseDDSketch) -> Mapping[str, int | None]:
    """The quantiles of `SHARES`, and of how many values (`count`)."""
    found = {name: sketch.get_quantile_value(share) for name, share in SHARES.items()}
    return {name: None if value is None else round(value) for name, value in found.items()} | {
        "count": round(sketch.count)
    }
