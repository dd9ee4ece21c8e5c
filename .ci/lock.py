"""`./dev lock`: write new lock files, with the newest versions that pyproject.toml allows."""

import subprocess
import sys
from pathlib import Path

UV = Path(sys.executable).with_name("uv")
COMPILE = [
    *(UV, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"),
    *("--no-emit-index-url", "--no-header", "--no-emit-package", "lanekeeper-client", "--upgrade", "pyproject.toml"),
]
BESIDE_OURS = ("judges", "bench")
"""They are installed together with our own dependencies."""


def lock(name: str, *options: str) -> None:
    subprocess.run([*COMPILE, *options, "--output-file", f"requirements{name}.lock"], check=True)


lock("")
for group in ("build", "fuzz", "audit", "docs", "kubernetes", "libraries"):
    lock(f"-{group}", "--group", group)
for group in BESIDE_OURS:
    lock(f"-{group}", "--group", group, "--constraint", "requirements.lock")
constraints = ("--constraint", "requirements.lock", "--constraint", "requirements-build.lock")
lock("-dev", "--extra", "dev", "--group", "build", *constraints)
