"""`./dev test [ARGUMENTS OF PYTEST]`: all tests except the faults under load; with arguments only those, on one broker.

First those that need no broker, so that results come soon; those that measure time run last."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.debian import can_install

PYTEST = (sys.executable, "-m", "pytest")
EVERY_VERSION = ("--every-version", "--every-test-on-every-version")
BROKERS = ("--every-version", "--ignore=tests/faults/test_under_load.py", "--ignore=tests/faults/test_cluster.py")
AT_ONCE = ("-n", "8", "--dist", "worksteal", "-m", "not timing")
"""Eight processes on two cores, because tests mostly wait."""
STEPS = (
    (
        "tests without a broker",
        (*AT_ONCE, "tests/consumers", "tests/fuzz", "tests/lanekeeper", "tests/service", "tests/topology"),
    ),
    ("tests with brokers", (*AT_ONCE, *BROKERS, "tests/broker", "tests/faults", "tests/journeys")),
    # those with a broker run one after the other (one load group), a second process runs the others
    ("tests that measure time", (*BROKERS, "-n", "2", "--dist", "loadgroup", "-m", "timing")),
)
PROGRAMS = {
    "dockerd": "docker.io", "debootstrap": "debootstrap", "rabbitmq-server": "rabbitmq-server",
    "redis-server": "redis-server", "chromium": "chromium", "prometheus": "prometheus",
}  # fmt: skip
"""What tests start, by its package."""
INTERRUPTED = 2  # pytest's exit code; above are those of runs that could not begin


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_what_is_missing() -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None]
    if missing and can_install():
        say(f"what tests need will be installed from Debian's packages (up to 1 GB): {', '.join(missing)}")
    elif missing:
        say(f"not installed, so that tests which need it are skipped: {', '.join(missing)}")
    for file in (".env", "lanekeeper.toml"):
        if Path(file).exists():
            say(f"{file} is here: tests that load settings may read it")


def main(*arguments: str) -> int:
    if arguments:
        run = [*PYTEST, "-n", "3", *arguments]
        if not any(each in arguments for each in EVERY_VERSION):  # each version has its own container
            run[1:1] = ["-m", "tests.support.with_broker", "--", sys.executable]
        os.execv(sys.executable, run)
    say_what_is_missing()
    worst = 0
    for name, options in STEPS:
        say(name)
        code = subprocess.run([*PYTEST, *options], check=False).returncode
        if code >= INTERRUPTED or code < 0:
            return 130 if code == INTERRUPTED else code
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
