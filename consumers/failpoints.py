"""Steps in the processing of a request at which the worker kills itself at random. Used by the fault suite, which tests
that no request is lost.

No place is active unless a setting gives it a probability. The names, in the order in which a request reaches them:
before_claim  after_claim  after_call  after_keep  after_store  after_publish  after_confirm  after_ack
"""

import asyncio
import os
import random
from collections.abc import Mapping

NAMES = frozenset(
    {
        "before_claim",
        "after_claim",
        "after_call",
        "after_keep",
        "after_store",
        "after_publish",
        "after_confirm",
        "after_ack",
    }
)
EXIT_CODE = 86
SOON_S = 0.0005
"""How many seconds after `Failpoints.reach_soon` the process dies: by then a publish is usually written to the socket,
but not confirmed yet."""


class Failpoints:
    """For tests: kills the process at named places in the journey of a request, with a probability. `chances`: the
    probability (0 to 1) by the place's name."""

    def __init__(self, chances: Mapping[str, float] | None = None) -> None:
        self._chances = dict(chances or {})

    def reach(self, name: str) -> None:
        """At the place `name`: kill the process with the place's probability, without clean-up, as SIGKILL does."""
        if self._chances and random.random() < self._chances.get(name, 0):
            os._exit(EXIT_CODE)

    def reach_soon(self, name: str) -> None:
        """At the place `name`: with the place's probability, kill the process as soon as the next publish has been
        written."""
        if self._chances and random.random() < self._chances.get(name, 0):
            asyncio.get_running_loop().call_later(SOON_S, os._exit, EXIT_CODE)
