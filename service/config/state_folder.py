"""Finds the default folder for the file of the SQLite store, in which workers keep results, claims (which worker works
on which request) and counters."""

import os
from pathlib import Path


def state_folder() -> Path:
    """Lanekeeper's folder below the one in which this user's programs keep their state, according to the XDG Base
    Directory Specification."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the specification says that a relative path is ignored
        try:
            base = Path.home() / ".local/state"
        except RuntimeError:  # a user without name and home, in a container
            base = Path("/var/lib")
    return base / "lanekeeper"
