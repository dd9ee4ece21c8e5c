"""A private RabbitMQ for the demo, tests and benchmarks: in Docker if its engine has an image, else a node of an
installed server.

    async with private_broker() as broker:
        broker.amqp_url, broker.management_url, broker.version
        await broker.kill()      # SIGKILL, like a power cut
        await broker.start()     # the same data, ports and name

It listens on loopback alone, on free ports, with a generated password. A shell owns it, in the container or beside the
node. Its standard input is a pipe that closes when this process ends, even by SIGKILL; then it removes the broker.

With `kept`, a folder, its data stay: in this folder, or in a volume of Docker's engine whose name is in it.
"""

import asyncio
import base64
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from http.client import HTTPException
from pathlib import Path

from lanekeeper.contract.problems import BrokerUnreachable

Say = Callable[[str], None]
SOURCES = ("docker", "installed")
ADVICE = (
    "no broker to be had: set LANEKEEPER_AMQP_URL, or start Docker, or install RabbitMQ "
    "(Debian and Ubuntu: apt install rabbitmq-server; macOS: brew install rabbitmq)"
)
OFFICIAL = "rabbitmq:4.3-management"
LOCAL = "debian-rabbitmq:4.3-management"
"""For machines that reach no registry: tests/support/rabbitmq-image builds it from Debian's packages."""
DEBIAN_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The server's own script: Debian's wrapper in /usr/sbin requires root and changes the user."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOOPBACK = "127.0.0.1"
USER = "lanekeeper"
ERLANG_ARGUMENTS = "-rabbit dead_letter_worker_publisher_confirm_timeout 15000"
"""If a queue was still starting and did not accept a dead-lettered message, RabbitMQ sends it again after 15 s, not
180 s."""
ANSWER_S = 10
PULL_S = 300
READY_S = 120
POLL_S = 0.05
SAY_EVERY_S = 10.0
LOG_TAIL_BYTES = 1500

# The first line is the password, so that no list of processes and no container's settings show it. Each further line
# kills the node, or starts it again; the end of the lines kills it for good. A node that ends by itself ends the shell.
OWNER = """
trap : INT TERM HUP
read -r RABBITMQ_DEFAULT_PASS
export RABBITMQ_DEFAULT_PASS
exec 3<&0
while "$@" & node=$!; do
  (read -r order <&3; kill -9 $node 2>/dev/null) &
  wait $node
  [ $? = 137 ] && read -r order <&3 || break
done
kill -9 $node 2>/dev/null
"""
# epmd runs in the foreground as a child of the shell. If Erlang started it, it would never end.
OWNER_OF_NODE = f'"$EPMD" & epmd=$!\n{OWNER}kill -9 $epmd; [ -n "$KEPT" ] || rm -rf "$HOME"'


class _Ended(BrokerUnreachable):
    pass


