"""Settings of a worker's garbage collector: it skips objects that stay for ever, and scans the others less often.

Python looks at all objects again whenever enough new ones were made: 210,000 that imports and settings made, 0.1 s in
which nothing else runs. Hardly anything of a request is left to the collector: reference counts free it.
"""

import gc
from typing import Final

YOUNG: Final = 10_000
"""How many new objects start a collection. Python's default of 700 is reached by a few requests."""


def settle() -> None:
    """Called once, when all parts have been created."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)
