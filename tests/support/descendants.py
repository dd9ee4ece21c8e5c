"""Finds and kills all descendants of this process; on Linux, daemons as well.

Erlang leaves processes behind (`epmd`, `erl_child_setup`, `inet_gethost`), each in its own session, so no process group
contains them all. A process that is a "child subreaper" (Linux) becomes the parent of all its orphaned descendants, so
they can be found by walking from parent to child, even if they became daemons.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
KILLED_WITHIN_S = 10.0


def adopt_orphans() -> None:
    """Make this process the parent of all processes that its descendants leave behind. Does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """The ids of all processes below `root`, parents first. Empty if there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # The name in brackets may contain spaces and brackets; the parent is the second field after it.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(root, ()))
    for process in found:
        found += children.get(process, ())
    return found


def kill_all() -> None:
    """Kill all descendants of this process, and wait until they have ended. `adopt_orphans` must have been called
    before, so that orphaned descendants are found too."""
    until = time.monotonic() + KILLED_WITHIN_S
    while (found := descendants(os.getpid())) and time.monotonic() < until:
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
            reap(process)
        time.sleep(0.01)  # polling: the kernel does not notify us when a grandchild becomes our child


def reap(process: int) -> None:
    """Collect a child that has ended, so that it does not stay as a zombie; does nothing for other processes."""
    with suppress(ChildProcessError):
        os.waitpid(process, os.WNOHANG)
