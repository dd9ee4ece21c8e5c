"""`./dev check [--without-tests]`: format, lint, types, imports, signs of a mess, and the fast tests. The types of
tests take as long as those of the product: with `--without-tests`, as CI runs it, they are checked too.
`--tests-alone`: the fast tests, with the Python that runs this."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

BIN = Path(sys.executable).parent
PACKAGES = ("lanekeeper", "topology", "consumers", "service")
LANE = r"""(["'](critical|normal|batch)["']|\b(CRITICAL|NORMAL|BATCH)\b(\.name)?)"""
KINDS = "critical|normal|batch|due|delay|requests|fallen|dead|events|control"
SIGNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "a settling call outside settle.py and topology/broker",
        r"^(?!.*[._]settler\.).*(\.(ack|nack|reject)\(|basic_(ack|nack|reject)\b)",
        ("consumers/settle.py", "lanekeeper/amqp/", "topology/broker/"),
    ),
    (  # comparing two variables that hold lanes is allowed in every file
        "a decision by a lane's name outside lanes.py",
        rf"(==|!=|\bis|\bis not|\bnot in|\bcase|\b(if|elif|while|and|or|not)\b.*\bin) *[\[({{]*{LANE}|{LANE} *(==|!=)",
        ("topology/lanes.py",),
    ),
    (
        "a queue's name in quotes outside names.py",
        rf"""["'](lane\.|\{{[a-z_.]+\}}\.)({KINDS})\b""",
        ("lanekeeper/contract/names.py",),
    ),
    (
        "the vendor's package outside providers/",
        r"^ *(import|from) anthropic\b",
        ("consumers/providers/",),
    ),
    (
        "the environment read outside service/config",
        r"\bos\.(environ|getenv)|from os import .*(environ|getenv)",
        ("service/config/settings.py", "consumers/flows/process_pool.py"),
    ),
    (
        "OpenTelemetry's SDK or exporters below service",
        r"^ *(import|from) opentelemetry\.(sdk|exporter)",
        ("service/",),
    ),
)
"""Each with its pattern, and the places that may contain it."""
TESTS = (
    ("tests/consumers", "tests/lanekeeper", "tests/topology", "--ignore=tests/consumers/state"),
    ("tests/consumers/state", "tests/service", "tests/fuzz"),
)
"""Two runs beside each other. With pytest-xdist each process would collect all tests, and send a report of each, which
costs half as much again as the tests."""


def begin(*command: str | Path) -> tuple["subprocess.Popen[bytes]", IO[bytes]]:
    output = tempfile.TemporaryFile()  # noqa: SIM115  closed with this process
    environment = {**os.environ, "TESTS_QUICK": "1"}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
    )
    return child, output


def said(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


def passes(*command: str | Path) -> bool:
    child, output = begin(*command)
    if code := child.wait():
        print(said(output))
    return code == 0


def signs() -> bool:
    found = [
        f"{what}:\n{path}:{number}:{line}"
        for package in PACKAGES
        for path in sorted(Path(package).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for what, pattern, exempt in SIGNS
        if re.search(pattern, line) and not str(path).startswith(exempt)
    ]
    print("\n".join(found), end="\n" if found else "")
    return not found


def fast_tests() -> bool:
    options = ("-q", "-p", "no:xdist", "-m", "not slow and not timing", "--schedules", "10")
    runs = [begin(sys.executable, "-m", "pytest", *options, *files) for files in TESTS]
    codes = [child.wait() for child, _ in runs]
    for _, output in runs:
        print(said(output))
    return not any(codes)


def main(*arguments: str) -> int:
    if "--tests-alone" in arguments:
        return 0 if fast_tests() else 1
    typed = () if "--without-tests" in arguments else PACKAGES
    # without its cache it keeps one core busy for long
    typing, types = begin(BIN / "mypy", "--no-error-summary", *typed)
    began_s = time.monotonic()
    checks: dict[str, Callable[[], bool]] = {
        "format": lambda: passes(BIN / "ruff", "format", "--check", "--quiet", "."),
        "lint": lambda: passes(BIN / "ruff", "check", "--quiet", "."),
        "imports": lambda: passes(BIN / "lint-imports", "--no-logo", "--no-cache"),
        "signs of a mess": signs,
    }
    if "--without-tests" not in arguments:
        checks["fast tests"] = fast_tests
    checks["types"] = lambda: typing.wait() == 0 or bool(print(said(types)))
    failed = []
    for name, check in checks.items():
        is_well = check()
        print(f"{name:24} {'ok' if is_well else 'FAILED'} ({time.monotonic() - began_s:.0f} s)", flush=True)
        began_s = time.monotonic()
        if not is_well:
            failed.append(name)
    if failed:
        print(f"./dev: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:  # at a terminal, what runs got it as well
        sys.exit(130)