class PrivateBroker:
    """A RabbitMQ that was started for a block of code, and is removed at the end of the block."""

    amqp_url: str
    management_url: str
    version: str

    def __init__(self, kept: Path | None = None) -> None:
        self.owner: subprocess.Popen[bytes] | None = None
        self._kept = kept
        self._password = secrets.token_urlsafe(18) if kept is None else _kept_secret(kept / "password")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object

    async def begin(self, sources: Sequence[str], image: str | None, say: Say) -> None:
        problems = []
        for source in sources:
            try:
                if source == "docker":
                    image = image or await _find_image(say)
                for is_last_try in (False, False, True):
                    try:
                        return await self._try(image if source == "docker" else None, say)
                    except _Ended:
                        # Repeated, because another process may have taken a port before the broker listened on it.
                        if is_last_try:
                            raise
            except BrokerUnreachable as error:
                problems.append(str(error))
        raise BrokerUnreachable("; ".join([ADVICE, *problems]))

    async def _try(self, image: str | None, say: Say) -> None:
        amqp, management, *others = free_ports(4)
        self.amqp_url = f"amqp://{USER}:{self._password}@{LOOPBACK}:{amqp}/"
        self.management_url = f"http://{LOOPBACK}:{management}"
        environment = None
        if image is None:
            server, epmd = _installed()
            environment = _node_environment(epmd, amqp, management, *others, kept=self._kept)
            command = ["sh", "-c", OWNER_OF_NODE, "sh", str(server)]
        else:
            command = _docker_command(image, amqp, management, kept=self._kept)
        self.close()
        # Not an asyncio subprocess: an event loop that is closed early kills its children before they can clean up.
        self.owner = subprocess.Popen(  # noqa: ASYNC220
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # so that Ctrl-C does not reach it
            bufsize=0,
        )
        self._order(self._password)
        await self._ready(say)

    async def kill(self) -> None:
        """Kill the broker with SIGKILL, like a power cut. Raises BrokerUnreachable if it has ended already."""
        self._order("kill")
        while await asyncio.to_thread(version_if_ready, self.management_url, self._password):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def start(self) -> None:
        self._order("start")
        await self._ready(say_on_stderr)

    def close(self) -> None:
        """Remove the broker. This blocks, so that no cancellation interrupts it."""
        if self.owner is not None:
            assert self.owner.stdin is not None
            self.owner.stdin.close()
            try:
                self.owner.wait(READY_S)
            except subprocess.TimeoutExpired:  # Docker's engine hangs
                self.owner.kill()
            self.owner = None

    def _order(self, line: str) -> None:
        assert self.owner is not None
        assert self.owner.stdin is not None
        with suppress(BrokenPipeError):  # `_ready` notices that it has ended
            self.owner.stdin.write(f"{line}\n".encode())

    async def _ready(self, say: Say) -> None:
        assert self.owner is not None
        clock = asyncio.get_running_loop().time
        began_s, said_s = clock(), 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while self.owner.poll() is None:
                    if clock() - began_s >= said_s + SAY_EVERY_S:
                        said_s += SAY_EVERY_S
                        say(f"  … waiting for RabbitMQ to start ({said_s:.0f} s)")
                    if version := await asyncio.to_thread(version_if_ready, self.management_url, self._password):
                        self.version = version
                        return
                    await asyncio.sleep(POLL_S)
                raise _Ended(f"RabbitMQ did not start:\n{self._log_tail()}")
        raise BrokerUnreachable(f"RabbitMQ was not ready within {READY_S} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        return os.pread(self._log.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES)).decode(errors="replace")


def say_on_stderr(text: str) -> None:
    """Print progress on standard error, where it does not mix with output."""
    print(text, file=sys.stderr, flush=True)


@asynccontextmanager
async def private_broker(
    *,
    sources: Sequence[str] = SOURCES,
    image: str | None = None,
) -> AsyncIterator[PrivateBroker]:
    """Run a broker inside the block, from the first of `sources` that has one. Raises BrokerUnreachable."""
    with closing(PrivateBroker()) as broker:
        await broker.begin(sources, image, say_on_stderr)
        yield broker


async def _find_image(say: Say) -> str:
    """The manifest is asked for before a pull, because that fails within seconds where no registry answers."""
    if shutil.which("docker") is None or not await _succeeds("docker", "version", within_s=ANSWER_S):
        raise BrokerUnreachable("Docker: no engine answers")
    for image in (OFFICIAL, LOCAL):
        if await _succeeds("docker", "image", "inspect", image, within_s=ANSWER_S):
            return image
    if await _succeeds("docker", "manifest", "inspect", OFFICIAL, within_s=ANSWER_S):
        say(f"pulling {OFFICIAL}")
        if await _succeeds("docker", "pull", "--quiet", OFFICIAL, within_s=PULL_S):
            return OFFICIAL
    raise BrokerUnreachable(f"Docker: {OFFICIAL} is not here and cannot be pulled")


async def _succeeds(*command: str, within_s: float) -> bool:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
    )
    try:
        async with asyncio.timeout(within_s):
            return await process.wait() == 0
    except TimeoutError:
        return False
    finally:
        with suppress(ProcessLookupError):
            process.kill()


