"""How many examples a property is tried with: a fifth in `./dev check`, all of them in `./dev test`."""

import os

QUICK = "LANEKEEPER_TESTS_QUICK"
SHARE = 5


def examples(count: int) -> int:
    """So many, or a share of them where somebody waits for the result."""
    return max(count // SHARE, 1) if os.environ.get(QUICK) else count
