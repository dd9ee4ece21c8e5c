"""The promise (docs/reliability.md) holds whatever happens to workers, channels, store and clock between two awaits.

The real pools, handler, gates, claiming, settler and rows of the store run on a clock of their own in a world that goes
as a schedule says (tests/support/schedules): a few thousand turns a second, the same each time. A failing schedule is
printed with what happened in it; give its bytes to `run` to see it again. `--schedules 20000` takes some minutes.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from consumers.failures import RejectedError
from consumers.job import Job
from consumers.outcomes import Outcome, Replayed
from consumers.settle import Settler
from consumers.state.base import Completion, Fingerprint, StoreSpec
from consumers.state.decisions import Change, Row, Times, complete
from lanekeeper.contract import names as n
from tests.support.examples import examples
from tests.support.schedules.worker import SPEC, Operation
from tests.support.schedules.world import FAULTS, Violation, World, reads_logs, run, with_faults
from topology.broker.consume import ChannelLost, Delivery

TURNS = 80
"""The length of a schedule, before the world must come to an end: long enough for each fault to happen twice to a
request."""
CALLS_OF_A_KILLER = 4
"""The fifth delivery makes no call any more."""
SLOW_S = 5.0
LOSSES = 7
TURN = st.integers(0, 40)
FAULT = st.tuples(st.integers(0, len(FAULTS) - 1), st.integers(0, 255))


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    reads_logs()
    yield
    structlog.reset_defaults()


@pytest.fixture
def searching(pytestconfig: pytest.Config) -> settings:
    return settings(
        max_examples=pytestconfig.option.schedules,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("counts", [True, False], ids=["quorum intake", "classic intake"])
def test_every_request_has_one_ending_whatever_happens(searching: settings, counts: bool) -> None:
    @searching
    @given(schedule=st.binary(min_size=2 * TURNS, max_size=2 * TURNS))
    def kept(schedule: bytes) -> None:
        run(schedule, counts=counts)

    kept()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_request_has_one_ending_with_two_to_six_faults(searching: settings) -> None:
    @searching
    @given(faults=st.dictionaries(TURN, FAULT, min_size=2, max_size=6))
    def kept(faults: dict[int, tuple[int, int]]) -> None:
        run(with_faults(faults))

    kept()


@pytest.mark.slow
@pytest.mark.parametrize("fault", range(len(set(FAULTS))))
def test_every_request_has_one_ending_with_any_single_fault_at_any_moment(fault: int) -> None:
    every = [(at, choice) for at in range(16) for choice in range(3)]
    step = len(every) // examples(len(every))
    for at, choice in every[fault % step :: step]:
        run(with_faults({at: (fault, choice)}))


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("step", ["claim", "call"])
def test_a_request_that_kills_every_worker_is_dead_lettered_and_others_are_answered(step: str, is_done: bool) -> None:
    def kills(operation: Operation) -> bool:
        if (operation.what, operation.about) != (step, "deadly"):
            return False
        if is_done:
            operation.do()
        return True

    world = World()
    try:
        for id in ("a", "deadly", "b", "c"):
            world.publish(world.request(id))
        world.end(kills=kills)
    finally:
        world.close()
    ended = {id: [each.code for each in endings] for id, endings in world.promise.endings.items()}
    assert ended == {"a": [""], "deadly": ["poison"], "b": [""], "c": [""]}
    assert world.promise.calls["deadly"] <= CALLS_OF_A_KILLER


@pytest.mark.parametrize("workers", [1, 2])
def test_a_slow_request_is_answered_although_another_kills_its_worker(workers: int) -> None:
    world = World(workers=workers)

    began_s: dict[Operation, float] = {}

    def kills(operation: Operation) -> bool:
        if operation.what == "call" and operation.about == "slow":
            operation.is_hung = world.time_s() < began_s.setdefault(operation, world.time_s()) + SLOW_S
        return operation.what == "call" and operation.about == "deadly"

    try:
        for id in ("slow", "deadly", "a"):
            world.publish(world.request(id))
        world.end(kills=kills)
    finally:
        world.close()
    assert [[each.code for each in world.promise.endings[id]] for id in ("slow", "a")] == [[""], [""]]


@pytest.mark.parametrize("step", ["claim", "complete"])
def test_lost_channels_alone_do_not_make_a_request_poison(step: str) -> None:
    world = World()
    held_up: dict[Operation, Callable[[], bool]] = {}

    def breaks_its_channel(operation: Operation) -> bool:
        if (operation.what, operation.about) == (step, "m") and len(held_up) < LOSSES and operation not in held_up:
            (channel,) = (each for each in world.broker.channels if each.unacked and each.owner == operation.owner)
            channel.is_broken = True
            calls = world.promise.calls["m"]
            held_up[operation] = lambda: (
                not channel.is_known_lost if step == "claim" else world.promise.calls["m"] == calls
            )
        for each, is_held_up in held_up.items():
            each.is_hung = is_held_up()
        return False

    try:
        world.publish(world.request("m"))
        world.end(kills=breaks_its_channel)
    finally:
        world.close()
    assert len(held_up) == LOSSES
    assert [each.code for each in world.promise.endings["m"]] == [""]


def test_a_request_to_be_parked_is_parked_although_its_redelivery_is_past_the_deadline() -> None:
    world = World()
    died: list[str] = []

    def kills(operation: Operation) -> bool:
        if operation.what == "call":
            operation.fail(RejectedError("no"))
        if operation.what != "publish lane.dead" or died:
            return False
        died.append(operation.owner)
        operation.stays = False
        world.jump(SPEC.deadline_s)
        return True

    try:
        world.publish(world.request("m"))
        world.end(kills=kills)
    finally:
        world.close()
    assert died
    assert [(each.message_id, each.headers[n.DEAD_CODE]) for each in world.broker.dead] == [("m", "provider_rejected")]


# Deliberately broken parts: the checks must find them.


class AcknowledgesFirst(Settler):
    @override
    async def settle(self, job: Job, outcome: Outcome) -> Outcome | None:
        with suppress(ChannelLost):
            await job.delivery.ack()
        job.delivery = Settled(job.delivery)
        return await super().settle(job, outcome)


class Settled(Delivery):
    """A delivery that counts as settled already; settling it does nothing."""

    def __init__(self, delivery: Delivery) -> None:
        self.message, self.queue, self.redelivered = delivery.message, delivery.queue, delivery.redelivered
        self.tag, self.cut_bytes, self._session = delivery.tag, delivery.cut_bytes, None

    @override
    async def ack(self) -> None: ...

    @override
    async def reject(self) -> None: ...

    @override
    async def nack(self) -> None: ...


class TellsItsOwn(Settler):
    @override
    async def _stored(self, job: Job, outcome: Outcome) -> Outcome:
        stored = await super()._stored(job, outcome)
        return outcome if isinstance(stored, Replayed) else stored


def unfenced(
    row: Row | None, at: Times, message: Fingerprint, completion: Completion, token: int | None, spec: StoreSpec
) -> Change[Completion | None]:
    """Accepts every token."""
    believed = row.token if row is not None and token is not None else token
    return complete(row, at, message, completion, believed, spec)


def last_one_stays(
    row: Row | None, at: Times, message: Fingerprint, completion: Completion, token: int | None, spec: StoreSpec
) -> Change[Completion | None]:
    """Keeps the last completion of a claim instead of the first."""
    if row is None or not row.ended or token != row.token:
        return complete(row, at, message, completion, token, spec)
    return Change(completion, row.ended_by(completion))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (AcknowledgesFirst, "acknowledged, and nothing came of it"),
        (TellsItsOwn, "which is not stored"),
        (unfenced, "completed by a worker that was fenced off"),
        (last_one_stays, "was replaced by"),
    ],
)
def test_a_part_that_breaks_the_promise_is_found(
    broken: Callable[..., Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_settler = isinstance(broken, type) and issubclass(broken, Settler)
    if not is_settler:
        monkeypatch.setattr("consumers.state.decisions.complete", broken)

    @settings(max_examples=2000, deadline=None, database=None, phases=(Phase.generate,), derandomize=True)
    @given(schedule=st.binary(min_size=2 * TURNS, max_size=2 * TURNS))
    def kept(schedule: bytes) -> None:
        run(schedule, settler=broken if is_settler else Settler)  # type: ignore[arg-type]

    with pytest.raises(Violation, match=told):
        kept()


@pytest.mark.slow
def test_acknowledging_first_is_found_even_if_only_replies_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.schedules.worker.Promise.on_settle", lambda *_: None)

    @settings(max_examples=2000, deadline=None, database=None, phases=(Phase.generate,), derandomize=True)
    @given(schedule=st.binary(min_size=2 * TURNS, max_size=2 * TURNS))
    def kept(schedule: bytes) -> None:
        run(schedule, settler=AcknowledgesFirst)

    with pytest.raises(Violation, match="never answered"):
        kept()
