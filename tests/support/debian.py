"""Debian's packages for the demo and the tests. It needs Python alone, because `./dev` runs it before there is an
environment:

    python3 tests/support/debian.py PACKAGE …    install what is missing
    python3 tests/support/debian.py --broker     see whether a broker can be started, and install RabbitMQ if it helps

Only root on Debian (or Ubuntu) can. Services of a package are started neither now nor at the next boot.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

HOUSE = Path(__file__).parents[2]
LOG = HOUSE / ".cache" / "apt.log"
NO_SERVICES = Path("/usr/sbin/policy-rc.d")
"""Forbids the start of services, if it ends with 101."""
UNREACHED = re.compile(
    r"Temporary failure resolving|Could not (resolve|connect)|Connection (timed out|refused)|Network is unreachable"
    r"|Cannot initiate the connection|Failed to fetch"
)
APT = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")
IMAGES = ("rabbitmq:4.3-management", "debian-rabbitmq:4.3-management")
ADVICE = (
    "no broker to be had: set LANEKEEPER_AMQP_URL, or start Docker, or install RabbitMQ (Debian and Ubuntu, as root: "
    "apt install rabbitmq-server; macOS: brew install rabbitmq)"
)


class NotInstalled(Exception):
    """Says in one sentence why not."""


def can_install() -> bool:
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def install(*packages: str) -> None:
    """Raises NotInstalled. Signals are noted and followed only at the end: apt must not be interrupted."""
    names = " and ".join(packages)
    if not can_install():
        raise NotInstalled(f"{names} is not installed, and can be only by root on Debian or Ubuntu")
    print(f"installing {names} from Debian's packages", file=sys.stderr, flush=True)
    told: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        told.append(number)

    former = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    LOG.parent.mkdir(exist_ok=True)
    try:
        with LOG.open("w") as log:
            done = _install(packages, log.fileno())
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if told:
        sys.exit(128 + told[0])
    if not done:
        raise NotInstalled(f"{names} could not be installed: {_why()} (all that apt wrote is in {LOG})")


def _install(packages: tuple[str, ...], log: int) -> bool:
    has_policy = NO_SERVICES.exists()  # one that exists is the decision of the owner
    starts = _starts_at_boot()
    if not has_policy:
        NO_SERVICES.write_text("#!/bin/sh\nexit 101\n")
        NO_SERVICES.chmod(0o755)
    try:
        installing = [*APT, "install", "-y", "--no-install-recommends", *packages]
        return _run(installing, log) or (_run([*APT, "update"], log) and _run(installing, log))
    finally:
        if not has_policy:
            NO_SERVICES.unlink()
        for link in _starts_at_boot() - starts:
            link.unlink()


def _starts_at_boot() -> set[Path]:
    """The links by which systemd, or another init, starts a service at boot."""
    return {*Path("/etc/systemd/system").glob("*.wants/*"), *Path("/etc").glob("rc[2-5S].d/S*")}


def _run(command: list[str], log: int) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return (
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            check=False,
        ).returncode
        == 0
    )


def _why() -> str:
    said = LOG.read_text(errors="replace")
    if UNREACHED.search(said):
        return "Debian's packages cannot be reached from this machine"
    errors = [line for line in said.splitlines() if line.startswith("E: ")]
    return errors[-1].removeprefix("E: ") if errors else "apt failed"


def has_broker() -> bool:
    """Whether a broker is set, or `tests/support/private_broker.py` can start one."""
    if os.environ.get("LANEKEEPER_AMQP_URL"):
        return True
    if any(_succeeds("docker", "image", "inspect", image) for image in IMAGES):
        return True
    path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
    return shutil.which("rabbitmq-server", path=path) is not None or _succeeds(
        "docker", "manifest", "inspect", IMAGES[0]
    )


def _succeeds(*command: str) -> bool:
    try:
        run = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0


def see_to_a_broker() -> None:
    """Raises NotInstalled if there is no broker, and none can be installed."""
    if not has_broker():
        if not can_install():
            raise NotInstalled(ADVICE)
        install("rabbitmq-server")


def main(*arguments: str) -> int:
    try:
        if arguments == ("--broker",):
            see_to_a_broker()
        else:
            install(*arguments)
    except NotInstalled as error:
        print(f"./dev: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
