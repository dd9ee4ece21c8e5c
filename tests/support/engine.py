"""Docker's engine for the tests that need it: the running one, or else one that is started for them."""

import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from service.private_broker import container, install
from service.private_broker.source import Steps, Unavailable

START_S = 60
STOP_S = 30


class Engine:
    """`ensure` that an engine answers; `stop` the one that was started here. Its log is written to `folder`."""

    def __init__(self, folder: Path, *, steps: Steps) -> None:
        self._log = folder / "dockerd.log"
        self._steps = steps
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Raises Unavailable if no engine answers and none can be started."""
        if container.engine_answers(self._steps):
            return
        if shutil.which("dockerd") is None or shutil.which("docker") is None:
            install.install(
                self._steps, "docker.io", services=("docker.service", "docker.socket", "containerd.service")
            )
        # Without iptables, which not every machine has; Docker's own proxy serves the published ports.
        command = ["dockerd", "--iptables=false", "--ip6tables=false"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        for _ in self._steps.until(START_S):
            if self._process.poll() is not None:
                break
            if container.engine_answers(self._steps):
                return
        said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise Unavailable(f"Docker's engine did not start: {said[-1]}")

    def stop(self) -> None:
        """Stop the engine that `ensure` started; it stops its containers and its own containerd."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._process.kill()
            self._process.wait()
