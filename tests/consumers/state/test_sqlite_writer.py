"""Writes that are committed together: each gets its own result, however many there are and whatever one of them
does."""

import asyncio
from pathlib import Path

from consumers.state.base import Found, Granted, Identity
from consumers.state.sqlite.store import SqliteStore
from consumers.state.sqlite.writer import TOGETHER_AT_MOST
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
