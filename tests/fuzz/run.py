"""Fuzz for longer: `./dev fuzz [--minutes N] [TARGET …]`. One process per target, each guided by coverage (atheris).

Findings are written to .cache/fuzz/found: copy one to tests/fuzz/corpus/<target> under a name that says what it is, see
test_targets.py fail, and correct the code. What only widened the coverage is kept in .cache/fuzz/<target> for the next
run.
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

TARGET_NAMES = ("body", "packed", "properties", "table", "stream", "openai", "bedrock", "answer", "response", "control")
CORPUS = Path(__file__).with_name("corpus")
CACHE = Path(".cache/fuzz")
ONE_INPUT_S = 5
"""For an input of at most `INPUT_BYTES`: code that takes longer is not linear."""
INPUT_BYTES = 16_384
SEED_BYTES = 2_000
MEMORY_MIB = 1024


def install_atheris() -> None:
    if find_spec("atheris") is not None:
        return
    print("installing atheris into .venv", file=sys.stderr)
    uv, options = str(Path(sys.executable).with_name("uv")), ("--no-deps", "--require-hashes", "--only-binary=:all:")
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, *options, "-r", "requirements-fuzz.lock"]
    if subprocess.run(command, check=False).returncode:
        sys.exit("./dev: atheris has wheels for Linux on x86-64 alone. The short run needs none: ./dev test tests/fuzz")


def one(target: str, *, seconds: int) -> None:
    """Fuzz one target in this process; the process ends with it."""
    import atheris

    with atheris.instrument_imports(include=["lanekeeper", "topology", "consumers"]):
        from tests.fuzz.targets import TARGETS
    from tests.support.malicious import REQUESTS

    found = CACHE / "found"
    kept = CACHE / target
    for folder in (found, kept):
        folder.mkdir(parents=True, exist_ok=True)
    if target in ("body", "packed"):  # only the beginnings of large seeds
        for number, nasty in enumerate(REQUESTS.values()):
            if nasty.packed == (target == "packed"):
                (kept / f"nasty-{number}").write_bytes((b"" if nasty.packed else b"-") + nasty.body[:SEED_BYTES])
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES}",
        f"-timeout={ONE_INPUT_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-artifact_prefix={found}/{target}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(kept), str(CORPUS / target)], TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev fuzz", description="Fuzz what reads bytes of strangers.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGET_NAMES)}; default: all")
    parser.add_argument("--minutes", type=float, default=5, help="in all; default 5")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGET_NAMES):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; known are {', '.join(TARGET_NAMES)}")
    install_atheris()
    targets = given.targets or list(TARGET_NAMES)
    seconds = max(1, int(given.minutes * 60 / len(targets)))
    if given.one:
        one(given.one, seconds=int(given.minutes * 60))
        return 0
    failed = []
    for target in targets:
        print(f"{target}: {seconds} s", flush=True)
        command = [sys.executable, "-m", "tests.fuzz.run", "--one", target, "--minutes", str(seconds / 60)]
        if subprocess.run(command, check=False).returncode:
            failed.append(target)
    print(f"failed: {', '.join(failed)}; the inputs are in {CACHE / 'found'}" if failed else "nothing was found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
