"""Do the fast tests see a change? `./dev mutants [--count N] [--seed N] [PATH[:LINE] …]`

Changes some places of the code at random, one at a time, and runs the fast tests that execute the changed lines. A
change that no test sees has survived: write a test that sees it, or make the code simpler. Changes that cannot be seen
from outside are listed in equivalent.txt, with a reason.

Which test executes which lines is found out first and kept in .cache/mutants: some minutes after a change of the code,
seconds after a change of tests.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants import child
from tests.mutants.changes import Change, changes

CODE = (
    "lanekeeper/contract",
    "lanekeeper/telemetry",
    "lanekeeper/amqp/driver",
    "lanekeeper/options.py",
    "topology",
    "consumers",
    "service/config",
    "service/telemetry",
    "service/checks/production.py",
)
"""Code that needs no broker …"""
NOT_CODE = (
    "lanekeeper/amqp/driver/alarms.py",
    "lanekeeper/amqp/driver/border.py",
    "lanekeeper/amqp/driver/quiet.py",
    "topology/broker",
    "consumers/providers/anthropic.py",
    "consumers/providers/cloud.py",
    "consumers/state/redis",
    "service/telemetry/exporters.py",
)
"""… without what needs a broker, a provider or Redis."""
TESTS = ("tests/lanekeeper", "tests/topology", "tests/consumers", "tests/service", "tests/fuzz")
PAGES = (
    "tests/service/test_limits_page.py::test_docs_limits_is",
    "tests/service/test_settings_page.py::test_docs_settings_is",
)
"""They compare limits and defaults with the documents, by importing every file."""
CACHE = child.ROOT / ".cache/mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
LIBRARIES = (
    "aiohttp",
    "anthropic",
    "aio_pika",
    "pydantic_settings",
    "redis.asyncio",
    "rich",
    "structlog",
    "typer",
    "uvloop",
)
"""What takes long to import is imported once, before the processes for the tests are forked."""
AT_ONCE = 2
TESTS_S = 120.0
"""So many seconds of tests are tried at most for one mutant."""
HANGS_S = 300.0
"""Longer than all of these may take on a busy machine."""
SECOND_LOOKS = 3


class Mutant(NamedTuple):
    path: str
    number: int
    change: Change

    def __str__(self) -> str:
        return f"{self.path}:{self.change.lines.start}  {self.change}"

    @property
    def key(self) -> str:
        """How equivalent.txt names it: lines may move."""
        return f"{self.path}  {self.change}"


class Lines:
    """Which tests execute which lines."""

    def __init__(self, told: Iterable[dict[str, Any]]) -> None:
        self.took_s: dict[str, float] = {}
        self.failing: set[str] = set()
        """The tests that fail without any change."""
        self._by_file: dict[str, list[tuple[list[str], dict[str, list[int]]]]] = {}
        for each in told:
            self.took_s.update(each["tests"])
            self.failing.update(each.get("failed", ()))
            for path, lines in each["lines"].items():
                self._by_file.setdefault(path, []).append(([name for name, _ in each["tests"]], lines))

    def of(self, path: str, lines: Iterable[int] | None = None) -> set[str]:
        """The tests that execute one of these lines of a file, or any."""
        found: set[str] = set()
        for names, by_line in self._by_file.get(path, []):
            for line in by_line if lines is None else map(str, lines):
                found.update(names[at] for at in by_line.get(line, ()))
        return found

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that may see it: first those that surely do, the quickest first. `PAGES` are last: they count only
        if no other test sees it."""
        change = mutant.change
        groups = [self.of(mutant.path, change.lines)]
        if (names := change.defines) is not None:
            groups[0] |= {test for name in names for path, lines in uses(name) for test in self.of(path, lines)}
            groups.append({each for each in self.took_s if any(name in text(each.split("::")[0]) for name in names)})
            folder = mutant.path.rpartition("/")[0]
            groups.append({test for path in self._by_file if path.startswith(folder) for test in self.of(path)})
        pages = {each for each in self.took_s if each.startswith(PAGES)}
        groups = [*(group - pages for group in groups), *([] if change.defines is None else [pages])]
        chosen: dict[str, None] = {}
        for group in groups:
            left_s = TESTS_S / len(groups)
            for each in sorted(group, key=lambda name: (self.took_s[name], name)):
                left_s -= self.took_s[each]
                if left_s < 0:
                    break
                chosen[each] = None
        return list(chosen)


@cache
def text(path: str) -> str:
    return (child.ROOT / path).read_text()


@cache
def uses(name: str) -> list[tuple[str, set[int]]]:
    """The lines of the whole code that use a name."""
    return [
        (path, lines)
        for path in code(child.PACKAGES)
        if name in text(path)
        and (
            lines := {
                each.lineno
                for each in ast.walk(ast.parse(text(path)))
                if (isinstance(each, ast.Name) and each.id == name)
                or (isinstance(each, ast.Attribute) and each.attr == name)
            }
        )
    ]


