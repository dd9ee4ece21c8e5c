"""Writes that are committed together: each gets its own result, even if another one fails."""

import asyncio
from pathlib import Path

import pytest

from consumers.state.base import Found, Granted, Identity, StoreUnavailable
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.clock import Clock
from consumers.state.sqlite.file import BUSY_S
from consumers.state.sqlite.store import SqliteStore
from consumers.state.sqlite.writer import CLOSE_S, TOGETHER_AT_MOST, Writer
from tests.support.completions import ME, fingerprint


async def test_each_of_many_waiting_writes_is_done(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        found = await asyncio.wait_for(
            asyncio.gather(*(store.find(Identity("", str(i))) for i in range(TOGETHER_AT_MOST + 50))), 60
        )
    assert found == [None] * (TOGETHER_AT_MOST + 50)


async def test_a_write_that_cannot_be_stored_fails_alone(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        before, wrong, after = await asyncio.gather(
            store.claim(ME, fingerprint()), store.find(Identity("", "\ud800")), store.find(ME), return_exceptions=True
        )
    assert isinstance(before, Granted)
    assert isinstance(wrong, UnicodeEncodeError)
    assert isinstance(after, Found)


async def test_calls_of_one_turn_of_the_event_loop_share_a_transaction(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "lane.sqlite", namespace="lane", spec=StoreSpec(), clock=Clock())
    writer.start()
    times = await asyncio.gather(*(writer.do(lambda _, at: at) for _ in range(50)))
    await writer.close()
    assert all(each is times[0] for each in times), "a transaction has one time"


async def test_more_waiting_writes_than_allowed_are_refused_until_some_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumers.state.sqlite.writer.WAITING_AT_MOST", 3)
    writer = Writer(tmp_path / "lane.sqlite", namespace="lane", spec=StoreSpec(), clock=Clock())
    writer.start()
    for _ in range(2):
        found = await asyncio.gather(*(writer.do(lambda _, at: at) for _ in range(4)), return_exceptions=True)
        assert [isinstance(each, StoreUnavailable) for each in found] == [False, False, False, True]
        assert "is too slow: 3 operations wait for it" in str(found[3])
    await writer.close()


async def test_waiting_writes_are_done_before_the_writer_ends(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "lane.sqlite", namespace="lane", spec=StoreSpec(), clock=Clock())
    writer.start()
    asked = [asyncio.ensure_future(writer.do(lambda _, at: at)) for _ in range(3)]
    await asyncio.sleep(0)
    await writer.close()
    assert len(await asyncio.wait_for(asyncio.gather(*asked), 60)) == 3


def test_a_closing_store_waits_longer_than_another_process_may_lock_the_file() -> None:
    assert CLOSE_S > BUSY_S
