"""`python -m tests.support.reborn COMMAND …`: runs `lanekeeper COMMAND …`, and again whenever it was killed.

It does what a service manager does, but faster: everything is imported once, and each run is a fork. Each run begins
with a line `life PID` on standard output. When the command ends by itself, this ends with the same exit code.
"""

import ctypes
import os
import signal
import sys
from functools import partial

import service.cli.main
import service.cli.serve
import service.simulated.app
import service.telemetry.exporters
import service.worker.running

_PR_SET_PDEATHSIG = 1


def _pass_on(life: int, number: int, _: object) -> None:
    os.kill(life, number)


def main() -> int:
    while True:
        if (life := os.fork()) == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os._exit(service.cli.main.run(sys.argv[1:]))
        print(f"life {life}", flush=True)
        signal.signal(signal.SIGTERM, partial(_pass_on, life))
        _, status = os.waitpid(life, 0)
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