def code(folders: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    found = [
        str(path.relative_to(child.ROOT))
        for each in folders
        for path in ([child.ROOT / each] if each.endswith(".py") else (child.ROOT / each).rglob("*.py"))
    ]
    return sorted(each for each in found if not each.startswith(tuple(without)))


def mutants(wanted: Sequence[str]) -> Iterator[Mutant]:
    places = [each.partition(":")[::2] for each in wanted]
    for path in code(CODE, NOT_CODE):
        for number, change in enumerate(changes(ast.parse(text(path)))):
            if not places or any(
                path.startswith(place) and (not line or int(line) in change.lines) for place, line in places
            ):
                yield Mutant(path, number, change)


class Children:
    """Processes in which tests run, a few at once."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*LIBRARIES, child.__name__])
        self._count = 0

    def tell(self, target: Callable[..., None], *given: object) -> dict[str, Any] | None:
        """What one process tells; None if it hung."""
        self._count += 1
        told = Path(self._folder, f"{self._count}-{os.urandom(4).hex()}.json")
        process = self._context.Process(target=target, args=(*given, str(told)))
        process.start()
        process.join(HANGS_S)
        hung = process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        if hung:
            return None
        if not told.exists():
            return {"failed": f"the process ends with {process.exitcode}"}
        return json.loads(told.read_text())  # type: ignore[no-any-return]


def find_lines(children: Children) -> Lines:
    """From the cache, or by running what has changed."""
    CACHE.mkdir(parents=True, exist_ok=True)
    files = sorted(
        str(path.relative_to(child.ROOT)) for each in TESTS for path in (child.ROOT / each).rglob("test_*.py")
    )
    base = hashlib.sha256("".join(text(each) for each in code(child.PACKAGES)).encode())

    def kept(file: str) -> Path:
        digest = base.copy()
        digest.update((file + text(file)).encode())
        return CACHE / f"{digest.hexdigest()[:32]}.json"

    def find(file: str) -> dict[str, Any]:
        if not kept(file).exists():
            began_s = time.monotonic()
            told = children.tell(child.tell_lines, file)
            if told is None or "lines" not in told:
                raise SystemExit(f"{file}: {told}")
            kept(file).write_text(json.dumps(told))
            print(f"  {file}: {len(told['tests'])} tests, {time.monotonic() - began_s:.0f} s", flush=True)
        return json.loads(kept(file).read_text())  # type: ignore[no-any-return]

    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = Lines(threads.map(find, files))
    now = {kept(file) for file in files}
    for old in CACHE.glob("*.json"):
        if old not in now:
            old.unlink()
    return found


def judge(mutant: Mutant, lines: Lines, children: Children) -> tuple[str, str]:
    """`caught`, `survived` or `no test`, and by what or how many."""
    tests = lines.tests(mutant)
    if not tests:
        return "no test", ""
    for _ in range(SECOND_LOOKS):
        files = {each.split("::")[0] for each in tests}
        known = [each for each in (*lines.took_s, *lines.failing) if each.split("::")[0] in files]
        told = children.tell(child.tell_verdict, mutant.path, mutant.number, tests, known)
        if told is None:
            return "caught", "it hangs"
        failed = told["failed"]
        if not failed:
            return "survived", f"{told['ran']} tests"
        if failed not in tests:
            return "caught", failed
        without = children.tell(child.tell_verdict, mutant.path, None, [failed], known)
        if without is not None and not without["failed"]:
            return "caught", failed
        tests.remove(failed)  # it fails without the change as well
    return "survived", "but for tests that fail without the change as well"


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev mutants", description="Do the fast tests see a change of the code?")
    parser.add_argument("where", nargs="*", metavar="PATH[:LINE]", help="only there; default: all that needs no broker")
    parser.add_argument("--count", type=int, default=100, help="how many, chosen at random; 0 for all; default 100")
    parser.add_argument("--seed", type=int, default=1, help="of the choice; default 1")
    given = parser.parse_args()
    found = list(mutants(given.where))
    known = {line.split("#")[0].strip() for line in EQUIVALENT.read_text().splitlines()}
    if 0 < given.count < len(found):
        found = sorted(random.Random(given.seed).sample(found, given.count), key=lambda each: (each.path, each.number))
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as threads:
        children = Children(folder)
        lines = find_lines(children)
        for test in sorted(lines.failing):
            print(f"fails without any change: {test}", flush=True)

        def look(mutant: Mutant) -> tuple[str, str]:
            return ("equivalent", "") if mutant.key in known else judge(mutant, lines, children)

        for mutant, (verdict, by) in zip(found, threads.map(look, found), strict=True):
            counts[verdict] += 1
            counts["by a page"] += verdict == "caught" and by.startswith(PAGES)
            print(f"{verdict:10} {mutant}    {by}", flush=True)
    by_page = counts.pop("by a page")
    judged = counts.total() - counts["equivalent"]
    print(f"\n{counts['caught']} of {judged} caught ({100 * counts['caught'] / max(judged, 1):.0f} %)", dict(counts))
    print(f"{by_page} of them only by the comparison of limits and settings with their pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
