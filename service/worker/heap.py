"""Tunes a worker's garbage collector: it ignores objects that live until the process ends, and scans others less often.

By default Python's collector scans all objects whenever enough new ones exist. Imports and settings create 210,000
objects, and scanning them blocks the process for 0.1 s. A request leaves little to collect, because most of its objects
are freed by reference counting.
"""

import gc
from typing import Final

THRESHOLD: Final = 10_000
"""After how many new objects Python's garbage collector runs. Python's default is 700, and a few requests create as
many objects, so the collector would run very often."""


def tune() -> None:
    """Make the garbage collector ignore all objects that exist now, and scan others less often. Call it once, when all
    parts of the worker have been created."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
