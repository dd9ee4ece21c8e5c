"""Reads how often the kernel has killed processes for want of memory."""

import re
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")
_KILLS: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def memory_kills(root: Path = _ROOT) -> int | None:
    """How many processes in this one's cgroup were killed because the cgroup had reached its memory limit: a worker
    before this one, or a process of a handler. None: the system does not say. A container that is started again has a
    new cgroup, without the earlier count."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        number, kinds, path = line.split(":", 2)
        if number == "0":  # version 2
            folder, file = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in kinds.split(","):
            folder, file = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        for place in (folder / path.lstrip("/"), folder):  # in a container its own group may be the root
            try:
                found = _KILLS.search((place / file).read_text())
            except OSError:
                continue
            if found is not None:
                return int(found[1])
    return None
