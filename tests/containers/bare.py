"""`python -m tests.containers.bare`: the README's first command on a machine with nothing but Python, git, bash and
certificates: a container, made from Debian's packages. It has no init that would reap processes. Needs root. Four
minutes; at most twenty."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.engine import Engine, Steps, Unavailable

HOUSE = Path(__file__).parents[2]
IMAGE = "debian-bare:12"
COMMAND = (
    "git -c safe.directory='*' clone -q /src /root/lanekeeper && cd /root/lanekeeper && exec timeout 1200 ./dev demo"
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="lanekeeper-bare-") as folder:
        engine = Engine(Path(folder), steps=Steps(say=print))
        try:
            engine.ensure()
            subprocess.run([HOUSE / "tests/containers/base-image", "bare"], check=True)
            source = Path(folder) / "source"  # in a worktree, HOUSE is no repository by itself
            subprocess.run(["git", "clone", "--quiet", HOUSE, source], check=True)
            run = ("docker", "run", "--rm", "--pull=never", "--network=host", f"--volume={source}:/src:ro")
            return subprocess.run([*run, IMAGE, "bash", "-c", COMMAND], check=False).returncode
        except Unavailable as error:
            print(error)
            return 1
        finally:
            engine.stop()


if __name__ == "__main__":
    sys.exit(main())
