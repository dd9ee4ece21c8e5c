"""Places where the process can be made to die on purpose, for the fault suite. Off unless a setting names them.

before_claim  after_claim  after_call  after_store  after_publish  after_confirm  after_ack
"""

import asyncio
import os
import random
from collections.abc import Mapping

NAMES = frozenset(
    {"before_claim", "after_claim", "after_call", "after_store", "after_publish", "after_confirm", "after_ack"}
)
EXIT_CODE = 86
SOON_S = 0.0005
"""After this time the frames are usually written, but not confirmed yet."""


class Failpoints:
    """`chances`: the probability of dying, by the name of the place."""

    def __init__(self, chances: Mapping[str, float] | None = None) -> None:
        self._chances = dict(chances or {})

    def reach(self, name: str) -> None:
        """Die here with the given probability, without clean-up, like a kill."""
        if self._chances and random.random() < self._chances.get(name, 0):
            os._exit(EXIT_CODE)

    def reach_soon(self, name: str) -> None:
        """Die with the given probability as soon as the next publish has been written."""
        if self._chances and random.random() < self._chances.get(name, 0):
            asyncio.get_running_loop().call_later(SOON_S, os._exit, EXIT_CODE)
