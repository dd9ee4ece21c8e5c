"""The ends of groups are told, whatever is wrong with one of them; a group is cancelled once at a time."""

import asyncio
from typing import Any, cast

from typing_extensions import override

from consumers.background import end
from consumers.batches import groups
from consumers.batches.groups import GroupCancelling, GroupEnds
from consumers.flows.webhooks import Webhooks
from consumers.state.base import Completion, Identity, InGroup
from tests.support.jobs import Bench
from tests.support.memory_store import MemoryStore
from tests.support.waiting import until

WEBHOOK = "https://a.example/h"


class Hooks(Webhooks):
    """Posts the end of each group but `a`."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.spec = cast(Any, self)

    def refusal(self, *_: Any, **__: Any) -> None:  # of the settings
        return None

    @override
    async def send(self, completion: Completion, *, url: str, identity: Identity, routing_key: str) -> None:
        if identity.id == "a":
            raise ValueError("a fault of ours")
        self.sent.append(identity.id)


async def test_by_a_fault_of_ours_in_one_group_the_others_ends_are_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(groups, "ENDS_EVERY_S", 0.0)
    store, hooks, bench = MemoryStore(), Hooks(), Bench()
    failed = Completion(status="error", code="invalid_request", body=b"{}", ended_ms=store.now_ms)
    for id in ("a", "b"):
        await store.note(Identity("crm", f"k-{id}"), failed, group=InGroup(id, 1, "normal.a.b", WEBHOOK))
    ends = GroupEnds(store=store, webhooks=hooks, lifecycle=bench.settler.lifecycle)
    running = asyncio.create_task(ends.run(owner="me"))

    await until(lambda: hooks.sent or running.done())

    assert hooks.sent == ["b"]
    await end((running,))
    assert not await store.ended_groups()


async def test_a_group_that_is_cancelled_again_and_again_is_read_through_by_one_task(monkeypatch: Any) -> None:
    """Its requests may be many, and whoever cancels it may ask each second whether it has ended."""
    monkeypatch.setattr(groups, "SHOWN_WITHIN_S", 0.0)
    monkeypatch.setattr(groups, "CANCELLED_AGAIN_S", (0.0, 0.01))
    store, reads, may_go_on, members = MemoryStore(), 0, asyncio.Event(), MemoryStore.members

    async def counted(*args: Any, **how: Any) -> Any:
        nonlocal reads
        reads += 1
        await may_go_on.wait()
        return await members(*args, **how)

    monkeypatch.setattr(MemoryStore, "members", counted)
    group = InGroup("g", 1, "normal.a.b")
    await store.defer(Identity("crm", "k"), due_ms=1, keep_until_ms=store.now_ms + 60_000, group=group)
    cancelling = GroupCancelling(store)
    for _ in range(3):
        await cancelling.cancel(Identity("crm", "g"))
    await until(lambda: reads)
    await asyncio.sleep(0.01)
    assert reads == 1
    may_go_on.set()
    await until(lambda: not cancelling._cancelling)
