"""Both engines make the same decisions, and never keep two completions of one request, for any sequence of
operations."""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.state.base import Completion, Ended, Fingerprint, Granted, Held, Identity, Running
from consumers.state.redis.store import RedisStore
from consumers.state.store import Store
from tests.support.completions import CANCELLED, answered, failed, fingerprint
from tests.support.examples import examples
from tests.support.memory_store import MemoryStore
from tests.support.redis import RedisServer

LATE_MS = 4_000_000_000_000
"""Later than any clock."""
IDS = [Identity("tenant", "a"), Identity("tenant", "b")]
identities = st.sampled_from(IDS)
copies = st.builds(
    fingerprint,
    st.sampled_from(["body", "other"]),
    st.sampled_from(["mark", "mark 2"]),
    redelivered=st.booleans(),
    nonce=st.sampled_from([b"", b"q1", b"q2", b"s1"]),
    dead_at_ms=st.sampled_from([None, 100, 200]),
)
endings = st.sampled_from(
    [answered(ended_ms=100), failed(ended_ms=100), failed("poison", ended_ms=200), failed("cancelled", ended_ms=200)]
)
nth = st.integers(0, 3)
"""One of the granted claims, counted from the last."""
due = st.integers(1_790_000_000_000, 1_790_000_001_000)
steps = st.one_of(
    st.tuples(st.just("claim"), identities, copies),
    st.tuples(st.just("complete"), identities, copies, endings, nth),
    st.tuples(st.just("end"), identities, copies, endings),
    st.tuples(st.just("renew"), identities, nth),
    st.tuples(st.just("release"), identities, nth, due, st.booleans()),
    st.tuples(st.just("shelter"), identities, nth),
    st.tuples(st.just("note_waiting"), identities, nth, st.booleans()),
    st.tuples(st.just("defer"), identities, due),
    st.tuples(st.just("note"), identities, endings),
    st.tuples(st.just("cancel"), identities),
    st.tuples(st.just("find"), identities),
    st.tuples(st.just("endings"), identities),
)


class Player:
    """Performs operations on one store, and describes the results independently of the engine's clock."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._tokens: dict[Identity, list[int]] = {each: [] for each in IDS}

    async def play(self, name: str, identity: Identity, *values: Any) -> object:
        step: Callable[..., Awaitable[object]] = getattr(self, f"_{name}")
        return await step(identity, *values)

    async def _claim(self, identity: Identity, of: Fingerprint) -> object:
        found = await self._store.claim(identity, of)
        if isinstance(found, Granted):
            tokens = self._tokens[identity]
            assert all(found.token > each for each in tokens if not of.nonce or each != found.token)
            if found.token not in tokens:
                tokens.append(found.token)
            return found.deaths
        return type(found) if isinstance(found, Running) else found

    async def _complete(self, identity: Identity, of: Fingerprint, ending: Completion, which: int) -> object:
        held = self._held(identity, which)
        return held and await self._store.complete(identity, of, ending, token=held.token)

    async def _end(self, identity: Identity, of: Fingerprint, ending: Completion) -> object:
        return await self._store.complete(identity, of, ending, token=None)

    async def _renew(self, identity: Identity, which: int) -> object:
        held = self._held(identity, which)
        return held and list((await self._store.renew([held])).values())

    async def _release(self, identity: Identity, which: int, due_ms: int, is_survived: bool) -> None:
        if held := self._held(identity, which):
            await self._store.release(held, attempts=which, due_ms=due_ms, is_survived=is_survived)

    async def _shelter(self, identity: Identity, which: int) -> None:
        if held := self._held(identity, which):
            await self._store.shelter(held)

    async def _note_waiting(self, identity: Identity, which: int, is_waiting: bool) -> None:
        if held := self._held(identity, which):
            await self._store.note_waiting(held, is_waiting=is_waiting)

    async def _defer(self, identity: Identity, due_ms: int) -> None:
        await self._store.defer(identity, due_ms=due_ms, keep_until_ms=LATE_MS)

    async def _note(self, identity: Identity, ending: Completion) -> None:
        await self._store.note(identity, ending)

    async def _cancel(self, identity: Identity) -> object:
        return await self._store.cancel(identity, CANCELLED)

    async def _find(self, identity: Identity) -> object:
        return await self._store.find(identity)

    async def _endings(self, identity: Identity) -> object:
        return await self._store.endings([identity])

    def _held(self, identity: Identity, which: int) -> Held | None:
        tokens = self._tokens[identity]
        return Held(identity, tokens[-1 - which]) if which < len(tokens) else None


def in_turn(store: Store | MemoryStore, played: list[tuple[Any, ...]]) -> Callable[[], Awaitable[list[object]]]:
    async def run() -> list[object]:
        player = Player(store)
        return [await player.play(*step) for step in played]

    return run


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(played=st.lists(steps, max_size=25))
def test_sqlite_and_redis_make_the_same_decisions(redis: RedisServer, played: list[tuple[Any, ...]]) -> None:
    async def both() -> tuple[list[object], list[object]]:
        async with RedisStore(redis.url, namespace=f"same-{secrets.token_hex(6)}") as shared:
            return await in_turn(MemoryStore(), played)(), await in_turn(shared, played)()

    embedded, shared = asyncio.run(both())

    for step, one, other in zip(played, embedded, shared, strict=True):
        assert one == other, step


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(played=st.lists(steps.filter(lambda step: step[0] != "note"), max_size=30))
def test_a_stored_completion_changes_only_if_its_dead_letter_runs_again(played: list[tuple[Any, ...]]) -> None:
    store = MemoryStore()

    async def run() -> None:
        player = Player(store)
        kept: dict[Identity, Completion] = {}
        for step in played:
            found = await player.play(*step)
            for identity in IDS:
                now = await store.find(identity)
                ended = None if now is None else now.completion
                before = kept.get(identity)
                if ended != before and before is not None:
                    of = next(value for value in step if isinstance(value, Fingerprint))
                    assert before.status == "error"
                    assert of.dead_at_ms == before.ended_ms
                if ended is None:
                    kept.pop(identity, None)
                else:
                    kept[identity] = ended
            if isinstance(found, Ended):
                assert kept[step[1]] == found.completion

    asyncio.run(run())


async def test_of_several_completions_only_one_is_kept(redis: RedisServer) -> None:
    counter = itertools.count()
    async with RedisStore(redis.url, namespace=f"one-{secrets.token_hex(6)}") as store:
        ends = await asyncio.gather(
            *(store.complete(IDS[0], fingerprint(), answered(str(next(counter))), token=None) for _ in range(50))
        )

    assert ends == [ends[0]] * 50
