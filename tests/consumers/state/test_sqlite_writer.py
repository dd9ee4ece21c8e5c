"""Writes that are committed together: each gets its own result, however many there are and whatever one of them
does."""

import asyncio
from pathlib import Path

from consumers.state.base import Found, Granted, Identity
from consumers.state.clock import Clock
from consumers.state.spec import StoreSpec
from consumers.state.sqlite.store import SqliteStore
from consumers.state.sqlite.writer import TOGETHER_AT_MOST, Writer
from tests.support.completions import ME, copy


async def test_however_many_wait_each_is_done(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        found = await asyncio.wait_for(
            asyncio.gather(*(store.find(Identity("", str(i))) for i in range(TOGETHER_AT_MOST + 50))), 10
        )
    assert found == [None] * (TOGETHER_AT_MOST + 50)


async def test_what_no_store_could_keep_fails_alone(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "lane.sqlite", namespace="lane") as store:
        before, wrong, after = await asyncio.gather(
            store.claim(ME, copy()), store.find(Identity("", "\ud800")), store.find(ME), return_exceptions=True
        )
    assert isinstance(before, Granted)
    assert isinstance(wrong, UnicodeEncodeError)
    assert isinstance(after, Found)


async def test_what_is_asked_for_in_one_turn_of_the_loop_is_one_transaction(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "lane.sqlite", namespace="lane", spec=StoreSpec(), clock=Clock())
    writer.start()
    times = await asyncio.gather(*(writer.do(lambda _, at: at) for _ in range(50)))
    await writer.close()
    assert all(each is times[0] for each in times), "a transaction has one time"


async def test_what_waits_is_done_before_the_end(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "lane.sqlite", namespace="lane", spec=StoreSpec(), clock=Clock())
    writer.start()
    asked = [asyncio.ensure_future(writer.do(lambda _, at: at)) for _ in range(3)]
    await asyncio.sleep(0)
    await writer.close()
    assert len(await asyncio.wait_for(asyncio.gather(*asked), 10)) == 3
