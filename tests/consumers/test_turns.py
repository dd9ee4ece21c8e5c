"""Which request gets a free slot, and which is set aside instead of waiting for one."""

import asyncio
from collections import Counter

import pytest

from consumers.fairness import turns as turns_module
from consumers.fairness.turns import FIGURES_OF, Bench, Shares, TenantShare, Turn, Turns


class Side:
    """Side queues that hold requests of these tenants."""

    def __init__(self, *tenants: str) -> None:
        self.tenants = set(tenants)

    def has(self, tenant: str) -> bool:
        return tenant in self.tenants


class Worked:
    """A bench whose tenants always have enough requests waiting."""

    def __init__(self, slots: int, shares: dict[str, TenantShare] | None = None) -> None:
        self.turns = Turns(Shares(shares))
        self.bench = self.turns.bench(slots)
        self.begun: list[str] = []
        self.ended = 0

    async def fill(self, waiting: dict[str, int]) -> list["asyncio.Task[None]"]:
        """All requests arrive at once in this order; each records its start and holds its slot."""

        async def one(tenant: str) -> None:
            if not self.bench.begin(tenant):
                assert await self.bench.wait(tenant) is Turn.BEGIN
            self.begun.append(tenant)

        tasks = [asyncio.create_task(one(tenant)) for tenant, count in waiting.items() for _ in range(count)]
        await asyncio.sleep(0)
        return tasks

    async def end(self, tenant: str) -> None:
        self.bench.end(tenant)
        for _ in range(3):
            await asyncio.sleep(0)

    async def run(self, rounds: int) -> Counter[str]:
        """Slots become free in the order in which they were taken."""
        since = len(self.begun)
        for _ in range(rounds):
            await self.end(self.begun[self.ended])
            self.ended += 1
        return Counter(self.begun[since:])


@pytest.fixture
async def ended():
    """Cancel the requests that still wait after a test."""
    tasks: list[asyncio.Task[None]] = []
    yield tasks
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("slots", [1, 2, 3, 16])
@pytest.mark.parametrize("tenants", [2, 3, 10])
async def test_each_waiting_tenant_gets_its_share_however_many_requests_another_has(ended, slots, tenants) -> None:
    worked = Worked(slots)
    ended += await worked.fill({"flood": 400, **{f"small-{each}": 200 for each in range(tenants - 1)}})
    await worked.run(slots)  # the first ones, which the flood started with
    shares = await worked.run(200)
    assert len(shares) == tenants
    assert min(shares.values()) >= 200 / tenants * 0.8


async def test_the_first_slot_that_becomes_free_goes_to_a_new_tenant(ended) -> None:
    worked = Worked(16)
    ended += await worked.fill({"flood": 100})
    ended += await worked.fill({"small": 1})
    await worked.end("flood")
    assert worked.begun[-1] == "small"


@pytest.mark.parametrize("slots", [1, 8])
async def test_a_tenants_share_is_proportional_to_its_weight(ended, slots) -> None:
    worked = Worked(slots, {"large": TenantShare(weight=3)})
    ended += await worked.fill({"small": 300, "large": 300})
    await worked.run(2 * slots)
    shares = await worked.run(160)
    assert 2.5 < shares["large"] / shares["small"] < 3.5


async def test_a_tenant_at_its_in_flight_limit_waits_although_slots_are_free(ended) -> None:
    worked = Worked(8, {"*": TenantShare(in_flight=2)})
    ended += await worked.fill({"a": 5, "b": 1})
    assert worked.begun == ["a", "a", "b"]
    assert worked.bench.running == 3
    await worked.end("a")
    assert worked.begun == ["a", "a", "b", "a"]


async def test_the_in_flight_limit_counts_requests_of_both_queues_of_a_lane(ended) -> None:
    turns = Turns(Shares({"a": TenantShare(in_flight=1)}))
    intake, due = turns.bench(4), turns.bench(4)
    assert intake.begin("a")
    assert not due.begin("a")
    waiting = asyncio.create_task(due.wait("a"))
    await asyncio.sleep(0)
    intake.end("a")
    assert await waiting is Turn.BEGIN


