"""A real Jaeger v2, built from its published Go module and kept in the user's cache; minutes the first time.

    python -m tests.support.jaeger_build       prints where it is

Its user interface is not in the module; its query API is all that tests need.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

VERSION = "v1.76.0"
"""Of the module that has the v2 program."""
MODULE = "github.com/jaegertracing/jaeger"
PROGRAM = f"{MODULE}/cmd/jaeger"
FETCH_S = 300
BUILD_S = 1200
"""Five minutes where both of two cores are free."""


class NotToBeHad(Exception):
    """There is no Go here, or the module cannot be fetched: nothing is wrong with us."""


class BuildFailed(Exception):
    """It should have been built, and was not."""


def jaeger() -> Path:
    """The program, built where it is not there yet: by one process at a time. Raises NotToBeHad, BuildFailed."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaeger", VERSION)
    program = folder / "jaeger"
    if os.access(program, os.X_OK):
        return program
    folder.mkdir(parents=True, exist_ok=True)
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who holds it ends within its limits, or with its process
        if not os.access(program, os.X_OK):
            _build(program)
    return program


def _build(program: Path) -> None:
    if shutil.which("go") is None:
        raise NotToBeHad("Jaeger: needs Go 1.24 or later to be built")
    with tempfile.TemporaryDirectory(prefix="jaeger-build.", dir=program.parent) as made:
        work = Path(made)
        module = work / "go.mod"
        module.write_text("module local/jaeger\n\ngo 1.24\n")
        try:
            answer = _go(["mod", "download", "-json", f"{MODULE}@{VERSION}"], work, within_s=FETCH_S)
        except BuildFailed as error:
            raise NotToBeHad(f"Jaeger: its module cannot be fetched: {error}") from error
        source = Path(json.loads(answer)["Dir"])
        # Its go.mod replaces a module, which `go install` refuses: its requirements become those of a module of ours.
        own, _, rest = (source / "go.mod").read_text().partition("\n")
        assert own == f"module {MODULE}", own
        module.write_text(f"module local/jaeger\n{rest}\nrequire {MODULE} {VERSION}\n")
        (work / "go.sum").write_bytes((source / "go.sum").read_bytes())
        print(f"building Jaeger {VERSION}, {BUILD_S // 60} minutes at most", file=sys.stderr, flush=True)
        _go(["build", "-o", "jaeger", PROGRAM], work, within_s=BUILD_S)
        (work / "jaeger").rename(program)  # in one step: whoever looks meanwhile sees none


def _go(line: Sequence[str], folder: Path, *, within_s: float) -> str:
    environ = {**os.environ, "GOFLAGS": "-mod=mod"}
    command = f"go {line[0]}"
    try:
        done = subprocess.run(
            ["nice", "go", *line],
            cwd=folder,
            env=environ,
            timeout=within_s,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"`{command}` took longer than {within_s:g} s") from error
    if done.returncode:
        told = (done.stderr or done.stdout).strip()[-2000:]
        raise BuildFailed(f"`{command}` ended with {done.returncode}: {told}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(jaeger())
    except (NotToBeHad, BuildFailed) as error:
        sys.exit(str(error))
