"""A worker's process is not held up by the collector for what its start has made."""

import subprocess
import sys

LOOKED_AT = """
import gc
from service.worker import heap
made = [[] for _ in range(100_000)]
before = len(gc.get_objects())
heap.settle()
print(before, len(gc.get_objects()))
"""


def test_what_the_start_has_made_is_not_looked_at_again() -> None:
    told = subprocess.run([sys.executable, "-c", LOOKED_AT], capture_output=True, text=True, check=True, timeout=120)
    before, after = map(int, told.stdout.split())
    assert before > 100_000
    assert after < before / 100
