"""What the client returns and raises is imported from where it lives, is typed, and is told in docs/clients.md."""

import typing
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import lanekeeper as surface

HOUSE = Path(__file__).parents[2]
ERRORS = {
    name
    for name in surface.__all__
    if isinstance(found := getattr(surface, name), type) and issubclass(found, Exception)
}


def test_every_name_is_ours() -> None:
    """Looked up in several modules, where one may import a name like it (`typing.Final`)."""
    assert {name for name in surface.__all__ if getattr(surface, name) is getattr(typing, name, None)} == set()


def test_every_error_of_ours_has_one_root() -> None:
    assert len(ERRORS) == 14
    assert {name for name in ERRORS if not issubclass(getattr(surface, name), surface.LanekeeperError)} == set()


@pytest.mark.parametrize("name", sorted(ERRORS | {"Client", "Final", "Part"}))
def test_the_page_tells_of_it(name: str) -> None:
    assert (
        f"`{name}`" in (HOUSE / "docs/clients.md").read_text() or f"{name}(" in (HOUSE / "docs/clients.md").read_text()
    )


def test_the_wheel_says_that_it_is_typed(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(HOUSE)).build(directory=str(tmp_path), versions=["standard"])

    with zipfile.ZipFile(wheel) as built:
        held = set(built.namelist())
    assert {f"{package}/py.typed" for package in ("lanekeeper", "topology", "consumers", "service")} <= held
    assert "lanekeeper/client.py" in held
