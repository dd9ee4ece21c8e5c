"""Workers, broker, connections, provider and store fail under load: no confirmed request is lost or gets different
replies.

A selection of what `./dev faults` does for longer. Each test has a broker of its own and three workers.
"""

import asyncio
import time
from dataclasses import replace
from functools import partial

import pytest

from consumers.claiming import RENEW_EVERY_S
from consumers.state.base import LEASE_S
from tests.faults.checker import LOST, NOT_PARKED, Asked, Verdict
from tests.faults.faults import ANSWERED_WITHIN_S, POSTED_WITHIN_S, Made, broken, fault, inject, judged
from tests.faults.ground import FileStore, Ground
from tests.faults.load import EVERYTHING, Mix
from tests.faults.unanswered import all_answered
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
"""For a machine on which each start of a worker takes half a minute."""
PATIENT = {f"LANEKEEPER_LANES__{lane}__CALL_TIMEOUT_S": "60" for lane in ("CRITICAL", "NORMAL", "BATCH")}
"""Settings with which no call is repeated because the machine is busy."""
HEARD = replace(EVERYTHING, unheard=0.0)
"""All are answered: the result of a request that is not would be lost with the store."""


def told(verdict: Verdict) -> str:
    """The results of each fault, printed with `-s`."""
    return f"{verdict.confirmed} confirmed, {verdict.pipelines} of them pipelines\n" + "\n".join(
        f"{each.fault.code} {each.fault.title}: {each.fault.in_flight} in flight, {each.repeated_calls} repeated, "
        f"stall {each.stall_s:.1f} s, recovered after {each.recovered_s:.1f} s"
        for each in verdict.recoveries
    )


def is_kept(service: Ground, verdict: Verdict) -> bool:
    """Whether the promise was kept; prints the results."""
    print(told(verdict))
    assert [str(each) for each in verdict.violations] == []
    assert service.crew.crashes == []
    assert all(each.fault.in_flight for each in verdict.recoveries), "each fault hit work"
    return verdict.confirmed > 0


TRIALS = {
    "workers die": [("worker killed", 0), ("worker dies between any two steps", 6), ("all workers killed", 0)],
    "workers hang": [("worker frozen, then awake again", 14), ("worker hangs for a moment", 3)],
    "the broker dies": [("broker killed", 1), ("broker restarted", 0)],
    "connections end": [("connections closed by the broker", 0), ("connections reset", 0), ("bytes garbled", 0)],
    "lines are silent": [("blackhole before all workers", 6), ("half-open line", 8)],
    "the broker takes nothing": [("disk alarm", 4), ("lane full", 2)],
    "the provider fails": [("answers cut", 4), ("answers broken", 4), ("provider hangs", 4), ("provider down", 4)],
}


@pytest.mark.parametrize("faults", TRIALS.values(), ids=TRIALS.keys())
async def test_no_request_is_lost_under_each_fault(made: Made, faults: list[tuple[str, float]]) -> None:
    async with made() as service:
        verdict = await broken(service, *faults)
        assert is_kept(service, verdict)
        assert verdict.pipelines


async def test_the_requests_of_a_killed_worker_are_continued_before_its_claims_expire(made: Made) -> None:
    """The broker delivers them again at once, and a redelivery takes the claim over: nobody waits for its lease."""
    mix = Mix(lanes={"critical": 1.0}, latency_s=(1.0, 2.0), delayed=0, refused=0, conflicting=0)
    # Some twelve calls at any time, and three times as many slots: each worker has calls, and the others have room.
    async with made(mix=mix, rate=8.0, LANEKEEPER_LANES__CRITICAL__SLOTS="12", **PATIENT) as service:
        verdict = await broken(service, ("worker killed", 0), ("worker killed", 0))
        assert is_kept(service, verdict)
        kills_s = [each.at_s for each in service.disturbances()]
        continued = [again.at_s - max(at_s for at_s in kills_s if at_s < again.at_s) for again in verdict.repeats]
        print("called again after", [f"{each:.2f} s" for each in continued])
        assert continued
        assert max(continued) < LEASE_S - RENEW_EVERY_S


async def test_a_worker_that_is_told_to_stop_under_load_repeats_no_call(made: Made) -> None:
    async with made(**PATIENT) as service:
        verdict = await broken(service, ("worker told to stop", 0), ("worker told to stop", 0))
        assert is_kept(service, verdict)
        assert verdict.repeated_calls == 0
        assert [each.code for each in service.crew.endings] == [0, 0]


async def test_no_provider_is_called_during_an_alarm_because_its_answer_could_not_be_published(made: Made) -> None:
    async with made() as service:
        verdict = await broken(service, ("memory alarm", 10.0))
        assert is_kept(service, verdict)
        # RabbitMQ tells a connection of the alarm at its first publish in it. Until its last connection knows, a worker
        # may call; what it called then may reach the provider late.
        blocked_s, freed_s = max(service.crew.told_s("broker.blocked")), min(service.crew.told_s("broker.unblocked"))
        late_s = [call.at_s - blocked_s for call in service.calls() if blocked_s < call.at_s < freed_s]
        print(f"{freed_s - blocked_s:.1f} s after all were told, calls after", [f"{each:.2f} s" for each in late_s])
        assert len(service.crew.told_s("broker.blocked")) >= len(service.workers)
        assert all(each_s < (freed_s - blocked_s) / 2 for each_s in late_s)


