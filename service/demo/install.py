"""RabbitMQ from Debian's packages, without letting the package start its own service."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.demo.source import FIXED_PATH, Steps, Unavailable

POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian asks it before a package's scripts start a service; 101: not allowed."""
FORBID = "#!/bin/sh\n# made by Lanekeeper while it installs RabbitMQ, removed afterwards\nexit 101\n"
SERVICES = ("rabbitmq-server.service", "epmd.service", "epmd.socket")
INSTALL_S = 600
ADVICE = (
    "no broker to be had: set LANEKEEPER_AMQP_URL, or start Docker, or install RabbitMQ "
    "(Debian and Ubuntu: apt install rabbitmq-server; macOS: brew install rabbitmq)"
)


def can_install() -> bool:
    """Whether this is Debian, or one of its kind, and we are root."""
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def install(steps: Steps) -> None:
    """Install rabbitmq-server. Raises Unavailable with what apt said where that fails.

    When it is interrupted, apt is asked to stop, and does so where the system is whole: at once while it downloads,
    after the package's last step while it installs.
    """
    steps.say("installing RabbitMQ from Debian's packages (once)")
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "--no-install-recommends"]
    with _no_service_started():
        code, said = _apt(steps, [*command, "rabbitmq-server"])
        if code:  # no package lists yet, or old ones
            _apt(steps, ["apt-get", "-q", "update"])
            code, said = _apt(steps, [*command, "rabbitmq-server"])
    if code:
        raise Unavailable(f"apt-get could not install rabbitmq-server:\n{said[-1500:]}")
    if shutil.which("systemctl"):
        steps.run(["systemctl", "disable", "--quiet", *SERVICES], within_s=30)  # nor at the next boot


def _apt(steps: Steps, command: list[str]) -> tuple[int, str]:
    return steps.run(
        ["env", "DEBIAN_FRONTEND=noninteractive", f"PATH={FIXED_PATH}", *command],
        within_s=INSTALL_S,
        end_with=signal.SIGINT,
    )


@contextmanager
def _no_service_started() -> Iterator[None]:
    if POLICY.exists():  # whoever made it has said what may be started
        yield
        return
    POLICY.write_text(FORBID)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
