"""Temporary files of tests in memory: SQLite waits for the disk at each commit, which took half of its tests' time."""

import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
LEAST_BYTES = 2 * 1024**3
"""In a container there may be 64 MB only."""


def use_memory() -> None:
    """Have `tempfile` use memory, in this process, if there is enough of it."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= LEAST_BYTES:
        tempfile.tempdir = str(MEMORY)
