"""`./dev up [--keep] [--port N]`: a broker, and `lanekeeper serve` with the simulated provider, until Ctrl-C.

With an ANTHROPIC_API_KEY (in the environment, .env or lanekeeper.toml) it calls Anthropic. It uses the broker at
LANEKEEPER_AMQP_URL if that is set."""

import argparse
import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from lanekeeper.contract.problems import SettingsError
from service.config.loading import load_settings
from service.config.settings import Settings
from tests.support.private_broker import LOOPBACK, say_on_stderr

FOLDER = Path(".cache/up")
ENV = FOLDER / "env"
SAY_EVERY_S = 10
POLL_S = 0.1
WELCOME = """
Lanekeeper runs, {provider}. Its page: {url}

Try in another terminal, in this folder:
  source {env}
  lanekeeper send --stream "Name three rivers."
  lanekeeper send --no-wait --lane batch "Name all rivers."
  lanekeeper top
Your own program: Anthropic's SDK with base_url="{url}", OpenAI's with "{url}v1",
or any AMQP client with the address in LANEKEEPER_AMQP_URL.

Ctrl-C ends it. {data}"""


def main() -> int:
    options = argparse.ArgumentParser(prog="./dev up", description="Run Lanekeeper on this machine until Ctrl-C.")
    options.add_argument("--keep", action="store_true", help=f"keep the data of broker and store in {FOLDER}")
    options.add_argument("--port", type=int, help="of the page and the HTTP API; default: 8080")
    options.add_argument("--with-broker", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    try:
        settings = load_settings()
    except SettingsError as error:
        return refuse(str(error))
    port = settings.gateway.port if chosen.port is None else chosen.port
    if chosen.with_broker:
        return serve(settings, port=port, keeps=chosen.keep)
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = os.open(FOLDER / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    os.set_inheritable(lock, True)  # it is held as long as the process that this one becomes
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return refuse("it runs already in this folder")
    if is_taken(port):
        return refuse(f"port {port} is taken: end what listens there, or choose another: ./dev up --port {port + 1}")
    kept = ("--kept", str(FOLDER)) if chosen.keep else ()
    again = (sys.executable, "-m", "tests.support.up", "--with-broker", *sys.argv[1:])
    return os.execv(sys.executable, [sys.executable, "-m", "tests.support.with_broker", *kept, "--", *again])


def refuse(why: str) -> int:
    print(f"./dev up: {why}", file=sys.stderr)
    return 1


def is_taken(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was in use a moment ago is free
        try:
            trial.bind((LOOPBACK, port))
        except OSError:
            return True
    return False


def serve(settings: Settings, *, port: int, keeps: bool) -> int:
    """Run `lanekeeper serve`, and say how to use it once it is ready."""
    is_real = settings.anthropic_api_key is not None
    with ExitStack() as stack:
        folder = FOLDER if keeps else Path(stack.enter_context(TemporaryDirectory(prefix="lanekeeper-up-")))
        environ = {
            "LANEKEEPER_LOG_LEVEL": "warning",
            "LANEKEEPER_STORE_URL": f"sqlite:///{folder.resolve()}/store.sqlite",
            **{name: value for name, value in os.environ.items() if name.startswith("LANEKEEPER_")},
        }
        stack.callback(ENV.unlink, missing_ok=True)
        write_environment(environ)
        say_on_stderr("starting lanekeeper serve …")
        simulate = () if is_real else ("--simulate",)
        command = (sys.executable, "-m", "service.cli.main", "serve", *simulate, "--port", str(port))
        child = subprocess.Popen(command, env={**os.environ, **environ})

        def stop(number: int, _: FrameType | None) -> None:
            # at a terminal it got Ctrl-C too, and a second signal would end it at once
            if not (number == signal.SIGINT and os.isatty(0)):
                child.send_signal(signal.SIGTERM)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        url = f"http://{LOOPBACK}:{port}/"
        if is_ready(child, url):
            provider = "and calls Anthropic with your key" if is_real else "with a simulated provider"
            data = (
                f"Its data stay in {FOLDER}."
                if keeps
                else "What it has started is removed then; `./dev up --keep` keeps the data."
            )
            say_on_stderr(WELCOME.format(provider=provider, url=url, env=ENV, data=data))
        return child.wait()


def write_environment(environ: dict[str, str]) -> None:
    """A file to be read by a shell, so that commands and applications find this broker and this store."""
    ENV.unlink(missing_ok=True)
    ENV.touch(mode=0o600)
    names = ("LANEKEEPER_AMQP_URL", "LANEKEEPER_MANAGEMENT_URL", "LANEKEEPER_STORE_URL")
    lines = [f"export {name}={shlex.quote(environ[name])}" for name in names if name in environ]
    programs = shlex.quote(str(Path(sys.executable).parent))
    ENV.write_text("\n".join([*lines, f"export PATH={programs}:$PATH", ""]))


def is_ready(child: "subprocess.Popen[bytes]", url: str) -> bool:
    """Wait until it is ready, and say every ten seconds what it waits for. False: it has ended."""
    began_s, said_s = time.monotonic(), 0
    while child.poll() is None:
        why = not_ready(url)
        if why is None:
            return True
        if time.monotonic() - began_s >= said_s + SAY_EVERY_S:
            said_s += SAY_EVERY_S
            say_on_stderr(f"  … waiting: {why} ({said_s} s)")
        time.sleep(POLL_S)  # polling: another process tells us nothing
    return False


def not_ready(url: str) -> str | None:
    """Why its /readyz is not 200; None if it is."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(f"{url}readyz", timeout=2).close()
    except urllib.error.HTTPError as answer:
        reasons = json.load(answer).get("reasons", {})
        return "; ".join(f"{what}: {why}" for what, why in reasons.items() if why) or "not ready"
    except OSError:
        return "it starts"
    return None


if __name__ == "__main__":
    sys.exit(main())
