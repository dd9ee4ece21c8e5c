"""A simulated world of two workers, one broker, one store and one clock, in which one thing happens at a time.

world.happen(*move)     does one of `world.moves()`, or a fault; raises Violation if a promise is broken
world.end()             completes everything, without further faults
run(schedule)           raises Violation, with what happened, if a promise was broken

A schedule is a string of bytes that determines what happens: the same bytes, the same course. Each turn takes two
bytes. The first chooses what happens next: below `FAULTS_FROM`, one of the normal moves that are possible (an operation
takes effect, a frame arrives, a message is delivered, time passes); from there on, a fault. All zeros means no faults,
so a failing schedule shrinks towards a normal course. After the last byte there are no more faults, and everything must
complete."""

import json
import logging
import random
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import structlog

from consumers.failures import OverloadedError, RejectedError, TransientError
from consumers.settle import Settler
from consumers.state import decisions
from consumers.state.base import Completion, Identity, StoreSpec
from consumers.state.decisions import Row, Times
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from tests.support.schedules.broker import NAMES, Broker, Channel
from tests.support.schedules.worker import Operation, Promise, Worker, swap

BEGAN_MS = 1_790_000_000_000
TURN_S = 0.001
TURNS_TO_THE_END = 6000
BODY = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}'


UNFORESEEN: list[str] = []
"""Unforeseen errors that the core caught; it logs them and continues."""


