"""Whose the files at the providers are, for every engine."""

import time

from consumers.state.base import StoredFile
from tests.consumers.state.conftest import Opened

NOW_MS = int(1000 * time.time())


def a_file(id: str, tenant: str = "crm", *, created_ms: int = NOW_MS, until_ms: int | None = None) -> StoredFile:
    return StoredFile(id=id, tenant=tenant, provider="anthropic", created_ms=created_ms, size=7, until_ms=until_ms)


async def test_every_process_knows_whose_a_file_is_until_it_is_forgotten(opened: Opened) -> None:
    here, there = await opened(), await opened()
    old, new, other = a_file("file_1", created_ms=1), a_file("file_2"), a_file("file_3", "shop")
    for each in (new, old, other):
        assert await here.keep_file(each)

    assert await there.files("crm") == [new, old]
    assert await there.find_files(["file_1", "file_3", "file_4"]) == {"file_1": old, "file_3": other}
    await there.forget_file(old)
    assert await here.files("crm") == [new]
    assert await here.find_files(["file_1"]) == {}
    assert await here.find_files([]) == {}


async def test_a_file_is_its_first_owners_and_no_tenant_has_more_than_it_may(opened: Opened) -> None:
    store = await opened(files_per_tenant=2)
    assert await store.keep_file(a_file("file_1"))
    assert not await store.keep_file(a_file("file_1", "thief"))
    await store.forget_file(a_file("file_1", "thief"))
    assert (await store.find_files(["file_1"]))["file_1"].tenant == "crm"

    assert await store.keep_file(a_file("file_2"))
    assert not await store.keep_file(a_file("file_3"))
    assert await store.keep_file(a_file("file_1")), "it is kept already"
    assert await store.keep_file(a_file("file_4", "shop"))


async def test_what_has_expired_is_forgotten_and_counts_no_longer(opened: Opened) -> None:
    store = await opened(files_per_tenant=1)
    assert await store.keep_file(a_file("file_1", until_ms=NOW_MS - 1))
    assert await store.find_files(["file_1"]) == {}
    assert await store.files("crm") == []
    assert await store.keep_file(a_file("file_2", until_ms=NOW_MS + 3_600_000))
    assert [each.id for each in await store.files("crm")] == ["file_2"]
