"""An answer that is too large for a message is kept beside the broker, or ends the request if that cannot be done."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from consumers.outcomes import Answered, Buried
from consumers.replies import sendable
from consumers.replies.sendable import Sendable
from lanekeeper.bodies import BodyStore
from lanekeeper.contract.messages import BodyAddress
from tests.support.jobs import FakePublisher
from tests.support.waiting import until

LARGE = Answered(body=b'{"text": "%b"}' % (b"x" * 100), model="m", provider="p")


class Hangs(BodyStore):
    """A store on a file system that does not answer."""

    @override
    async def keep_answer(self, body: bytes, *, for_s: float) -> BodyAddress:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sendable, "SOON_S", 0.05)
    monkeypatch.setattr(sendable, "KEEP_WITHIN_S", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BodyStore]:
    made = BodyStore(f"file://{tmp_path}/bodies", in_all_bytes=10_000)
    yield made
    made.close()


def of(publisher: FakePublisher, bodies: BodyStore | None, *, answer_bytes: int = 1000) -> Sendable:
    return Sendable(publisher, answer_bytes=answer_bytes, bodies=bodies, over_bytes=100)


async def test_a_large_answer_is_kept_and_its_place_is_told(store: BodyStore) -> None:
    found = await of(FakePublisher([]), store).of(LARGE)

    assert isinstance(found, Answered)
    assert found.kept is not None
    assert await store.fetch(found.kept) == LARGE.body
    assert json.loads(found.body) == {
        "type": "urn:lanekeeper:body",
        "address": found.kept.address,
        "sha256": found.kept.sha256,
        "bytes": len(LARGE.body),
    }


async def test_a_small_one_stays_as_it_is(store: BodyStore) -> None:
    small = Answered(body=b"{}", model="m", provider="p")
    assert await of(FakePublisher([]), store).of(small) is small


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["hangs", "full"])
async def test_without_its_store_it_is_sent_as_it_is_if_the_broker_takes_it(store: BodyStore, kind: str) -> None:
    broken = Hangs(store.url) if kind == "hangs" else BodyStore(store.url, in_all_bytes=10)
    assert await of(FakePublisher([]), broken).of(LARGE) is LARGE
    broken.close()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["hangs", "full"])
async def test_if_the_broker_does_not_take_it_either_the_request_ends_as_too_large(store: BodyStore, kind: str) -> None:
    broken = Hangs(store.url) if kind == "hangs" else BodyStore(store.url, in_all_bytes=10)
    publisher = FakePublisher([])
    publisher.largest = 50

    found = await of(publisher, broken).of(LARGE)

    assert isinstance(found, Buried)
    assert (found.problem.code, "could not be used" in found.problem.detail) == ("answer_too_large", True)
    broken.close()


async def test_the_error_names_the_setting_that_allows_more(store: BodyStore) -> None:
    publisher = FakePublisher([])
    publisher.largest = 50
    nowhere = await of(publisher, None).of(LARGE)
    too_much = await of(FakePublisher([]), store, answer_bytes=50).of(LARGE)

    assert isinstance(nowhere, Buried)
    assert isinstance(too_much, Buried)
    assert "LANEKEEPER_BODIES__URL" in nowhere.problem.detail
    assert "LANEKEEPER_RESULTS__ANSWER_BYTES" in too_much.problem.detail


async def test_an_answer_that_is_not_the_valid_one_is_removed(store: BodyStore, tmp_path: Path) -> None:
    making = of(FakePublisher([]), store)
    found = await making.of(LARGE)
    assert len(list((tmp_path / "bodies").iterdir())) == 1
    making.forget(found)
    await until(lambda: not list((tmp_path / "bodies").iterdir()))


async def test_an_answer_is_kept_an_hour_longer_than_its_result(
    store: BodyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_s: list[float] = []

    async def keep_answer(body: bytes, *, for_s: float) -> BodyAddress:
        kept_s.append(for_s)
        return BodyAddress("file:///answer", "0" * 64)

    monkeypatch.setattr(store, "keep_answer", keep_answer)
    await Sendable(FakePublisher([]), bodies=store, over_bytes=1, keep_s=86_400).of(LARGE)

    assert kept_s == [86_400 + 3_600]
