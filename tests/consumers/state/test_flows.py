"""What the store does for pipelines: their items learn that they have ended, and what they have come to is kept as long
as they may run. For every engine."""

import asyncio
import time
from typing import Any

import pytest

from consumers.state.base import Completion, Ending, Granted, Held, Identity, Stop, StoreSpec
from consumers.state.store import Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import CANCELLED, answered, failed, fingerprint
from tests.support.waiting import until

OWNER = Identity("crm", "p-1")
ITEM = Identity("crm", "p-1#parts~0a1b2c3d.1")
SHORT_S = 0.3


async def held(store: Store, identity: Identity, *, item_of: str = "", **of: Any) -> Held:
    found = await store.claim(identity, fingerprint(**of))
    assert isinstance(found, Granted), found
    return Held(identity, found.token, item_of)


async def test_endings_tell_how_requests_ended_without_their_bytes(store: Store) -> None:
    of = {name: Identity("crm", name) for name in ("ok", "bad", "cancelled", "told", "waits", "runs", "unknown")}
    for name, completion in (("ok", answered("12345")), ("bad", failed("poison", ended_ms=7))):
        token = (await held(store, of[name])).token
        await store.complete(of[name], fingerprint(), completion, token=token)
    await store.cancel(of["cancelled"], CANCELLED)
    await held(store, of["told"])
    await store.cancel(of["told"], CANCELLED)
    await store.defer(of["waits"], due_ms=1, keep_until_ms=round(time.time() * 1000) + 60_000)
    await held(store, of["runs"])

    found = await store.endings([*of.values(), Identity("other", "ok")])

    assert found == [
        Ending("ok", "", 1000, 5),
        Ending("error", "poison", 7, len(failed().body)),
        Ending("error", "cancelled", CANCELLED.ended_ms, len(CANCELLED.body)),
        Ending(is_cancelled=True),
        Ending(),
        Ending(is_running=True),
        None,
        None,
    ]


async def test_endings_of_more_requests_than_one_look_reads(store: Store) -> None:
    last = Identity("crm", "449")
    await store.cancel(last, CANCELLED)

    found = await store.endings([Identity("crm", str(each)) for each in range(450)])

    assert len(found) == 450
    assert [at for at, each in enumerate(found) if each is not None] == [449]


async def test_an_item_is_stopped_when_its_pipeline_has_ended_or_is_cancelled(store: Store) -> None:
    item, own = await held(store, ITEM, item_of=OWNER.id), await held(store, Identity("crm", "own"))
    other = await held(store, Identity("crm", "p-2#parts~0a1b2c3d.1"), item_of="p-2")
    assert await store.renew([item, own, other]) == {}, "no worker has seen its pipeline"

    owner = await held(store, OWNER)
    assert await store.renew([item, own, other]) == {}, "it runs"

    await store.cancel(OWNER, CANCELLED)
    assert await store.renew([item, own, other]) == {item: Stop.CANCELLED}, "it is being cancelled"

    await store.complete(OWNER, fingerprint(), CANCELLED, token=owner.token)
    assert await store.renew([other, own, item]) == {item: Stop.CANCELLED}, "it has ended"

    await store.claim(ITEM, fingerprint(redelivered=True))
    assert await store.renew([item]) == {item: Stop.FENCED}, "another worker has the item"


@pytest.mark.slow
async def test_what_a_pipeline_needs_is_kept_longer_than_results(opened: Opened) -> None:
    store = await opened(keep_s=SHORT_S, lease_s=SHORT_S)
    deadline_ms = round(time.time() * 1000) + 60_000
    plain = Identity("crm", "plain")
    kept = {name: Identity("crm", f"p-1#parts~0a1b2c3d.{name}") for name in ("claimed", "released", "ended", "at once")}
    of_flow = fingerprint(keep_until_ms=deadline_ms)

    async def claimed(identity: Identity) -> Held:
        found = await store.claim(identity, of_flow)
        assert isinstance(found, Granted)
        return Held(identity, found.token)

    waiting = await claimed(kept["claimed"])
    await store.renew([waiting])
    await store.release(await claimed(kept["released"]), attempts=1)
    await store.complete(kept["ended"], of_flow, answered(), token=(await claimed(kept["ended"])).token)
    await store.complete(kept["at once"], of_flow, answered(), token=None)
    await store.complete(plain, fingerprint(), answered(), token=(await held(store, plain)).token)

    async def is_forgotten() -> bool:
        while await store.sweep():
            pass
        return await store.find(plain) is None

    await until(is_forgotten, within_s=10)
    await asyncio.sleep(SHORT_S)  # longer than the lease
    await store.sweep()
    found = dict(zip(kept, await store.endings(list(kept.values())), strict=True))

    assert all(found.values()), found
    ok = Ending("ok", "", 1000, len(answered().body))
    assert found == {"claimed": Ending(), "released": Ending(), "ended": ok, "at once": ok}


@pytest.mark.slow
async def test_a_full_store_takes_what_a_running_pipeline_needs_last(opened: Opened) -> None:
    store = await opened(max_bytes=600_000)
    runs, over = Identity("crm", "runs"), Identity("crm", "over")
    await held(store, runs)
    await store.complete(over, fingerprint(), answered(), token=(await held(store, over)).token)

    async def end(id: str) -> Identity:
        identity = Identity("crm", id)
        completion = Completion(status="ok", body=b"x" * 3000, headers={"x-lane-attempt": 1}, ended_ms=1)
        await store.complete(identity, fingerprint(), completion, token=None)
        return identity

    needed = [await end(f"{runs.id}#parts~0a1b2c3d.{each}") for each in range(60)]
    others = [await end(f"{over.id}#parts~0a1b2c3d.{each}") for each in range(60)]
    others += [await end(f"plain-{each}") for each in range(300)]
    while await store.sweep():
        pass

    assert all(await store.endings(needed))
    assert None in await store.endings(others)


@pytest.mark.slow
async def test_a_pipeline_that_needs_more_than_the_store_has_loses_the_oldest(opened: Opened) -> None:
    store = await opened(max_bytes=StoreSpec().max_bytes)
    small = await opened(max_bytes=400_000)
    await held(store, OWNER)
    items = [Identity("crm", f"{OWNER.id}#parts~0a1b2c3d.{each}") for each in range(400)]
    for each in items:
        completion = Completion(status="ok", body=b"x" * 3000, headers={"x-lane-attempt": 1}, ended_ms=1)
        await store.complete(each, fingerprint(), completion, token=None)
    while await small.sweep():
        pass

    found = await store.endings(items)
    assert found.count(None) > 0
    assert found[-1] is not None
