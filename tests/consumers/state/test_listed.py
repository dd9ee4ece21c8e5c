"""Lists of the requests of all tenants."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from consumers.state.base import Fingerprint, Granted, Held, Identity, InGroup, Labels, RequestFilter, RequestState
from consumers.state.groups import GroupPlace
from consumers.state.store import Store
from tests.consumers.state.conftest import Opened
from tests.support.completions import answered, failed, fingerprint
from tests.support.waiting import until


def message(lane: str = "normal", app: str = "web", model: str = "haiku", **given: Any) -> Fingerprint:
    return replace(fingerprint(nonce=b"q1234567"), labels=Labels(lane, app, model), **given)


async def run(store: Store, identity: Identity, of: Fingerprint, ending: Any = None) -> Held:
    found = await store.claim(identity, of)
    assert isinstance(found, Granted)
    if ending is not None:
        await store.complete(identity, of, ending, token=found.token)
    return Held(identity, found.token)


async def ids(store: Store, most: int = 100, **wanted: Any) -> set[str]:
    given: dict[str, Any] = {
        name: frozenset(value) if isinstance(value, set) else value for name, value in wanted.items()
    }
    page = await store.listed(RequestFilter(**given), most=most)
    return {each.identity.id for each in page.requests}


async def test_requests_of_all_tenants_are_found_by_each_of_their_properties(store: Store) -> None:
    await run(store, Identity("crm", "a"), message(), answered())
    await run(store, Identity("crm", "b"), message(lane="batch"), replace(failed(), cause="0a1b2c3d"))
    await run(store, Identity("the shop", "c"), message(app="night job", model="a\tb"))
    released = await run(store, Identity("crm", "d"), message(group=InGroup("g1")))
    await store.release(released)
    await store.defer(Identity("crm", "e"), due_ms=5, keep_until_ms=LATE_MS, labels=Labels("batch", "web", "haiku"))
    await store.cancel(Identity("crm", "e"), failed("cancelled"))
    await run(store, Identity("crm", "d#step"), message())
    await store.join("crm", InGroup("g2", key="critical.bulk.message"), ["f"], keep_until_ms=LATE_MS)

    assert await ids(store) == {"a", "b", "c", "d", "e", "f"}, "the step of a pipeline is no request of its own"
    assert await ids(store, tenants={"the shop"}) == {"c"}
    assert await ids(store, lanes={"batch"}) == {"b", "e"}
    assert await ids(store, lanes={"batch", "normal"}, states={RequestState.COMPLETED}) == {"a"}
    assert await ids(store, apps={"night job"}) == {"c"}
    assert await ids(store, models={"ä"}) == {"a"}, "the model that answered"
    assert await ids(store, models={"haiku"}) == {"b", "d", "e"}
    assert await ids(store, codes={"attempts_exhausted"}) == await ids(store, causes={"0a1b2c3d"}) == {"b"}
    assert await ids(store, groups={"g1"}) == {"d"}
    assert await ids(store, lanes={"critical"}, apps={"bulk"}, states={RequestState.WAITING}) == {"f"}
    states = [RequestState.COMPLETED, RequestState.FAILED, RequestState.RUNNING, RequestState.WAITING]
    for id, state in zip("abcd", states, strict=True):
        assert await ids(store, states={state}) - {"f"} == {id}
    assert await ids(store, states={RequestState.CANCELLED}) == {"e"}
    assert await ids(store, tenants={"crm"}, lanes={"normal"}, states={RequestState.FAILED}) == set()


async def test_pages_show_each_request_once_the_newest_first_also_if_many_came_in_one_millisecond(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ("redis.store", "sqlite.tables"):
        monkeypatch.setattr(f"consumers.state.{engine}.LOOKED_AT", 7)
    store: Any = await opened()
    all = {f"r{n:02}" for n in range(60)}
    await asyncio.gather(*(run(store, Identity("t", id), message()) for id in all))
    found: list[Any] = []
    after = None
    while True:
        page = await store.listed(RequestFilter(lanes=frozenset({"normal"})), most=8, after=after)
        found += page.requests
        if (after := page.next) is None:
            break
    assert sorted(each.identity.id for each in found) == sorted(all)
    assert [each.seen_ms for each in found] == sorted((each.seen_ms for each in found), reverse=True)
    middle = found[30].seen_ms
    assert await ids(store, since_ms=middle) == {each.identity.id for each in found if each.seen_ms >= middle}
    assert await ids(store, until_ms=middle) == {each.identity.id for each in found if each.seen_ms < middle}


async def test_a_request_that_is_kept_no_longer_leaves_the_list(opened: Opened) -> None:
    store: Any = await opened(keep_s=0.1, lease_s=0.1)
    await run(store, Identity("t", "a"), message(), answered())

    async def has_left() -> bool:
        await store.sweep()
        return await ids(store) == set()

    await until(has_left)


async def test_a_place_that_no_page_has_named_is_refused(store: Store) -> None:
    for place in ("", "x", "[1]", "1.x", "null", "1", "1.2.3", "1.-5", f"1.{2**64}", f"{2**64}.1"):
        with pytest.raises(ValueError):
            await store.listed(RequestFilter(), most=1, after=place)
    for place in ("x.t.g", "-5.t.g", f"{2**64}.t.g"):
        with pytest.raises(ValueError):
            GroupPlace.of(place)
    assert store.trouble is None


LATE_MS = 4_000_000_000_000