def reads_logs() -> None:
    """Suppress all log output, and collect unforeseen errors from it."""

    def read(_: object, __: str, event: MutableMapping[str, Any]) -> NoReturn:
        if event.get("exc_info"):
            UNFORESEEN.append("\n".join(["not foreseen", traceback.format_exc()]))
        raise structlog.DropEvent

    structlog.configure(processors=[read], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


class Violation(AssertionError):
    """A promise was broken; the text lists what happened until then."""


class Move(NamedTuple):
    what: str
    do: Callable[[], object]


class Owed(NamedTuple):
    """An answer that a requester waits for."""

    id: str
    reply_to: str
    told_before: int


class World:
    """See the module's docstring. `told` lists what has happened."""

    def __init__(
        self,
        *,
        settler: type[Settler] = Settler,
        workers: int = 2,
        counts: bool = True,
    ) -> None:
        """`counts`: whether the intake counts deliveries; that of RabbitMQ 3.x does not."""
        self._now_s = 0.0
        self._settler = settler
        UNFORESEEN.clear()
        self.rows: dict[Identity, Row] = {}
        self.store_away_until_s = 0.0
        self.bodies: dict[str, set[bytes]] = defaultdict(set)
        self.promise = Promise(self.rows, self.bodies)
        self.broker = Broker(time_s=self.time_s, on_settle=self.promise.on_settle, counts=counts)
        self.told: list[str] = []
        self.published: list[Message] = []
        self._owed: list[Owed] = []
        self._orphans: list[Operation] = []
        self._count = 0
        self.workers = [self._started() for _ in range(workers)]
        for worker in self.workers:
            worker.loop.step()

    def time_s(self) -> float:
        return self._now_s

    def now_ms(self) -> int:
        return BEGAN_MS + round(self._now_s * 1000)

    def times(self) -> Times:
        return Times(now=1_000_000 + round(self._now_s * 1000), today=self.now_ms())

    # what happens

    def happen(self, what: str, do: Callable[[], object] = lambda: None) -> None:
        """Do one thing, then let every worker run until it waits again."""
        self.told.append(f"{self._now_s:9.3f}  {what}")
        do()
        self._now_s += TURN_S
        self.broker.on_time()
        for worker in self.workers:
            if not worker.is_suspended and not worker.is_over:
                worker.loop.step()
            self.promise.violations += worker.loop.unhandled
            if worker.fell_over:
                self.promise.violations.append(f"{worker.name}: one of its tasks has ended by itself")
            if worker.name in self.promise.doomed and not worker.is_over:
                self.told.append(f"{self._now_s:9.3f}  {worker.name} dies of what it works on")
                self.crash(worker)
        self.promise.violations += UNFORESEEN
        if self.promise.violations:
            raise self._violation(self.promise.violations[0])

    def moves(self) -> list[Move]:
        """What can happen next without a fault; the passing of time is last. Empty if everything has ended."""
        moves = []
        for operation in self.operations():
            if operation.is_hung:
                continue
            if operation.is_done:
                moves.append(Move(f"{operation}: told", operation.tell))
            else:
                moves.append(Move(str(operation), operation.do_and_tell))
        for channel in self.broker.channels:
            what = f"{channel.owner} {channel.queue.name}"
            if channel.frames:
                moves.append(Move(f"{what} {channel.frames[0]} arrives", channel.read_frame))
            elif channel.is_open and (channel.is_broken or channel.is_known_lost):
                moves.append(Move(f"the broker finds {what} gone", channel.lose))
            if channel.is_broken and not channel.is_known_lost:
                owner = self._worker(channel.owner)
                moves.append(Move(f"{what}: told of the loss", lambda o=owner, c=channel: o.learn_lost(c)))  # type: ignore[misc]
            if channel.has_room:
                moves.append(Move(f"delivery to {what}", channel.deliver))
        self.broker.channels = [each for each in self.broker.channels if each.is_open or not each.is_known_lost]
        for at, worker in enumerate(self.workers):
            if worker.is_over:
                moves.append(Move(f"{worker.name} is started anew", lambda at=at: self._start_anew(at)))  # type: ignore[misc]
            elif worker.is_suspended:
                moves.append(Move(f"{worker.name} goes on", lambda worker=worker: self.suspend(worker, False)))  # type: ignore[misc]
        if (next_s := self._next_timer_s()) is not None:
            by_s = max(0.0, next_s - self._now_s)
            moves.append(Move(f"time passes, {by_s:.3f} s", lambda: self.jump(by_s)))
        return moves

    def end(self, *, kills: Callable[[Operation], bool] = lambda _: False) -> None:
        """Run without further faults until everything has ended, then check that every request was answered.

        Only `kills` still causes crashes: a worker crashes if `kills` is true for one of its pending operations.
        """
        self.told.append("--- no more faults")
        self.store_away_until_s = 0.0
        for operation in self.operations():
            operation.is_hung = False
        for _ in range(TURNS_TO_THE_END):
            if fatal := next((each for each in self.operations() if each.is_waited_for and kills(each)), None):
                victim = self._worker(fatal.owner)
                self.happen(f"{fatal} kills", lambda victim=victim: self.crash(victim))  # type: ignore[misc]
                continue
            if not (moves := self.moves()):
                break
            self.happen(*moves[0])
        else:
            raise self._violation(f"not at its end after {TURNS_TO_THE_END} turns")
        self._see_that_all_is_done()

    def _see_that_all_is_done(self) -> None:
        left = [each.message.message_id for queue in self.broker.queues.values() for each in queue.ready]
        left += [each.message.message_id for channel in self.broker.channels for each in channel.unacked.values()]
        if left:
            raise self._violation(f"left lying: {left}")
        for worker in self.workers:
            if not worker.is_over and (worker.lane_slots.running or worker.lane_slots.in_hand):
                raise self._violation(
                    f"{worker.name}: slots or waits without a request: {worker.lane_slots.snapshot()}"
                )
        for id, reply_to, before in self._owed:
            if len(self.broker.replies.get(reply_to, ())) <= before:
                raise self._violation(f"{id}: never answered to {reply_to}")
        if unburied := self.promise.unburied(self.broker.dead):
            raise self._violation(unburied[0])

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()

    # what can be done to it

    def publish(self, message: Message) -> None:
        reply_to, id = message.reply_to or "", message.message_id or ""
        self.published.append(message)
        self.bodies[id].add(message.body)
        self._owed.append(Owed(id, reply_to, len(self.broker.replies.get(reply_to, ()))))
        self.broker.publish(message, exchange=NAMES.requests, routing_key=message.routing_key)

    def request(self, id: str | None = None, *, body: bytes = BODY, **properties: object) -> Message:
        self._count += 1
        fields: dict[str, object] = {
            "routing_key": "critical.shop.chat",
            "message_id": id or f"m-{self._count}",
            "reply_to": f"shop.{self._count}",
            "correlation_id": f"c-{self._count}",
        }
        return Message(body=body, **{**fields, **properties})  # type: ignore[arg-type]

    def operations(self) -> list[Operation]:
        """All pending operations, including those of crashed workers, which may still take effect."""
        self._orphans = [each for each in self._orphans if not each.is_over]
        found = list(self._orphans)
        for edge in (worker.edge for worker in self.workers if not worker.is_over):
            edge.under_way = [each for each in edge.under_way if not each.is_over]
            found += edge.under_way
        return found

    def crash(self, worker: Worker) -> None:
        """Kill the worker at whatever it is doing. The broker notices its lost connections later."""
        worker.kill()
        self._orphans += worker.edge.under_way
        for channel in self.broker.channels:
            if channel.owner == worker.name:
                channel.is_known_lost = True

    def suspend(self, worker: Worker, is_suspended: bool) -> None:
        worker.is_suspended = is_suspended

    def jump(self, by_s: float) -> None:
        self._now_s += max(0.0, by_s)

    def cancel(self, id: str) -> None:
        """Record a cancellation in the store, as another process does."""
        body = json.dumps({"code": "cancelled", "told by": "its owner"}).encode()
        completion = Completion(status="error", code="cancelled", body=body, ended_ms=self.now_ms())
        swap(self, Identity("", id), partial(decisions.cancel, completion=completion, spec=StoreSpec()))
        self.promise.on_stored(None)

    def _started(self) -> Worker:
        self._count += 1
        return Worker(self, f"worker {self._count}", settler=self._settler)

    def _start_anew(self, at: int) -> None:
        self.crash(self.workers[at])
        self.workers[at] = self._started()

    def _worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)

    def _next_timer_s(self) -> float | None:
        times = [worker.loop.next_timer_s() for worker in self.workers if not worker.is_suspended]
        return min((each for each in (*times, self.broker.next_timer_s()) if each is not None), default=None)

    def _violation(self, what: str) -> Violation:
        return Violation("\n".join([what, *self.told]))


