"""Installed packages are checked by hash; what is shipped runs without privileges and listens only on loopback."""

import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
LOCKS = sorted(HOUSE.glob("requirements*.lock"))
COMPOSE = ("docker-compose.yml", "deploy/cluster/docker-compose.yml")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda each: each.name)
def test_every_package_is_locked_by_hash_and_without_an_address(lock: Path) -> None:
    text = lock.read_text()
    packages = re.split(r"^(?=[a-zA-Z0-9])", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    assert packages
    assert [each for each in packages if "==" not in each or "--hash=sha256:" not in each] == []
    assert re.findall(r"https?://|--(?:extra-)?index-url|--find-links|^-e |^git\+", text, re.MULTILINE) == []


def test_packages_are_installed_with_hash_checks_and_without_running_foreign_build_code() -> None:
    dev = (HOUSE / "dev").read_text()
    image = (HOUSE / "Dockerfile").read_text()
    for text in (dev, image):
        for each in re.findall(r"install .*?-r requirements\S*", text.replace("\\\n", " ")):
            assert "--require-hashes" in each, each
            assert re.search(r"--only-binary[ =]:all:", each), each


def test_the_image_runs_as_an_unprivileged_user() -> None:
    users = re.findall(r"^USER (\S+)", (HOUSE / "Dockerfile").read_text(), re.MULTILINE)
    assert users
    assert users[-1] == "10001:10001"


@pytest.mark.parametrize("file", COMPOSE)
def test_every_port_is_published_only_on_loopback(file: str) -> None:
    text = (HOUSE / file).read_text()
    blocks = re.findall(r"^ +ports:(.*(?:\n +- .*)*)", text, re.MULTILINE)
    published = re.findall(r"[^\s\[\]\",]*:\d+(?=[\s\]\",]|$)", "\n".join(blocks))
    assert published
    assert [each for each in published if not each.startswith("127.0.0.1:")] == []


def test_the_service_cannot_write_to_its_image_or_gain_privileges() -> None:
    text = (HOUSE / "docker-compose.yml").read_text()
    service = text[text.index("\nx-lanekeeper:") : text.index("\nservices:")]
    assert text.count("<<: *lanekeeper") == 4
    for each in ("read_only: true", "cap_drop: [ALL]", "no-new-privileges:true"):
        assert each in service
