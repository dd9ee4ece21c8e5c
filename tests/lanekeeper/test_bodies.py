"""The store of bodies that are too large for a message."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanekeeper.bodies import BodiesUnavailable, BodyError, BodyStore, BodyTooLarge
from lanekeeper.contract.messages import Kept

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BodyStore]:
    made = BodyStore(f"file://{tmp_path}/bodies", in_all_bytes=1000, keep_s=100)
    yield made
    made.close()


async def test_what_is_kept_is_fetched_by_its_address_and_digest(store: BodyStore) -> None:
    kept = await store.keep([b"hel", b"lo"])
    assert kept.sha256 == HELLO
    assert kept.address.startswith(store.url + "/")
    assert await store.fetch(kept) == b"hello"


async def test_the_folder_is_readable_by_its_owner_alone(store: BodyStore, tmp_path: Path) -> None:
    await store.keep([b"hello"])
    assert (tmp_path / "bodies").stat().st_mode & 0o077 == 0


async def test_another_digest_is_an_error(store: BodyStore) -> None:
    kept = await store.keep([b"hello"])
    with pytest.raises(BodyError, match="SHA-256"):
        await store.fetch(Kept(kept.address, "0" * 64))


async def test_more_than_allowed_is_not_read(store: BodyStore) -> None:
    kept = await store.keep([b"hello"])
    with pytest.raises(BodyTooLarge, match="more than 4 bytes"):
        await store.fetch(kept, most_bytes=4)


async def test_what_is_dropped_is_gone_and_may_be_dropped_again(store: BodyStore) -> None:
    kept = await store.keep([b"hello"])
    await store.drop(kept)
    await store.drop(kept)
    with pytest.raises(BodyError, match="nothing is there"):
        await store.fetch(kept)


async def test_only_what_was_kept_here_is_dropped(store: BodyStore, tmp_path: Path) -> None:
    await store.keep([b"hello"])
    (tmp_path / "bodies/mine").write_bytes(b"hello")
    await store.drop(Kept(f"{store.url}/mine", HELLO))
    assert await store.fetch(Kept(f"{store.url}/mine", HELLO)) == b"hello"


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "%2e%2e/secret", ".hidden", "a//b", "", "a?b", "/etc"])
async def test_an_address_leads_nowhere_else(store: BodyStore, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(b"hello")
    address = f"{store.url}/{path}"
    assert not store.holds(address)
    with pytest.raises(BodyError, match="not in this store"):
        await store.fetch(Kept(address, HELLO))


async def test_another_stores_address_is_not_held(store: BodyStore) -> None:
    assert not store.holds(f"{store.url}-of-others/x")
    assert not store.holds("file:///etc/passwd")


async def test_a_link_does_not_lead_out_of_the_folder(store: BodyStore, tmp_path: Path) -> None:
    await store.keep([b"hello"])
    (tmp_path / "secret").write_bytes(b"hello")
    os.symlink(tmp_path / "secret", tmp_path / "bodies/link")
    with pytest.raises(BodyError, match="link"):
        await store.fetch(Kept(f"{store.url}/link", HELLO))


async def test_a_full_store_refuses_and_leaves_nothing_behind(store: BodyStore, tmp_path: Path) -> None:
    await store.keep([b"x" * 900])
    with pytest.raises(BodiesUnavailable, match="full"):
        await store.keep([b"x" * 90, b"x" * 90])
    assert len(list((tmp_path / "bodies").iterdir())) == 1
    await store.keep([b"x" * 90])


async def test_what_is_older_than_it_may_be_is_removed(store: BodyStore, tmp_path: Path) -> None:
    kept = await store.keep([b"hello"])
    name = kept.address.rpartition("/")[2]
    old, others = tmp_path / "bodies" / f"1000000000{name[name.index('-') :]}", tmp_path / "bodies/mine"
    old.write_bytes(b"hello")
    others.write_bytes(b"hello")
    later = BodyStore(store.url, keep_s=100)
    await later.keep([b"hello"])
    later.close()
    assert not old.exists()
    assert others.exists()
    assert await store.fetch(kept) == b"hello"


async def test_a_store_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = BodyStore(f"file://{tmp_path}/file/bodies")
    with pytest.raises(BodiesUnavailable, match=r"NotADirectoryError|FileExistsError"):
        await store.keep([b"hello"])
    store.close()
