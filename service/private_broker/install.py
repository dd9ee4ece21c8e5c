"""Installs programs from Debian's packages, and prevents a package from starting its service."""

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from service.private_broker.source import FIXED_PATH, Steps, Unavailable

POLICY = Path("/usr/sbin/policy-rc.d")
"""The path of a script that Debian runs before a package starts a service; its exit code 101 forbids the start."""
FORBID = "#!/bin/sh\n# made by Lanekeeper while it installs a package, removed afterwards\nexit 101\n"
SERVICES = ("rabbitmq-server.service", "epmd.service", "epmd.socket")
"""The services that the package rabbitmq-server would start at the next boot."""
INSTALL_S = 600
ADVICE = (
    "no broker to be had: set LANEKEEPER_AMQP_URL, or start Docker, or install RabbitMQ "
    "(Debian and Ubuntu: apt install rabbitmq-server; macOS: brew install rabbitmq)"
)


def can_install() -> bool:
    """Whether packages can be installed here: this process runs as root, on Debian or a derivative."""
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def install(steps: Steps, package: str, *, services: Sequence[str] = ()) -> None:
    """Install a Debian package without starting its services, and disable those in `services` for the next boot. Raises
    Unavailable with apt's output.

    If this function is interrupted, apt gets SIGINT, and stops in a consistent state: at once during the download, or
    after the package's last step during the installation.
    """
    if not can_install():
        raise Unavailable(f"{package} is not installed, and can be only by root on Debian")
    steps.say(f"installing {package} from Debian's packages (once)")
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "--no-install-recommends", package]
    with _no_service_started():
        code, output = _apt(steps, command)
        if code:  # the package lists may be missing or old
            _apt(steps, ["apt-get", "-q", "update"])
            code, output = _apt(steps, command)
    if code:
        raise Unavailable(f"apt-get could not install {package}:\n{output[-1500:]}")
    if services and shutil.which("systemctl"):
        steps.run(["systemctl", "disable", "--quiet", *services], within_s=30)


def _apt(steps: Steps, command: list[str]) -> tuple[int, str]:
    return steps.run(
        ["env", "DEBIAN_FRONTEND=noninteractive", f"PATH={FIXED_PATH}", *command],
        within_s=INSTALL_S,
        end_with=signal.SIGINT,
    )


@contextmanager
def _no_service_started() -> Iterator[None]:
    if POLICY.exists():  # the machine's owner has already decided what may start
        yield
        return
    POLICY.write_text(FORBID)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
