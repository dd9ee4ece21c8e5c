"""What a full store removes, for any sequence of operations: the counts are those of the rows, the store comes below
its limit, and no tenant below its share loses anything."""

import asyncio
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from consumers.state.base import QUEUED, Granted, Held, Identity, NewEntry, StoreSpec, StoreUnavailable, Submission
from consumers.state.decisions import Times
from consumers.state.redis.store import RedisStore
from consumers.state.shedding import RowKind, Share, cuts
from consumers.state.sqlite.store import SqliteStore
from consumers.state.sqlite.tables import Tables
from tests.support.completions import CANCELLED, answered, failed, fingerprint, untried
from tests.support.examples import examples
from tests.support.redis import RedisServer

pytestmark = pytest.mark.slow

MAX_BYTES = 400_000
EMPTY_BYTES = 100_000
"""More than an SQLite file takes without any row."""
tenants = st.sampled_from(["a", "b", "c", "d"])
shares = st.dictionaries(st.tuples(tenants, st.sampled_from(RowKind)), st.integers(1, 1000), max_size=12)


@given(used=shares, at_most=st.integers(0, 5000))
@example(used={("a", RowKind.PAID): 10, ("b", RowKind.PAID): 100}, at_most=60)
def test_cuts_reach_the_aim_and_spare_who_is_below_an_equal_share(used: dict[Share, int], at_most: int) -> None:
    cut = dict(cuts(used, at_most))
    total, kept = Counter[str](), Counter[str]()
    for (tenant, kind), size in used.items():
        total[tenant] += size
        kept[tenant] += size if kind is RowKind.KEPT else 0
    left = {tenant: size - sum(by for (of, _), by in cut.items() if of == tenant) for tenant, size in total.items()}

    assert all(kind is not RowKind.KEPT and 0 < by <= used[tenant, kind] for (tenant, kind), by in cut.items())
    assert all(left[tenant] == total[tenant] for tenant in total if total[tenant] <= at_most / len(total))
    if total.total() <= at_most:
        assert cut == {}
    else:
        assert sum(max(0.0, left[tenant] - kept[tenant]) for tenant in left) <= at_most + 0.001
    losers = {tenant for tenant, _ in cut}
    for tenant in losers:  # who lost something still has no less than who lost nothing
        assert all(left[tenant] >= left[other] - 0.001 for other in set(left) - losers if not kept[other])


