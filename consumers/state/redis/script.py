"""A Lua script, and the name under which Redis keeps it once it has seen it.

Each script is one atomic step that takes one round trip and reads Redis's own clock.
"""

from dataclasses import dataclass, field
from hashlib import sha1
from typing import Final


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its name in Redis, `sha`."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", sha1(self.text.encode(), usedforsecurity=False).hexdigest())


CLOCK: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
WRITE: Final = Script("redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])")
