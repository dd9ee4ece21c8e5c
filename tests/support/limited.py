"""A process with little memory: `interpreter(…, module="tests.support.limited")` runs `lanekeeper` in the cgroup whose
folder the environment variable CGROUP names, if there is one."""

import os
import runpy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

V2 = Path("/sys/fs/cgroup")
V1 = Path("/sys/fs/cgroup/memory")


@contextmanager
def cgroup(limit_bytes: int) -> Iterator[Path | None]:
    """A new memory cgroup, of version 2 or 1, without swap. None: this machine or user may have none."""
    parent = V1 if V1.is_dir() else V2
    folder = parent / f"lanekeeper-{uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if parent == V1 else "memory.max")).write_text(str(limit_bytes))
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        yield None
        return
    for swap in ("memory.swap.max", "memory.swappiness"):
        with suppress(OSError):
            (folder / swap).write_text("0")
    try:
        yield folder
    finally:
        with suppress(OSError):  # the last process may still be ending
            folder.rmdir()


if __name__ == "__main__":
    if folder := os.environ.pop("CGROUP", ""):
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
    runpy.run_module("service.cli.main", run_name="__main__", alter_sys=True)