def _kept_secret(file: Path) -> str:
    """A secret that is made once, because the broker keeps the password of its first start."""
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(18))
    return file.read_text()


def _docker_command(image: str, amqp_port: int, management_port: int, *, kept: Path | None = None) -> list[str]:
    name = f"lanekeeper-{secrets.token_hex(6) if kept is None else _kept_secret(kept / 'name')}"
    data = () if kept is None else (f"--volume={name}:/var/lib/rabbitmq",)
    return [
        *("docker", "run", "--rm", "--interactive", "--pull=never", f"--name={name}"),
        f"--hostname={name}",  # the host name is part of the node's name, and so of the path to its data
        *data,
        f"--env=RABBITMQ_DEFAULT_USER={USER}",
        f"--env=RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS={ERLANG_ARGUMENTS}",
        "--env=detached=true",  # makes the server's script replace itself with Erlang, which the shell then can kill
        f"--publish={LOOPBACK}:{amqp_port}:5672",
        f"--publish={LOOPBACK}:{management_port}:15672",
        *("--entrypoint=sh", image, "-c", OWNER, "sh", "docker-entrypoint.sh", "rabbitmq-server"),
    ]


def _installed() -> tuple[Path, Path]:
    def find(name: str) -> str | None:  # Debian has some programs in /usr/sbin, which is not on every user's PATH
        return shutil.which(name) or shutil.which(name, path=SYSTEM_PATH)

    server = str(DEBIAN_SERVER) if os.access(DEBIAN_SERVER, os.X_OK) else find("rabbitmq-server")
    epmd = find("epmd")
    if server is None or epmd is None:
        raise BrokerUnreachable("no rabbitmq-server is installed")
    return Path(server), Path(epmd)


def _node_environment(
    epmd: Path, amqp: int, management: int, distribution: int, epmd_port: int, *, kept: Path | None
) -> dict[str, str]:
    """All of it, so that neither the user's RABBITMQ_* nor a file in /etc has an effect."""
    folder = Path(tempfile.mkdtemp(prefix="lanekeeper-broker-")) if kept is None else kept
    (folder / "enabled_plugins").write_text("[rabbitmq_management].\n")
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = {LOOPBACK}:{amqp}\n"
        f"management.tcp.ip = {LOOPBACK}\n"
        f"management.tcp.port = {management}\n"
        "disk_free_limit.absolute = 50MB\n"
    )
    # a bare machine has no /etc/hosts
    (folder / "inetrc").write_text('{host, {127,0,0,1}, ["localhost"]}.\n{lookup, [file, native]}.\n')
    return {
        "ERL_INETRC": str(folder / "inetrc"),
        "ERL_CRASH_DUMP": str(folder / "erl_crash.dump"),
        "PATH": f"{epmd.parent}:{SYSTEM_PATH}",
        "HOME": str(folder),  # for Erlang's cookie
        "LANG": "C.UTF-8",
        "EPMD": str(epmd),
        "ERL_EPMD_PORT": str(epmd_port),
        "ERL_EPMD_ADDRESS": LOOPBACK,
        "KEPT": "" if kept is None else "yes",
        # the node's name is part of the path to its data
        "RABBITMQ_NODENAME": f"lanekeeper-{epmd_port if kept is None else 'up'}@localhost",
        "RABBITMQ_DEFAULT_USER": USER,
        "RABBITMQ_DIST_PORT": str(distribution),
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
        "detached": "true",
    }


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports on loopback on which nothing listens."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind((LOOPBACK, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def version_if_ready(management_url: str, password: str) -> str | None:
    """The broker's version if its management API answers, and says that it accepts AMQP connections; else None."""
    token = base64.b64encode(f"{USER}:{password}".encode()).decode()
    request = urllib.request.Request(f"{management_url}/api/overview", headers={"Authorization": f"Basic {token}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2) as answer:
            overview = json.load(answer)
        accepts = any(listener["protocol"] == "amqp" for listener in overview["listeners"])
        return str(overview["rabbitmq_version"]) if accepts else None
    except (OSError, HTTPException, ValueError, KeyError):
        return None
