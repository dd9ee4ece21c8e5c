"""`lanekeeper check` without a broker: what it reports about the store."""

from pathlib import Path

import pytest

from service.checks.providers import Finding
from service.checks.run import look
from service.config.loading import load_settings

NOBODY_LISTENS = "amqp://guest:guest@127.0.0.1:1/"


async def of_the_store(store_url: str) -> Finding:
    settings = load_settings(environ={"LANEKEEPER_AMQP_URL": NOBODY_LISTENS, "LANEKEEPER_STORE_URL": store_url})
    findings = [each async for each in look(settings)]
    return next(each for each in findings if each.what == "store")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_a_writable_store_is_reported_as_ok_and_only_its_file_is_made(tmp_path: Path) -> None:
    found = await of_the_store("sqlite:///state/lane.sqlite")

    assert found == Finding("store", True, "sqlite:///state/lane.sqlite can be written")
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["lane.sqlite"]


async def test_a_file_that_is_no_store_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("something else, and long enough to be read as a header" * 10)

    found = await of_the_store("sqlite:///notes")

    assert not found.well
    assert "notes is corrupt: stop every worker on it, move it away" in found.text


async def test_an_unreachable_redis_is_reported_without_its_password() -> None:
    found = await of_the_store("redis://:s3cret@127.0.0.1:1/0")

    assert not found.well
    assert "Redis at redis://127.0.0.1:1 cannot be reached: see that it runs, and LANEKEEPER_STORE_URL" in found.text
    assert "s3cret" not in found.text