JUMPS_S = (0.3, 2.0, 11.0, 130.0, 700.0)
"""Longer than a pause, a lease, a deadline, and every wait for the store and the broker."""
Fault = Callable[[World, int], Move]
NOTHING = Move("nothing", lambda: None)


def _some_worker(world: World, choice: int) -> Worker | None:
    there = [worker for worker in world.workers if not worker.is_over]
    return there[choice % len(there)] if there else None


def _some_operation(world: World, choice: int) -> Operation | None:
    there = [each for each in world.operations() if not each.is_done and each.is_waited_for]
    return there[choice % len(there)] if there else None


def crashes(world: World, choice: int) -> Move:
    worker = _some_worker(world, choice)
    return NOTHING if worker is None else Move(f"{worker.name} crashes", lambda: world.crash(worker))


def suspends(world: World, choice: int) -> Move:
    worker = _some_worker(world, choice)
    return NOTHING if worker is None else Move(f"{worker.name} hangs", lambda: world.suspend(worker, True))


def stops(world: World, choice: int) -> Move:
    worker = _some_worker(world, choice)
    if worker is None or worker.is_stopping:
        return NOTHING
    return Move(f"{worker.name} is told to stop", worker.stop)


def breaks(world: World, choice: int) -> Move:
    there: list[Channel] = [each for each in world.broker.channels if not each.is_broken and not each.is_known_lost]
    busy = [each for each in there if each.unacked] or there
    if not busy:
        return NOTHING
    channel = busy[choice % len(busy)]

    def do() -> None:
        channel.is_broken = True
        channel.frames.clear()

    return Move(f"the channel {channel.owner} {channel.queue.name} breaks", do)


