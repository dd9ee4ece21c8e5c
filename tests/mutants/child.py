"""What one process does: run the tests of a file and say which lines each executes, or run some tests with one change.

The checkout is not edited: the changed file is compiled from its source while it is imported.
"""

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Collection, Generator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

import coverage
import hypothesis
import pytest

from tests.mutants.changes import changes

ROOT = Path(__file__).parents[2]
PACKAGES = ("lanekeeper", "topology", "consumers", "service")
FAST = "not slow and not timing"
"""As in `./dev check`."""
TEST_S = 30
"""After so long a test hangs."""


class Session:
    """A plugin: which tests run, in which order, how each ended, and how long it took."""

    def __init__(
        self, wanted: Sequence[str] = (), known: Collection[str] = (), lines: coverage.Coverage | None = None
    ) -> None:
        self._place = {name: at for at, name in enumerate(wanted)}
        self._known = known
        self._lines = lines
        self.took_s: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Properties try the same examples every time, keep none, and look for no shorter one that fails."""
        hypothesis.settings.register_profile(
            "mutants",
            hypothesis.settings(),
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
            database=None,
            derandomize=True,
        )
        hypothesis.settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Only those that are wanted, and those that only the change makes; the quickest first."""
        if self._place:
            items[:] = [each for each in items if each.nodeid in self._place or each.nodeid not in self._known]
            items.sort(key=lambda each: self._place.get(each.nodeid, len(self._place)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if self._lines is None:
            return (yield)
        self._lines.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._lines.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took_s[report.nodeid] = self.took_s.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)


def tell_lines(test_file: str, told: str) -> None:
    """Write for each test of a file which lines it executes and how long it takes. Of those that fail, write the names
    alone."""
    _settle_in()
    lines = coverage.Coverage(data_file=None, config_file=False, source=[str(ROOT / each) for each in PACKAGES])
    lines.start()
    session = Session(lines=lines)
    _pytest(session, test_file)
    lines.stop()
    data = lines.get_data()
    tests = [each for each in session.took_s if each not in session.failed]
    number = {each: at for at, each in enumerate(tests)}
    by_file: dict[str, dict[int, list[int]]] = {}
    for path in data.measured_files():
        by_line = {
            line: found
            for line, contexts in data.contexts_by_lineno(path).items()
            if (found := [number[each] for each in contexts if each in number])
        }
        if by_line:
            by_file[str(Path(path).relative_to(ROOT))] = by_line
    took_s = [[each, session.took_s[each]] for each in tests]
    _write(told, {"tests": took_s, "failed": session.failed, "lines": by_file})


def tell_verdict(path: str, change: int | None, tests: Sequence[str], known: Collection[str], told: str) -> None:
    """Run tests until one fails, with a change of a file or without any. Write which failed."""
    _settle_in()
    if change is not None:
        sys.meta_path.insert(0, _Changed(path, change))
    session = Session(tests, known)
    code = _pytest(session, "-x", *sorted({each.split("::", 1)[0] for each in tests}))
    ends_well = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    broken = "" if ends_well else f"pytest ends with {code!r}"  # such as a file that cannot be imported
    _write(told, {"failed": session.failed[0] if session.failed else broken, "ran": len(session.took_s)})


def _settle_in() -> None:
    os.setsid()  # what tests start ends with us
    os.chdir(ROOT)
    os.environ["LANEKEEPER_TESTS_QUICK"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.gettempdir()
    sys.dont_write_bytecode = True


def _pytest(session: Session, *given: str) -> int:
    options = [
        "-q",
        "-m",
        FAST,
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--timeout={TEST_S}",
        "--schedules=20",
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return pytest.main([*options, *given], plugins=[session])


def _write(told: str, what: object) -> None:
    Path(told).write_text(json.dumps(what))


class _Changed(SourceFileLoader):
    """Finds and loads the one file that is changed."""

    def __init__(self, path: str, change: int) -> None:
        self._change = change
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        super().__init__(name, str(ROOT / path))

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_bytes())
        changes(tree)[self._change].apply()
        return compile(tree, self.path, "exec", dont_inherit=True)
