"""Bodies beside the broker: from which stores they are read, and which are removed when a request has ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from consumers.bodies.fetching import Fetching
from lanekeeper.bodies import BodyError, BodyStore, BodyTooLarge
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import BodyAddress, Message


@pytest.fixture
def own(tmp_path: Path) -> Iterator[BodyStore]:
    store = BodyStore(f"file://{tmp_path}/own")
    yield store
    store.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[BodyStore]:
    store = BodyStore(f"file://{tmp_path}/other")
    yield store
    store.close()


def naming(kept: BodyAddress) -> Message:
    return Message(body=b"", message_id="m-1", headers={n.BODY: kept.address, n.BODY_SHA256: kept.sha256})


async def test_a_body_is_fetched_from_the_store_that_has_its_address(own: BodyStore, other: BodyStore) -> None:
    fetching = Fetching(own, others=[other], most_bytes=10)
    for store in (own, other):
        assert await fetching.fetch(await store.keep([b"12345", b"67890"])) == b"1234567890"
        with pytest.raises(BodyTooLarge):
            await fetching.fetch(await store.keep([b"12345678901"]))


async def test_a_body_at_another_address_is_refused(own: BodyStore, other: BodyStore) -> None:
    with pytest.raises(BodyError, match="LANEKEEPER_BODIES__ALLOW"):
        await Fetching(own, most_bytes=10).fetch(await other.keep([b"{}"]))
    with pytest.raises(BodyError, match="LANEKEEPER_BODIES__ALLOW"):
        await Fetching(None, most_bytes=10).fetch(await own.keep([b"{}"]))


async def test_when_its_request_has_ended_a_body_is_removed_from_the_own_store_only(
    own: BodyStore, other: BodyStore
) -> None:
    fetching = Fetching(own, others=[other], most_bytes=10)
    mine, theirs = await own.keep([b"{}"]), await other.keep([b"{}"])
    for each in (mine, theirs):
        fetching.forget(naming(each))
    fetching.forget(Message(body=b"{}"))
    await fetching._background.finish(within_s=10)

    with pytest.raises(BodyError):
        await fetching.fetch(mine)
    assert await fetching.fetch(theirs) == b"{}"


async def test_closing_closes_every_store(own: BodyStore, other: BodyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[BodyStore] = []
    monkeypatch.setattr(BodyStore, "close", lambda self: closed.append(self))
    await Fetching(own, others=[other], most_bytes=10).aclose(within_s=1)
    assert closed == [own, other]
