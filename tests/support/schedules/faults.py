"""The faults that can happen in a world. Each function returns a move; its byte `choice` decides what is affected."""

from collections.abc import Callable
from dataclasses import replace

from consumers.failures import OverloadedError, RejectedError, TransientError
from lanekeeper.contract import names as n
from tests.support.schedules.broker import Channel
from tests.support.schedules.operation import Operation
from tests.support.schedules.worker import Worker
from tests.support.schedules.world import BODY, Move, World

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
