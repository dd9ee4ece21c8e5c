"""Installs the Debian packages that some tests need."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.engine import Steps, Unavailable, install


def see_that_it_is_installed(program: str) -> None:
    """Install the Debian package of the same name if the program is missing. If that is impossible, the test is
    skipped; in CI it fails."""
    if shutil.which(program) is None:
        with Path(tempfile.gettempdir(), f"lanekeeper-tests-{program}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only one process of the test session installs it
            try:
                if shutil.which(program) is None:
                    install(Steps(), program)
            except Unavailable as error:
                if os.environ.get("CI") == "true":
                    pytest.fail(str(error))
                pytest.skip(f"{error} (apt install {program})")
