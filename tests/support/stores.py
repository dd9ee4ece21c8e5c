"""A store for each virtual host of a test: all workers of one virtual host share it, as on one machine."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folders: list[Path] = []


@contextmanager
def stores() -> Iterator[None]:
    """New, empty stores for as long as the block lasts; deleted at its end."""
    folder = Path(tempfile.mkdtemp(prefix="lanekeeper-stores-"))
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.remove(folder)
        shutil.rmtree(folder, ignore_errors=True)


def store_url(amqp_url: str | None) -> str:
    """The URL of the store for that virtual host in this test."""
    name = "".join(each if each.isalnum() else "-" for each in amqp_url or "none")[-80:]
    return f"sqlite:///{_folders[-1] / name}.sqlite"