def fails(world: World, choice: int) -> Move:
    operation = _some_operation(world, choice)
    if operation is None:
        return NOTHING
    what = f"{operation} fails"
    if operation.what == "call":
        error = (TransientError, OverloadedError, RejectedError)[choice // 16 % 3]
        return Move(f"{what}: {error.__name__}", lambda: operation.fail(error("no")))

    def do() -> None:
        operation.stays = False
        operation.fail(operation.lost("lost"))

    return Move(what, do)


def loses_the_answer(world: World, choice: int) -> Move:
    operation = _some_operation(world, choice)
    if operation is None:
        return NOTHING

    def do() -> None:
        operation.do()
        operation.fail(operation.lost("answer lost"))

    return Move(f"{operation}: done, and its answer lost", do)


def answers_later(world: World, choice: int) -> Move:
    operation = _some_operation(world, choice)
    if operation is None:
        return NOTHING
    return Move(f"{operation}: done, not told yet", operation.do)


def hangs(world: World, choice: int) -> Move:
    operation = _some_operation(world, choice)
    if operation is None:
        return NOTHING

    def do() -> None:
        operation.is_hung = True

    return Move(f"{operation} hangs", do)


def drops(world: World, choice: int) -> Move:
    there = [each for each in world.operations() if not each.is_waited_for]
    if not there:
        return NOTHING
    operation = there[choice % len(there)]

    def do() -> None:
        operation.stays = False

    return Move(f"{operation}: never arrived", do)


def jumps(world: World, choice: int) -> Move:
    by_s = JUMPS_S[choice % len(JUMPS_S)]
    return Move(f"{by_s:g} s pass at once", lambda: world.jump(by_s))


def store_goes(world: World, choice: int) -> Move:
    def do() -> None:
        world.store_away_until_s = world.time_s() + JUMPS_S[choice % len(JUMPS_S)]

    return Move(f"the store is away for {JUMPS_S[choice % len(JUMPS_S)]:g} s", do)


def publishes(world: World, choice: int) -> Move:
    kind, choice = choice % 9, choice // 9
    earlier = world.published[choice % len(world.published)] if world.published else None
    if earlier is None or kind == 0:
        message = world.request()
    elif kind == 1:
        message = replace(earlier, headers=dict(earlier.headers))
    elif kind == 2:
        message = world.request(earlier.message_id)
    elif kind == 3:
        message = world.request(earlier.message_id, body=BODY.replace(b"hi", b"ho"))
    elif kind == 4:
        message = world.request(earlier.message_id if choice % 2 else None, body=b"{")
    elif kind == 5:
        message = world.request(expiration="100")
    elif kind == 6:
        message = world.request(headers={n.DELAY_MS: 3000})
    elif kind == 7:
        message = world.request(f"poison-{len(world.published)}", priority=9)
    else:
        message = world.request(headers={n.DEADLINE_MS: 5000})
    return Move(
        f"published: {message.message_id} {message.reply_to} {'' if message.body == BODY else message.body.decode()}"
        f"{dict(message.headers) or ''}{message.expiration or ''}",
        lambda: world.publish(message),
    )


def cancels(world: World, choice: int) -> Move:
    id = world.published[choice % len(world.published)].message_id or "" if world.published else "m-unseen"
    return Move(f"{id} is cancelled", lambda: world.cancel(id))


def runs_again(world: World, choice: int) -> Move:
    if not world.broker.dead:
        return NOTHING
    letter = world.broker.dead[choice % len(world.broker.dead)]
    again = replace(letter, headers=dict(letter.headers))
    at = letter.headers[n.DEAD_AT]
    return Move(f"published again: the dead letter {letter.message_id} of {at}", lambda: world.publish(again))


def arrives_twice(world: World, choice: int) -> Move:
    if not world.broker.delayed:
        return NOTHING
    due_s, message = world.broker.delayed[choice % len(world.broker.delayed)]
    return Move(
        f"the delayed {message.message_id} will arrive twice", lambda: world.broker.delayed.append((due_s, message))
    )


FAULTS: tuple[Fault, ...] = (
    publishes, crashes, breaks, suspends, fails, loses_the_answer, answers_later, jumps, cancels, publishes, hangs,
    drops, stops, store_goes, runs_again, arrives_twice, breaks, crashes, fails, loses_the_answer,
)  # fmt: skip


FAULTS_FROM = 196


def run(schedule: bytes, *, settler: type[Settler] = Settler, counts: bool = True) -> World:
    """Run a schedule that begins with two requests. Raises Violation."""
    before = random.getstate()
    random.seed(1)  # fixes the random pauses of retries
    world = World(settler=settler, counts=counts)
    try:
        for _ in range(2):
            world.publish(world.request())
        for first, second in zip(schedule[::2], schedule[1::2], strict=True):
            world.happen(*_next(world, first, second))
        world.end()
    finally:
        world.close()
        random.setstate(before)
    return world


def with_faults(faults: Mapping[int, tuple[int, int]]) -> bytes:
    """A schedule with only these faults. Keys: turns; values: the fault's index in `FAULTS`, and its choice byte."""
    length = max(faults, default=-1) + 1
    turns = [(FAULTS_FROM + fault[0], fault[1]) if (fault := faults.get(at)) else (0, 0) for at in range(length)]
    return bytes(byte for turn in turns for byte in turn)


def _next(world: World, first: int, second: int) -> Move:
    if first >= FAULTS_FROM:
        return FAULTS[(first - FAULTS_FROM) % len(FAULTS)](world, second)
    if moves := world.moves():
        return moves[first % len(moves)]
    return publishes(world, second) if first else Move("nothing", lambda: None)
