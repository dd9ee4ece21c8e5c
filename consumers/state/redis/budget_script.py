"""One step of a shared account, as the script that Redis runs: `budget.lua`."""

from importlib.resources import files
from typing import Final

from consumers.state.redis.script import Script

FORM: Final = 2
"""How the script keeps an account. A version of Lanekeeper that keeps it otherwise has another number, and so another
key: while both run, each spends the whole budget, and 429s lower it for both."""
STEP: Final = Script(files("consumers.state.redis").joinpath("budget.lua").read_text(encoding="utf-8"))
