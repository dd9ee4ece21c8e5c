"""A running service that a test breaks: `async with made() as service: await broken(service, …)`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.faults import Made
from tests.faults.ground import Ground, ground
from tests.support.engine import Unavailable

SEED = 11
RATE = 15.0


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """`ground` on a single broker, with a moderate load. Without Docker the test is skipped; in CI it fails."""

    @asynccontextmanager
    async def make(**how: Any) -> AsyncIterator[Ground]:
        try:
            async with ground("single", **{"folder": tmp_path, "seed": SEED, "rate": RATE, **how}) as service:
                try:
                    yield service
                finally:
                    service.write(tmp_path / "history.jsonl")
        except Unavailable as error:
            if os.environ.get("CI") == "true":
                pytest.fail(str(error))
            pytest.skip(str(error))

    return make
