"""Run Python with tools that are no dependencies: `.ci/tools.py NAME ARGUMENTS …`.

They are those of requirements-NAME.lock, in an environment of their own: .cache/NAME. Exit code 3 if they cannot be
installed."""

import os
import subprocess
import sys
from pathlib import Path

HOUSE = Path(__file__).parents[1]
UV = str(HOUSE / ".venv/bin/uv")
NOT_INSTALLED = 3


def python_with(name: str) -> Path | None:
    """Its Python; None if the tools cannot be installed."""
    python = HOUSE / ".cache" / name / "bin/python"
    lock = HOUSE / f"requirements-{name}.lock"
    record = python.parents[1] / ".dependencies"
    now = f"{HOUSE}\n{lock.read_text()}"
    if python.exists() and record.exists() and record.read_text() == now:
        return python
    print(f"setting up .cache/{name} (again only when its lock changes)", file=sys.stderr)
    making = [UV, "venv", "--quiet", "--clear", "--python", sys.executable, str(python.parents[1])]
    syncing = [UV, "pip", "sync", "--quiet", "--python", str(python), "--require-hashes", "--only-binary", ":all:"]
    for command in (making, [*syncing, str(lock)]):
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            return None
    record.write_text(now)
    return python


def main(name: str, *arguments: str) -> int:
    python = python_with(name)
    if python is None:
        print(f"{name} SKIPPED: its tools could not be installed (see above)")
        return NOT_INSTALLED
    os.execv(python, [str(python), *arguments])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
