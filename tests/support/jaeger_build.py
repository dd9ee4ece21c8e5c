"""A real Jaeger v2, built from its published Go module and kept in the user's cache; the first time takes minutes.

    python -m tests.support.jaeger_build       prints the program's path

The module does not contain the user interface; tests need only the query API.
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
"""Version of the Go module that contains the v2 program."""
MODULE = "github.com/jaegertracing/jaeger"
PROGRAM = f"{MODULE}/cmd/jaeger"
FETCH_S = 300
BUILD_S = 1200
"""Time limit; it takes five minutes on two idle cores."""


class NotToBeHad(Exception):
    """Go is not installed, or the module cannot be fetched: this is no fault of the build."""


class BuildFailed(Exception):
    """The build failed."""


def jaeger() -> Path:
    """The program's path; builds it if necessary, in one process at a time. Raises NotToBeHad, BuildFailed."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaeger", VERSION)
    program = folder / "jaeger"
    if os.access(program, os.X_OK):
        return program
    folder.mkdir(parents=True, exist_ok=True)
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released within the time limits, or when its process ends
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
        # `go install` refuses a module whose go.mod replaces another; so a module of our own copies its requirements.
        own, _, rest = (source / "go.mod").read_text().partition("\n")
        assert own == f"module {MODULE}", own
        module.write_text(f"module local/jaeger\n{rest}\nrequire {MODULE} {VERSION}\n")
        (work / "go.sum").write_bytes((source / "go.sum").read_bytes())
        print(f"building Jaeger {VERSION}, {BUILD_S // 60} minutes at most", file=sys.stderr, flush=True)
        _go(["build", "-o", "jaeger", PROGRAM], work, within_s=BUILD_S)
        (work / "jaeger").rename(program)  # atomic, so that no process sees an incomplete program


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
