"""The Lua scripts that run in Redis. Redis keeps a script that it has run, so that the next call needs to send only its
SHA-1 hash.

Each run of a script is one atomic step that takes one round trip, and reads the time from Redis. If Redis has no memory
or disk space left, it refuses the first write of a script, so that a refused script has changed nothing.
"""

from hashlib import sha1
from importlib.resources import files
from typing import Final

_BEGIN: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local run = {}
"""


class Script:
    """A Lua script, and the hash by which Redis finds it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read(*names: str) -> str:
    """Returns the texts of these files of this folder as one text, in the given order."""
    return "".join(files(__package__).joinpath(name).read_text(encoding="utf-8") for name in names)


def _functions(*names: str) -> dict[str, Script]:
    """Returns a script for each function `run.…` of these Lua files. The script calls that function with the script's
    arguments.

    Each script contains only its own function, and what the files contain before their first function. If it contained
    all functions, it would take a sixth more time in Redis, which creates every function anew at each run of the
    script.
    """
    shared, *functions = _read(*names).split("\nfunction run.")
    scripts = {}
    for function in functions:
        name = function[: function.index("(")]
        # at most 30 parameters, because Lua cannot pass thousands: functions for many requests read the rest from ARGV
        call = f"return run.{name}(unpack(ARGV, 1, math.min(#ARGV, 30)))"
        scripts[name] = Script(f"{_BEGIN}{shared}\nfunction run.{function}\n{call}")
    return scripts


STORE: Final = (
    _functions("request.lua", "requests.lua") | _functions("request.lua", "following.lua") | _functions("shares.lua")
)
"""The scripts of the store by the names of their Lua functions."""
BUDGET: Final = Script(_read("bucket.lua", "budget.lua"))
"""The script that grants waiting requests the budget of an account that several processes share (`shared_turns.py`)."""