async def test_of_one_tenants_requests_the_highest_priority_goes_first_then_the_oldest() -> None:
    bench = Turns().bench(1)
    bench.begin("a")
    order: list[str] = []

    async def wait(name: str, rank: int) -> None:
        await bench.wait("a", rank=rank)
        order.append(name)
        bench.end("a")

    waiting = [asyncio.create_task(wait(name, rank)) for name, rank in (("old", 1), ("high", 9), ("young", 1))]
    await asyncio.sleep(0)
    bench.end("a")
    await asyncio.gather(*waiting)
    assert order == ["high", "old", "young"]


def full(side: Side, **running: int) -> Bench:
    bench = Turns(side=side).bench(sum(running.values()))
    for tenant, count in running.items():
        assert all(bench.begin(tenant) for _ in range(count))
    return bench


async def test_requests_above_their_tenants_share_are_set_aside_while_the_lane_is_being_sorted() -> None:
    bench = full(Side(), flood=4)
    bench.sort(True)
    assert await bench.wait("flood", movable=True) is Turn.ASIDE
    small = asyncio.create_task(bench.wait("small", movable=True))
    await asyncio.sleep(0)
    bench.end("flood")
    assert await small is Turn.BEGIN


async def test_when_sorting_begins_requests_that_already_wait_are_included() -> None:
    bench = full(Side(), flood=4)
    waiting = [asyncio.create_task(bench.wait(tenant, movable=True)) for tenant in ("flood", "small")]
    await asyncio.sleep(0)
    bench.sort(True)
    assert await waiting[0] is Turn.ASIDE
    assert not waiting[1].done()
    bench.end("flood")
    assert await waiting[1] is Turn.BEGIN


async def test_further_requests_of_a_tenant_with_requests_set_aside_follow_them() -> None:
    bench = full(Side("flood"), flood=2)
    assert await bench.wait("flood", movable=True) is Turn.ASIDE


async def test_nothing_is_set_aside_if_the_lane_is_not_being_sorted_or_the_request_cannot_be_moved() -> None:
    bench = full(Side(), flood=1)
    held = asyncio.create_task(bench.wait("flood", movable=True))
    bench.sort(False)
    await asyncio.sleep(0)
    assert not held.done()
    bench.sort(True)
    assert await held is Turn.ASIDE
    fixed = asyncio.create_task(bench.wait("flood", movable=False))
    await asyncio.sleep(0)
    assert not fixed.done()
    bench.end("flood")
    assert await fixed is Turn.BEGIN


async def test_a_request_that_waits_too_long_for_a_slot_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "HELD_S", 0.01)
    bench = full(Side(), flood=1)
    assert await bench.wait("small", movable=True) is Turn.ASIDE
    assert await bench.wait("small", movable=True, is_head=True) is Turn.ASIDE
    assert (bench.running, bench.waiting_of("small")) == (1, 0)


async def test_a_request_that_is_cancelled_when_its_turn_comes_returns_the_slot() -> None:
    bench = full(Side(), flood=1)
    waiting = asyncio.create_task(bench.wait("small"))
    await asyncio.sleep(0)
    bench.end("flood")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (bench.running, bench.running_of("small")) == (0, 0)


async def test_an_added_slot_goes_to_a_waiting_request() -> None:
    bench = full(Side(), flood=1)
    waiting = asyncio.create_task(bench.wait("small"))
    await asyncio.sleep(0)
    bench.resize(2)
    assert await waiting is Turn.BEGIN
    bench.resize(1)
    assert not bench.begin("other")


async def test_figures_are_kept_only_for_the_latest_tenants() -> None:
    turns = Turns()
    bench = turns.bench(1)
    for at in range(FIGURES_OF + 10):
        assert bench.begin(f"t-{at}")
        bench.end(f"t-{at}")
    told = turns.snapshot()
    assert len(told) == FIGURES_OF
    assert told[f"t-{FIGURES_OF + 9}"] == {"running": 0, "in_hand": 0, "begun": 1, "set_aside": 0}
