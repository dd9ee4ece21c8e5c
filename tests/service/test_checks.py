"""`lanekeeper check` without a broker: what it reports about the store, and the store of large bodies."""

from pathlib import Path

import pytest

from service.checks import Finding, run_checks
from tests.support.settings import load

NOBODY_LISTENS = "amqp://guest:guest@127.0.0.1:1/"


async def of_the_store(store_url: str) -> Finding:
    return await finding("store", LANEKEEPER_STORE_URL=store_url)


async def finding(what: str, **environ: str) -> Finding:
    settings = load(env={"LANEKEEPER_AMQP_URL": NOBODY_LISTENS, **environ})
    findings = [each async for each in run_checks(settings)]
    return next(each for each in findings if each.what == what)


pytestmark = pytest.mark.usefixtures("empty_folder")


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


async def test_bodies_that_cannot_be_kept_are_reported_with_the_cause_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "bodies").write_text("no folder")

    found = await finding("bodies", LANEKEEPER_BODIES__URL=f"file://{tmp_path}/bodies")

    assert found.well is False
    assert f"file://{tmp_path}/bodies: a body cannot be written: FileExistsError" in found.text
    assert "see that it is there, and that this process may write, read and remove files in it" in found.text


async def test_a_store_of_bodies_whose_driver_is_missing_is_reported_by_name() -> None:
    found = await finding("bodies", LANEKEEPER_BODIES__URL="gs://bucket/bodies")

    assert found.well is False
    assert "gcsfs" in found.text


async def test_without_a_store_of_bodies_the_check_says_what_is_refused() -> None:
    found = await finding("bodies", LANEKEEPER_STORE_URL="redis://127.0.0.1:1/0")

    assert found.well is None
    assert "LANEKEEPER_BODIES__URL" in found.text
