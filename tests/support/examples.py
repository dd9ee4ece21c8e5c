"""How many examples a property is tested with: all in `./dev test`, a fifth of them in `./dev check`."""

import os

QUICK = "TESTS_QUICK"
SHARE = 5


def examples(count: int) -> int:
    """`count`, or a fifth of it in quick runs."""
    return max(count // SHARE, 1) if os.environ.get(QUICK) else count
