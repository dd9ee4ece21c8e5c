"""Runs a private node of an installed RabbitMQ. It has its own folder, name, ports and epmd, so that the system's node
is not affected.

The server's script is run directly, not Debian's wrapper in /usr/sbin, which requires root and changes the user. Its
whole environment is set here, so that no RABBITMQ_* variables of the user and no file in /etc have an effect.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from service.private_broker.descendants import kill_all
from service.private_broker.source import (
    ERLANG_ARGUMENTS,
    FIXED_PATH,
    LOOPBACK,
    USER,
    Access,
    Steps,
    TooSlow,
    Unavailable,
    free_ports,
    version_if_ready,
)

DEBIAN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
START_S = 60
LOG_TAIL_CHARS = 1500


def installed() -> tuple[Path, Path] | None:
    """If RabbitMQ is installed: the paths of its server script and of Erlang's epmd. None if one of the two is
    missing."""
    server = DEBIAN if os.access(DEBIAN, os.X_OK) else _which("rabbitmq-server")
    epmd = _which("epmd")
    return None if server is None or epmd is None else (server, epmd)


def _which(name: str) -> Path | None:
    # Debian has some programs in /usr/sbin, which is not on every user's PATH.
    found = shutil.which(name) or shutil.which(name, path=FIXED_PATH)
    return None if found is None else Path(found)


class Node:
    """A private broker that runs an installed RabbitMQ as a node of its own. `folder` contains all files that it
    writes; whoever created the folder removes it."""

    def __init__(self, folder: Path, *, steps: Steps) -> None:
        programs = installed()
        if programs is None:
            raise Unavailable("no rabbitmq-server is installed")
        self._server, self._epmd = programs
        self._folder = folder
        self._steps = steps
        self._processes: list[subprocess.Popen[bytes]] = []
        amqp, management, self._distribution_port, self._epmd_port = free_ports(4)
        self.access = Access(amqp_port=amqp, management_port=management)
        self._configure()

    def start(self) -> str:
        """Start the node, wait until it is ready, and return RabbitMQ's version. After `kill`, the node starts again
        with the same data, ports and name. Raises Unavailable with the end of the node's log."""
        environment = self._environment()
        epmd = [str(self._epmd), "-port", str(self._epmd_port), "-address", LOOPBACK]
        # epmd runs in the foreground as a child of this process. If Erlang started it, it would never end.
        self._processes = [self._run(epmd, environment), self._run([str(self._server)], environment)]
        for _ in self._steps.until(START_S):
            if self._processes[1].poll() is not None:
                raise Unavailable(f"RabbitMQ did not start:\n{self._log_tail()}")
            if version := version_if_ready(self.access):
                return version
        raise TooSlow(f"RabbitMQ was not ready within {START_S} s:\n{self._log_tail()}")

    def kill(self) -> None:
        """Kill the node and the processes that it started with SIGKILL, as a power cut would end them. The node's data
        stays."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes = []
        kill_all()

    remove = kill

    def _run(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if sys.platform == "linux" and shutil.which("setpriv"):
            command = ["setpriv", "--pdeathsig", "KILL", *command]  # dies with the guard, even if that is killed
        with (self._folder / "output").open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self._folder,
                start_new_session=True,
            )

    def _configure(self) -> None:
        (self._folder / "enabled_plugins").write_text("[rabbitmq_management].\n")
        (self._folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = {LOOPBACK}:{self.access.amqp_port}\n"
            f"management.tcp.ip = {LOOPBACK}\n"
            f"management.tcp.port = {self.access.management_port}\n"
            f"default_user = {USER}\n"
            f"default_pass = {self.access.password}\n"
            "disk_free_limit.absolute = 50MB\n"
        )

    def _environment(self) -> dict[str, str]:
        folder = self._folder
        return {
            "PATH": f"{self._epmd.parent}:{FIXED_PATH}",
            "HOME": str(folder),  # for Erlang's cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_NODENAME": f"lanekeeper-{self._epmd_port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "no-rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(folder / "conf.d"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "config"),
            "RABBITMQ_LOGS": "-",
            # "u": unbound. With schedulers bound to cores, several brokers on a machine would all use the first cores.
            "RABBITMQ_SCHEDULER_BIND_TYPE": "u",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                f"-start_epmd false -kernel inet_dist_use_interface {{127,0,0,1}} {ERLANG_ARGUMENTS}"
            ),
            # Makes the script replace itself with Erlang, so that the process we watch is the node.
            "detached": "true",
        }

    def _log_tail(self) -> str:
        return (self._folder / "output").read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