class Storing:
    """Performs operations on one store; `known` has the ids that each tenant may have rows of."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._count = 0
        self.known: set[Identity] = set()

    async def some(self, tenant: str, kind: str, count: int, size: int) -> None:
        for _ in range(count):
            self._count += 1
            await self._one(kind, identity := Identity(tenant, str(self._count)), size)
            self.known.add(identity)

    async def _one(self, kind: str, identity: Identity, size: int) -> None:
        late_ms = time.time_ns() // 1_000_000 + 10_000_000
        store = self._store
        match kind:
            case "answered":
                await store.complete(identity, fingerprint(), answered("x" * size), token=None)
            case "untried":
                await store.complete(identity, fingerprint(), untried(size=size), token=None)
            case "refused":
                await store.note(identity, failed())
            case "deferred" | "deferred and cancelled":
                await store.defer(identity, due_ms=late_ms, keep_until_ms=late_ms)
                if kind != "deferred":
                    await store.cancel(identity, CANCELLED)
            case "cancelled":
                await store.cancel(identity, CANCELLED)
            case "submitted":
                submission = Submission(body_hash=b"h", lane="batch", submitted_ms=1, due_ms=None, deadline_ms=2)
                first = NewEntry(QUEUED, b"x" * size)
                await store.follow(identity, submission, first_entry=first, keep_until_ms=late_ms)
            case "counted":
                await store.reserve(identity, fingerprint(), weight=2, until_ms=late_ms)
            case _:
                claim = await store.claim(identity, fingerprint())
                assert isinstance(claim, Granted)
                if kind == "released":
                    await store.release(Held(identity, claim.token), attempts=1)

    async def found(self) -> set[Identity]:
        return {each for each in self.known if await self._store.find(each) is not None}


steps = st.tuples(
    tenants,
    st.sampled_from(
        [
            "answered",
            "untried",
            "refused",
            "deferred",
            "deferred and cancelled",
            "cancelled",
            "submitted",
            "counted",
            "claimed",
            "released",
        ]
    ),
    st.integers(1, 60),
    st.sampled_from([10, 1_000, 9_000]),
)


async def swept(played: list[tuple[str, str, int, int]], store: Any, used: Any) -> None:
    """Perform the operations, and sweep; then check what holds for both engines."""
    storing = Storing(store)
    for step in played:
        await storing.some(*step)
    before, sizes = await storing.found(), _of_tenants(await used())
    while await store.sweep():
        pass
    after = await storing.found()

    share = (MAX_BYTES - EMPTY_BYTES) / 2 / max(1, len(sizes))
    assert [each for each in before - after if sizes[each.tenant] <= share] == []


def _of_tenants(used: Mapping[Share, int]) -> Counter[str]:
    found = Counter[str]()
    for (tenant, _), size in used.items():
        found[tenant] += size
    return found


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(played=st.lists(steps, max_size=12))
@example(played=[("a", "submitted", 35, 9000)])
@example(played=[("a", "submitted", 60, 1000)])
def test_a_full_sqlite_file_comes_below_its_limit_and_no_tenant_below_its_share_loses_anything(
    tmp_path: Path, played: list[tuple[str, str, int, int]]
) -> None:
    path = tmp_path / f"{secrets.token_hex(4)}.sqlite"

    async def run() -> None:
        async with SqliteStore(path, namespace="lane", spec=StoreSpec(max_bytes=MAX_BYTES)) as store:

            async def used() -> dict[Share, int]:
                with closing(sqlite3.connect(path)) as looked:
                    return Tables(looked, StoreSpec()).used_by_share(store._clock.times())

            await swept(played, store, used)
            removable = {kind for _, kind in await used()} - {RowKind.KEPT}
            with closing(sqlite3.connect(path)) as looked:
                assert Tables(looked, StoreSpec()).used_bytes() <= MAX_BYTES or not removable

    asyncio.run(run())


async def full_file(path: Path) -> SqliteStore:
    """With 32 results of the same size, by a byte above its limit."""
    async with SqliteStore(path, namespace="lane") as store:
        for number in range(32):
            id = Identity("flood", f"{number:02}")
            await store.complete(id, fingerprint(), answered("x" * 8000, ended_ms=number), token=None)
        used = await store.transact("look", lambda tables, _: tables.used_bytes())
    return SqliteStore(path, namespace="lane", spec=StoreSpec(max_bytes=used - 1))


async def test_what_a_full_file_loses_is_chosen_at_one_moment_and_in_bounded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Tables.used_by_share

    def used_by_share(tables: Tables, at: Times) -> dict[Share, int]:
        found = measured(tables, at)
        with closing(sqlite3.connect(tmp_path / "lane.sqlite")) as other:
            other.execute("DELETE FROM request WHERE id < '05'")
            other.commit()
        return found

    monkeypatch.setattr("consumers.state.sqlite.tables.SURPLUS_ROWS", 3)
    async with await full_file(tmp_path / "other.sqlite") as store:
        assert await store.sweep() == 3, "so many are looked for at once"
    monkeypatch.setattr(Tables, "used_by_share", used_by_share)
    async with await full_file(tmp_path / "lane.sqlite") as store:
        assert await store.sweep() == 0, "another process has removed the oldest meanwhile"


async def test_a_store_that_is_closed_does_not_wait_for_what_it_looks_for_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Event()

    def surplus(tables: Tables, _: int) -> None:
        tables.connection.create_function("looks", 0, looks.set)  # called by the statement, so that it runs already
        endless = "WITH RECURSIVE n(x) AS (SELECT looks() UNION ALL SELECT x FROM n) SELECT count(*) FROM n"
        tables.connection.execute(endless)

    monkeypatch.setattr(Tables, "surplus", surplus)
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        sweep = asyncio.create_task(store.sweep())
        await asyncio.to_thread(looks.wait)
    with pytest.raises(StoreUnavailable, match="interrupted"):
        await sweep


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(played=st.lists(steps, max_size=8))
def test_a_full_redis_comes_below_its_limit_and_no_tenant_below_its_share_loses_anything(
    redis: RedisServer, played: list[tuple[str, str, int, int]]
) -> None:
    async def run() -> None:
        namespace = f"shed-{secrets.token_hex(4)}"
        spec = StoreSpec(max_bytes=MAX_BYTES, cancelled_s=60, keep_s=60)
        async with RedisStore(redis.url, namespace=namespace, spec=spec) as store:
            await swept(played, store, store._used_by_share)
            used = await store._used_by_share()
            assert sum(used.values()) <= MAX_BYTES or {kind for _, kind in used} == {RowKind.KEPT}
            redis_client: Any = store._client._redis
            async for key in redis_client.scan_iter(match=f"{namespace}:unseen:*"):
                for member in await redis_client.zrange(key, 0, -1):  # every counted cancellation has its row
                    assert await store.find(Identity(key.decode().rpartition(":")[2], member.decode())) is not None

    asyncio.run(run())