async def test_a_retry_storm_ends_soon_after_its_cause(made: Made) -> None:
    async with made() as service:
        verdict = await broken(service, ("retry storm", 6))
        assert is_kept(service, verdict)
        (storm,) = verdict.recoveries
        failed = sum(call.outcome == "overloaded" for call in service.calls())
        print(f"{failed} calls failed in the storm, of {storm.fault.in_flight} requests and {15 * 6} more")
        assert storm.recovered_s < 4 * 6, "the longest pause begun in the storm, and the work left on a busy machine"


async def test_without_its_store_a_worker_makes_no_call_and_loses_nothing(made: Made) -> None:
    async with made(**PATIENT) as service:
        titles = [each for each in ("store locked", "store's disk full") if fault(each).needs in service.store.is_a]
        verdict = await broken(service, *((title, 8.0) for title in titles))
        assert is_kept(service, verdict)
        assert verdict.repeated_calls == 0
        # On a full disk some claims are still granted: free space inside the file can still be written.
        assert isinstance(service.store, FileStore)
        ((locked_s, freed_s),) = service.store.locked_s
        late_s = [call.at_s - locked_s for call in service.calls() if locked_s < call.at_s < freed_s]
        print("calls after the store was locked:", [f"{each:.2f} s" for each in late_s])
        assert all(each_s < (freed_s - locked_s) / 2 for each_s in late_s), "only those that had a claim"


async def test_a_deleted_store_loses_no_request(made: Made) -> None:
    async with made(mix=HEARD) as service:
        assert isinstance(service.store, FileStore)
        async with service.load.asking():
            await asyncio.sleep(6)
            service.store.delete()
            await asyncio.sleep(8)
            await inject(service, fault("worker killed"), lasts_s=0, rng=service.rng)
            await asyncio.sleep(4)
        assert is_kept(service, await judged(service, store_was_lost=True))


async def test_a_corrupt_store_stops_the_work_and_loses_nothing(made: Made) -> None:
    """The work stops until somebody moves the file away; then it continues by itself."""
    async with made(mix=HEARD) as service:
        assert isinstance(service.store, FileStore)
        async with service.load.asking():
            await asyncio.sleep(6)
            service.store.corrupt(service.rng)
            await asyncio.sleep(6)
            service.store.delete()
            moved_s = time.monotonic()
        assert await all_answered(service, within_s=ANSWERED_WITHIN_S)
        print(f"caught up {time.monotonic() - moved_s:.1f} s after the store was moved away")
        assert is_kept(service, await judged(service, store_was_lost=True))


async def test_a_deleted_lane_loses_only_what_was_queued_in_it_and_is_declared_again(
    made: Made,
) -> None:
    """The loss cannot be prevented (docs/reliability.md): it is reported, and the lane works again by itself."""
    # No request is sent twice here: repeating one while the lane is missing fails, even if it was answered before.
    async with made(mix=Mix(lanes={"batch": 1.0}, delayed=0, conflicting=0, twice=0)) as service:
        node = service.broker.nodes[0]
        async with service.load.asking():
            await asyncio.sleep(8)
            await node.run("rabbitmqctl", "--quiet", "delete_queue", "lane.batch")
            deleted_s = time.monotonic()
            await until(
                lambda: any(each.running and each.running.told("queue.deleted") for each in service.workers),
                within_s=40,
            )
            print(f"said {time.monotonic() - deleted_s:.1f} s after it was deleted")
            await asyncio.sleep(6)
        asked_s = {each.question: each.at_s for each in service.history.events if isinstance(each, Asked)}
        await until(
            lambda: all(asked_s[each] < deleted_s for each in service.load.unanswered), within_s=ANSWERED_WITHIN_S
        )
        await service.posted(within_s=POSTED_WITHIN_S)
        verdict = service.verdict()
        # While the lane was missing, publishers got an error.
        others = [str(each) for each in verdict.violations if each.kind != LOST and "unroutable" not in each.text]
        assert others == []
        assert all(asked_s[each.identity] < deleted_s for each in verdict.of(LOST)), "only what was there is lost"
        assert service.crew.crashes == []


async def test_without_the_queue_of_dead_letters_requests_to_be_parked_wait_until_it_is_back(made: Made) -> None:
    async with made(mix=Mix(lanes={"normal": 1.0}, refused=0.3, delayed=0, conflicting=0)) as service:
        async with service.load.asking():
            await asyncio.sleep(8)
            await service.broker.nodes[0].run("rabbitmqctl", "--quiet", "delete_queue", "lane.dead")
            await asyncio.sleep(8)
        assert await all_answered(service, within_s=ANSWERED_WITHIN_S)
        await service.posted(within_s=POSTED_WITHIN_S)
        verdict = service.verdict()
        # Dead letters in the queue when it was deleted had been answered, and are not parked again.
        assert [str(each) for each in verdict.violations if each.kind != NOT_PARKED] == []
        assert service.crew.crashes == []


async def test_the_deliberately_broken_worker_is_caught(made: Made) -> None:
    async with made(module="tests.faults.broken") as service:
        faults = [("worker killed", 0.0), ("connections closed by the broker", 0.0), ("all workers killed", 0.0)]
        verdict = await broken(service, *faults, judge=partial(judged, answered_within_s=5))
        print(f"{verdict.lost} of {verdict.confirmed} lost")
        assert verdict.lost > 0
