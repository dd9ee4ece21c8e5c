"""The script that Redis runs for one step of a shared account: `budget.lua`."""

from importlib.resources import files
from typing import Final

from consumers.state.redis.script import Script

FORM: Final = 2
"""The number of the format in which the script keeps an account. A Lanekeeper with another format has another number
and so another key: while both run, each spends the whole budget, and 429s lower it for both."""
STEP: Final = Script(files("consumers.state.redis").joinpath("budget.lua").read_text(encoding="utf-8"))
