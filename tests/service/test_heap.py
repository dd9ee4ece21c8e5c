"""Garbage collection in a running worker does not scan the objects that its start created."""

import subprocess
import sys

LOOKED_AT = """
import gc
from service.worker import heap
made = [[] for _ in range(100_000)]
before = len(gc.get_objects())
heap.tune()
print(before, len(gc.get_objects()))
"""


def test_objects_made_at_the_start_are_not_scanned_by_later_collections() -> None:
    told = subprocess.run([sys.executable, "-c", LOOKED_AT], capture_output=True, text=True, check=True, timeout=120)
    before, after = map(int, told.stdout.split())
    assert before > 100_000
    assert after < before / 100
