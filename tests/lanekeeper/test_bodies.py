"""The store of bodies that are too large for a message."""

import asyncio
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from lanekeeper import bodies
from lanekeeper.bodies import BodiesFull, BodiesUnavailable, BodyError, BodyStore, BodyTooLarge
from lanekeeper.contract.messages import BodyAddress, body_address_in
from tests.support.waiting import until

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BodyStore]:
    made = BodyStore(f"file://{tmp_path}/bodies", in_all_bytes=1000, keep_s=100)
    yield made
    made.close()


async def test_folder_and_files_are_readable_by_their_owner_alone(store: BodyStore, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        await store.keep([b"hello"])
        await store.keep_answer(b"hello", for_s=10)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "bodies").stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "bodies").iterdir()} == {0o600}


async def test_a_body_and_its_name_are_on_disk_before_its_address_is_given(
    store: BodyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, int]] = []

    def fsync(file: int) -> None:
        found = os.fstat(file)
        synced.append((stat.S_ISDIR(found.st_mode), 0 if stat.S_ISDIR(found.st_mode) else found.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    opened = len(os.listdir("/proc/self/fd"))
    await store.keep([b"hel", b"lo"])
    assert len(os.listdir("/proc/self/fd")) == opened
    assert synced == [(False, 5), (True, 0)]


async def test_another_digest_and_more_than_allowed_are_errors(store: BodyStore) -> None:
    kept = await store.keep([b"hello"])
    with pytest.raises(BodyError, match="SHA-256"):
        await store.fetch(BodyAddress(kept.address, "0" * 64))
    assert await store.fetch(kept, most_bytes=5) == b"hello"
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
    await store.drop(BodyAddress(f"{store.url}/mine", HELLO))
    assert await store.fetch(BodyAddress(f"{store.url}/mine", HELLO)) == b"hello"


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "%2e%2e/secret", ".hidden", "a//b", "", "a?b", "/etc"])
async def test_an_address_leads_nowhere_else(store: BodyStore, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_bytes(b"hello")
    address = f"{store.url}/{path}"
    assert not store.holds(address)
    with pytest.raises(BodyError, match="not in this store"):
        await store.fetch(BodyAddress(address, HELLO))


async def test_another_stores_address_is_not_held(store: BodyStore) -> None:
    assert not store.holds(f"{store.url}-of-others/x")
    assert not store.holds("file:///etc/passwd")


async def test_a_link_does_not_lead_out_of_the_folder(store: BodyStore, tmp_path: Path) -> None:
    await store.keep([b"hello"])
    (tmp_path / "secret").write_bytes(b"hello")
    os.symlink(tmp_path / "secret", tmp_path / "bodies/link")
    with pytest.raises(BodyError, match="link"):
        await store.fetch(BodyAddress(f"{store.url}/link", HELLO))


async def test_a_full_store_refuses_and_leaves_nothing_behind(store: BodyStore, tmp_path: Path) -> None:
    await store.keep([b""])
    (tmp_path / "bodies/mine").write_bytes(b"x" * 950)
    await store.sweep()
    with pytest.raises(BodiesUnavailable, match="is full: it holds 1000 bytes"):
        await store.keep([b"x" * 90, b"x" * 90])
    assert len(list((tmp_path / "bodies").iterdir())) == 2
    await store.keep([b"x" * 25])


async def test_a_tenant_may_fill_the_store_only_as_far_as_the_same_is_left_for_others(store: BodyStore) -> None:
    await store.keep([b"x" * 300], tenant="a")
    await store.keep_answer(b"x" * 200, for_s=1000, tenant="a")
    with pytest.raises(BodiesFull, match="501 bytes there, and 499 of 1000"):
        await store.keep([b"x"], tenant="a")
    await store.keep([b"x" * 250], tenant="b")
    with pytest.raises(BodiesFull):
        await store.keep_answer(b"x", for_s=1000, tenant="b")
    await store.keep([b"x" * 125], tenant="c")


@pytest.mark.parametrize(("size", "error"), [(1000, BodiesFull), (1001, BodiesUnavailable)])
async def test_a_body_that_would_leave_nothing_for_others_is_told_apart_from_one_that_does_not_fit(
    store: BodyStore, size: int, error: type[Exception]
) -> None:
    with pytest.raises(BodiesUnavailable) as refused:
        await store.keep([b"x" * size], tenant="a")
    assert type(refused.value) is error


async def test_a_share_counts_what_is_there_for_every_process_and_what_was_removed_makes_room(
    store: BodyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "RESCAN_EVERY_S", 0.0)
    kept = await store.keep([b"x" * 400], tenant="a")
    other = BodyStore(store.url, in_all_bytes=1000)
    with pytest.raises(BodiesFull):
        await other.keep([b"x" * 150, b"x" * 50], tenant="a")
    await store.drop(kept)
    await other.keep([b"x" * 400, b"x" * 100], tenant="a")
    other.close()


async def test_what_is_being_written_is_counted_once(store: BodyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SCAN_EVERY_S", 0.0)
    pieces = [b"x" * 100_000] * 5  # more than a file's buffer, so that a scan finds them
    full = BodyStore(store.url, in_all_bytes=1_000_000)
    await full.keep(pieces, tenant="a")
    with pytest.raises(BodiesFull, match="500001 bytes there"):
        await full.keep([b"x"], tenant="a")
    full.close()


async def test_an_expired_body_that_another_process_removed_first_is_gone(
    store: BodyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.keep([])
    (tmp_path / "bodies" / f"1000000000-{'0' * 32}").write_bytes(b"x" * 600)
    monkeypatch.setattr(store._files, "rm_file", Mock(side_effect=FileNotFoundError))
    await store.sweep()
    await store.keep([b"x" * 500])


@pytest.mark.parametrize(
    ("headers", "address"),
    [
        ({"x-lane-body": "s3://b/1", "x-lane-body-sha256": HELLO}, BodyAddress("s3://b/1", HELLO)),
        ({"x-lane-body": "s3://b/1"}, None),
        ({"x-lane-body-sha256": HELLO}, None),
    ],
)
def test_a_message_names_its_body_by_address_and_digest(headers: dict[str, str], address: BodyAddress | None) -> None:
    assert body_address_in(headers) == address


async def test_the_url_of_a_folder_has_other_characters_as_xx_and_that_of_a_bucket_has_not(tmp_path: Path) -> None:
    store, bucket = BodyStore(f"{tmp_path.as_uri()}/a%20b"), BodyStore("memory://a%20b")
    await store.keep([b"hello"])
    kept = await bucket.keep([b"hello"])
    assert len(list((tmp_path / "a b").iterdir())) == 1
    assert bucket._files.exists(kept.address.removeprefix("memory://"))
    store.close()
    bucket.close()


async def test_closing_does_not_wait_for_a_file_system_that_hangs(tmp_path: Path) -> None:
    begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def hangs() -> Iterator[bytes]:
        begun.set()
        may_end.wait(5)
        has_ended.set()
        yield b"x"

    store = BodyStore(tmp_path.as_uri())
    keeping = asyncio.create_task(store.keep(hangs()))
    await until(begun.is_set)
    store.close()
    assert not has_ended.is_set()
    may_end.set()
    await keeping


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


async def test_an_answer_stays_as_long_as_its_result_and_no_request_removes_it(
    store: BodyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await store.keep_answer(b"hello", for_s=1000)
    request = await store.keep([b"hello"])
    await store.drop(kept)
    assert await store.fetch(kept) == b"hello"

    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 900)
    await store.sweep()
    assert await store.fetch(kept) == b"hello"
    with pytest.raises(BodyError):
        await store.fetch(request)
    monkeypatch.setattr(time, "time", lambda: now_s + 1002)
    await store.sweep()
    assert not list((tmp_path / "bodies").iterdir())


async def test_a_body_is_there_for_all_of_its_time(store: BodyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 2_000_000_000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    bodies = [await store.keep([b"hello"]), await store.keep_answer(b"hello", for_s=100)]
    now_s += 100
    await store.sweep()
    assert [await store.fetch(each) for each in bodies] == [b"hello"] * 2
    now_s += 0.5
    await store.sweep()
    for each in bodies:
        with pytest.raises(BodyError, match="nothing is there"):
            await store.fetch(each)


async def test_an_error_names_no_file_of_this_machine_but_its_cause_does(tmp_path: Path) -> None:
    (tmp_path / "bodies").write_bytes(b"no folder")
    store = BodyStore(f"file://{tmp_path}/bodies")
    with pytest.raises(BodiesUnavailable) as caught:
        await store.keep([b"hello"])
    assert str(tmp_path) not in str(caught.value)
    assert str(tmp_path) in caught.value.cause
    store.close()


@pytest.mark.parametrize(
    "text",
    [
        "403, message='Forbidden', url='https://a.example/bodies/x?se=2026&sig=SECRET%3D'",
        "cannot connect to s3://user:SECRET@host/bucket",
        "bad answer <AWSAccessKeyId>SECRET</AWSAccessKeyId>",
        "options: {'key': 'SECRET', 'secret_key': 'SECRET'}",
        "AccountKey=SECRET; region=eu",
        "refused: Authorization: Bearer SECRET",
        "refused: Authorization: AWS4-HMAC-SHA256 Credential=SECRET, Signature=SECRET",
    ],
)
async def test_the_cause_of_an_error_has_no_key_and_no_signature(text: str) -> None:
    def fails() -> Iterator[bytes]:
        yield b""
        raise OSError(text)

    store = BodyStore("memory://secrets")
    with pytest.raises(BodiesUnavailable) as caught:
        await store.keep(fails())
    store.close()

    assert caught.value.cause.startswith("OSError: ")
    assert "…" in caught.value.cause
    assert "SECRET" not in f"{caught.value.cause} {caught.value} {caught.value.__cause__}"


async def test_a_body_is_copied_into_a_file_in_pieces_and_checked(store: BodyStore) -> None:
    kept = await store.keep([b"hello"])
    with tempfile.TemporaryFile() as file:
        assert await store.fetch_into(file, kept, most_bytes=5) == 5
        file.seek(0)
        assert file.read() == b"hello"
        with pytest.raises(BodyError, match="SHA-256"):
            await store.fetch_into(file, BodyAddress(kept.address, "0" * 64))
        with pytest.raises(BodyTooLarge):
            await store.fetch_into(file, kept, most_bytes=4)
        with pytest.raises(BodyError, match="not in this store"):
            await store.fetch_into(file, BodyAddress("file:///etc/passwd", kept.sha256))
