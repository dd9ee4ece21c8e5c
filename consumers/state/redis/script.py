"""Lua scripts. Redis keeps a script that it has run, so that the next call needs only its SHA-1 hash.

Each script is one atomic step that takes one round trip, and reads the time from Redis.
"""

from dataclasses import dataclass, field
from hashlib import sha1
from typing import Final


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, and the hash by which Redis finds it."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", sha1(self.text.encode(), usedforsecurity=False).hexdigest())


CLOCK: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
WRITE: Final = Script("redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])")
