"""Claims and completions that one statement writes: each gets what it would have got by itself."""

import asyncio
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from consumers.state.base import Completion, Conflict, Ended, Granted, Held, Identity, Running, Stop
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.clock import Clock
from consumers.state.sqlite.file import SCHEMA
from consumers.state.sqlite.requests import Requests
from consumers.state.sqlite.rows import Times
from consumers.state.sqlite.store import SqliteStore
from tests.support.completions import ME, answered, failed, fingerprint
from tests.support.examples import examples

IDS = [Identity(tenant, id) for tenant in ("", "tenant") for id in ("a", "b", "c")]
Apply = Callable[[Requests, Times], object]


class Standing(Clock):
    """Stands still between two groups."""

    ms = 1_000_000

    @override
    def since_boot_ms(self) -> int:
        return self.ms

    @override
    def since_1970_ms(self) -> int:
        return self.ms


def a_claim(store: SqliteStore, rng: random.Random) -> tuple[int, Any, Apply]:
    me = rng.choice(IDS)
    mine = fingerprint(
        body=rng.choice(["body", "body", "other"]),
        mark=rng.choice(["mark", "again"]),
        redelivered=rng.random() < 0.3,
        nonce=rng.choice([b"", b"12345678", b"87654321"]),
    )
    return 0, store.claim(me, mine), lambda requests, at: requests.claim(at, me, mine)


def a_completion(store: SqliteStore, rng: random.Random, tokens: list[int]) -> tuple[int, Any, Apply]:
    me, mine, ending = rng.choice(IDS), fingerprint(), rng.choice([answered("a"), answered("b"), failed()])
    token = rng.choice(tokens)
    return (
        1,
        store.complete(me, mine, ending, token=token),
        lambda requests, at: requests.complete(at, me, mine, ending, token),
    )


def another(store: SqliteStore, rng: random.Random, tokens: list[int]) -> tuple[Any, Apply]:
    me, ending = rng.choice(IDS), failed("cancelled")
    held = Held(me, rng.choice(tokens))
    match rng.randrange(3):
        case 0:
            return store.cancel(me, ending), lambda requests, at: requests.cancel(at, me, ending)
        case 1:
            return store.release(held, attempts=1), lambda requests, at: requests.release(at, held, 1)
        case _:
            return store.find(me), lambda requests, at: requests.find(at, me)


@pytest.mark.parametrize("seed", range(examples(20)))
async def test_each_gets_what_it_would_have_got_by_itself(tmp_path: Path, seed: int) -> None:
    rng, clock = random.Random(seed), Standing()
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(SCHEMA)
    alone = Requests(connection, StoreSpec())
    tokens = [clock.ms]
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane", clock=clock) as store:
        for _ in range(40):
            clock.ms += rng.choice([1, 400, 11_000])
            group = [a_claim(store, rng) for _ in range(rng.randrange(5))]
            group += [a_completion(store, rng, tokens) for _ in range(rng.randrange(4))]
            rng.shuffle(group)
            found = await asyncio.gather(*(asked for _, asked, _ in group))
            at = Times(now=clock.ms, today=clock.ms)
            by_kind = sorted(range(len(group)), key=lambda each: group[each][0])  # claims first
            expected = {each: group[each][2](alone, at) for each in by_kind}
            assert found == [expected[each] for each in range(len(group))]
            asked, apply = another(store, rng, tokens)
            assert await asked == apply(alone, at)
            tokens = [each.token for each in found if isinstance(each, Granted)][-3:] or tokens
        assert [await store.find(each) for each in IDS] == [alone.find(at, each) for each in IDS]


async def test_the_same_request_twice_in_one_transaction_is_granted_once(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        found = await asyncio.gather(*(store.claim(ME, fingerprint(mark=str(each))) for each in range(3)))
    assert [type(each) for each in found] == [Granted, Running, Running]


async def test_among_many_renewals_those_that_must_stop_are_returned(tmp_path: Path) -> None:
    clock = Standing()
    ids = [Identity("", str(each)) for each in range(45)]
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane", clock=clock) as store:
        claims = await asyncio.gather(*(store.claim(each, fingerprint()) for each in ids))
        held = [Held(me, each.token) for me, each in zip(ids, claims, strict=True) if isinstance(each, Granted)]
        forgotten = Held(Identity("", "forgotten"), 7)
        assert await store.renew([*held, forgotten]) == {}
        await store.claim(ids[3], fingerprint(redelivered=True))
        await store.cancel(ids[40], failed("cancelled"))
        clock.ms += 9_000
        found = await store.renew([*held, forgotten])
        clock.ms += 9_000
        running = [one is not None and one.running for one in [await store.find(each) for each in ids]]

    assert found == {held[3]: Stop.FENCED, held[40]: Stop.CANCELLED}
    assert [each for each in range(45) if not running[each]] == [3], "the claim that took over was not renewed"


async def test_among_many_claims_only_those_of_known_requests_are_not_granted(tmp_path: Path) -> None:
    ids = [Identity("", str(each)) for each in range(100)]
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        for each in ids[::10]:
            await store.complete(each, fingerprint(), answered(each.id), token=None)
        found = await asyncio.gather(*(store.claim(each, fingerprint()) for each in ids))
    for each, claim in zip(ids, found, strict=True):
        if each in ids[::10]:
            assert claim == Ended(completion=answered(each.id), is_same_message=True)
        else:
            assert isinstance(claim, Granted)


async def test_one_that_cannot_be_kept_fails_alone(tmp_path: Path) -> None:
    ids = [Identity("", str(each)) for each in range(40)]
    ids[7] = Identity("", "\ud800")
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        claims = await asyncio.gather(*(store.claim(each, fingerprint()) for each in ids), return_exceptions=True)
        ends = [answered("x") if each != 9 else answered("x", ended_ms=2**70) for each in range(40)]
        asked = [
            store.complete(me, fingerprint(), end, token=claim.token)
            for me, claim, end in zip(ids, claims, ends, strict=True)
            if isinstance(claim, Granted)
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        kept = [await store.find(each) for each in ids if each is not ids[7]]

    assert [each for each in range(40) if not isinstance(claims[each], Granted)] == [7]
    assert isinstance(claims[7], UnicodeEncodeError)
    assert [each for each in range(39) if not isinstance(found[each], Completion)] == [8]
    assert isinstance(found[8], OverflowError)
    assert [each for each in range(39) if (one := kept[each]) is None or one.completion is None] == [8]


async def test_a_claim_that_was_forgotten_is_completed(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        assert await store.complete(ME, fingerprint(), answered(), token=7) == answered()
        assert await store.claim(ME, fingerprint(body="other")) == Conflict()
        assert isinstance(await store.claim(ME, fingerprint()), Ended)
