"""A client of a broker, without a broker."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock, patch

import pytest

from lanekeeper import ClientMisused, ConfirmUnknown, Final, Names, Problem
from lanekeeper.bodies import OVER_BYTES, BodiesUnavailable, BodyStore
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.over_amqp import OverAmqp
from lanekeeper.requests import OutgoingRequest


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[OverAmqp]:
    store = BodyStore(tmp_path.as_uri())
    yield OverAmqp(
        "amqp://localhost", names=Names(), ssl_context=None, tracing=None, bodies=store, fetches_answers=False
    )
    store.close()


def large() -> OutgoingRequest:
    return OutgoingRequest(
        message=Message(body=b"x" * (OVER_BYTES + 1), message_id="id-1"), key="normal.a.b", tenant=None, chose_id=True,
        publish_within_s=60, absent_within_s=None, full_within_s=0, timeout_s=None, end=None,
    )  # fmt: skip


def bodies_in(folder: Path) -> int:
    return len(list(folder.iterdir()))


async def test_a_client_closed_before_it_publishes_leaves_no_body_behind(closed: OverAmqp, tmp_path: Path) -> None:
    outgoing = large()
    with pytest.raises(ClientMisused) as misused:
        await closed.publish(outgoing)
    assert outgoing.kept is not None
    assert (misused.value.maybe_published, bodies_in(tmp_path)) == (False, 0)
    assert list(closed.publisher.times) == ["ClientMisused"]


async def test_a_client_closed_before_the_confirm_came_leaves_the_body_of_what_may_be_published(
    closed: OverAmqp, tmp_path: Path
) -> None:
    tries = AsyncMock(side_effect=[ConfirmUnknown("lost"), ClientMisused("closed")])
    with patch.object(closed.publisher, "publish", tries), pytest.raises(ClientMisused) as misused:
        await closed.publish(large())
    assert (misused.value.maybe_published, bodies_in(tmp_path)) == (True, 1)


async def test_a_client_that_is_opened_again_has_its_store_again(tmp_path: Path) -> None:
    over = OverAmqp(
        "amqp://localhost",
        names=Names(),
        ssl_context=None,
        tracing=None,
        bodies=tmp_path.as_uri(),
        fetches_answers=True,
    )
    with patch.multiple(over.connection, __aenter__=AsyncMock(), __aexit__=AsyncMock(), create=True):
        for _ in range(2):
            async with over:
                await over._store_body(large())
    assert bodies_in(tmp_path) == 2


async def test_a_store_that_is_closed_is_unavailable(tmp_path: Path) -> None:
    store = BodyStore(tmp_path.as_uri())
    store.close()
    with pytest.raises(BodiesUnavailable):
        await store.keep([b"x"])


async def test_a_lost_answer_does_not_hide_the_results_of_others(tmp_path: Path) -> None:
    store = BodyStore(tmp_path.as_uri())
    over = OverAmqp(
        "amqp://localhost", names=Names(), ssl_context=None, tracing=None, bodies=store, fetches_answers=True
    )
    kept = await store.keep_answer(b"{}", for_s=60)
    await store.drop_answer(kept)

    async def answers(asked: Message, **_: object) -> None:
        for id, more in (("id-1", kept.headers), ("id-2", {})):
            headers = {n.STATUS: "ok", n.REQUEST_ID: id, **more}
            over._answers.add(asked.correlation_id, Message(body=b"{}", headers=headers))
        over._answers.add(asked.correlation_id, Message(body=b'{"results": []}', headers={n.CONTROL: "pending"}))
        over._answers._channel = Mock(is_closed=False)

    with patch.object(over, "_send", answers):
        found = await over.results(["id-1", "id-2"], tenant=None)
    store.close()
    assert [type(found[id]) for id in ("id-1", "id-2")] == [Problem, Final]
