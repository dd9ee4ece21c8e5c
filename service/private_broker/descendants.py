"""Every process that came of this one, found and ended: on Linux also those that made themselves daemons.

Erlang leaves some behind (`epmd`, `erl_child_setup`, `inet_gethost`), each in a session of its own, so that no process
group holds them all. As "child subreaper" a process becomes the parent of all its orphaned descendants: then walking
from parent to child finds them, whatever they did to hide.
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


def adopt_orphans() -> None:
    """Become the parent of whatever a descendant leaves behind. Only Linux knows that; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """The ids of all processes below `root`, parents first. Empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # The name in brackets may hold spaces and brackets itself; the parent is the second field after it.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(root, ()))
    for each in found:
        found += children.get(each, ())
    return found


def kill_all(*, within_s: float = 10) -> None:
    """Kill all descendants of this process, and wait until they are gone. Needs `adopt_orphans` to have been called."""
    until = time.monotonic() + within_s
    while (found := descendants(os.getpid())) and time.monotonic() < until:
        for each in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
            reap(each)
        time.sleep(0.01)  # the kernel tells nobody when a grandchild has become our child


def reap(process: int) -> None:
    """Take notice of a child that has ended, so that it does not stay as a zombie; nothing for any other process."""
    with suppress(ChildProcessError):
        os.waitpid(process, os.WNOHANG)
