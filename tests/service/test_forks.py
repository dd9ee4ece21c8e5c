"""The forks that journeys use as processes (tests/support/forks.py) behave like processes started anew."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support import forks

pytestmark = pytest.mark.slow
PROBE = """
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), sys.stdin.read(), __name__]))
print("an error", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "waits.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    return tmp_path


async def test_it_has_its_own_arguments_environment_folder_and_streams_and_its_exit_code_is_told(folder: Path) -> None:
    environ = {"ONLY": "this"}
    process = await forks.begin("probe", "-x", "y", environ=environ, folder=folder, text="given")
    out, err = await process.communicate()

    assert json.loads(out) == [["-x", "y"], environ, str(folder), "given", "__main__"]
    assert (err, await process.wait(), process.returncode) == (b"an error\n", 7, 7)
    assert "ONLY" not in os.environ


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_signal_ends_it_and_is_told(folder: Path, number: signal.Signals) -> None:
    process = await forks.begin("waits", environ={}, folder=folder)
    assert await process.stdout.readline() == b"waits\n"
    assert process.returncode is None
    process.send_signal(number)
    assert await process.wait() == -number
    process.send_signal(number)
