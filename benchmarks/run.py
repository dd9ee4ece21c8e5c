"""`./dev bench [NAME] [OPTIONS …]`: runs benchmarks/NAME.py, beside a broker if it needs one; without a name the suite,
with the frameworks that it compares (.cache/bench)."""

import os
import runpy
import shutil
import sys
from pathlib import Path

HOUSE = Path(__file__).parents[1]
WITHOUT_BROKER = ("replay", "scale")
"""In virtual time; the last starts its own."""


def main(*arguments: str) -> None:
    if not arguments or arguments[0].startswith("-"):
        tools = runpy.run_path(str(HOUSE / ".ci/tools.py"))
        if tools["python_with"]("bench") is None:  # without it the suite leaves out the other frameworks, and says so
            shutil.rmtree(HOUSE / ".cache/bench", ignore_errors=True)
        arguments = ("bench", *arguments)
    name, *options = arguments
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    if name not in WITHOUT_BROKER and "--report" not in options:
        command[1:1] = ["-m", "tests.support.with_broker", "--", sys.executable]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(*sys.argv[1:])
