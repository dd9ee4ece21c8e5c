"""What the client returns and raises can be imported from where it is defined, is typed, and is described in
docs/clients.md."""

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


def test_every_public_name_is_defined_in_our_package() -> None:
    """Searches several modules; one of them may import the same name (`typing.Final`)."""
    assert {name for name in surface.__all__ if getattr(surface, name) is getattr(typing, name, None)} == set()


def test_every_client_error_derives_from_one_base_class() -> None:
    assert len(ERRORS) == 16
    assert {name for name in ERRORS if not issubclass(getattr(surface, name), surface.LanekeeperError)} == set()


@pytest.mark.parametrize("name", sorted(ERRORS | {"Client", "Final", "Part"}))
def test_docs_clients_describes_every_public_name(name: str) -> None:
    assert (
        f"`{name}`" in (HOUSE / "docs/clients.md").read_text() or f"{name}(" in (HOUSE / "docs/clients.md").read_text()
    )


def test_the_wheel_contains_py_typed(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(HOUSE)).build(directory=str(tmp_path), versions=["standard"])

    with zipfile.ZipFile(wheel) as built:
        held = set(built.namelist())
    assert {f"{package}/py.typed" for package in ("lanekeeper", "topology", "consumers", "service")} <= held
    assert "lanekeeper/client.py" in held
