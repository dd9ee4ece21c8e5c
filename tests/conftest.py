"""Fixtures for what runs against a real broker.

broker        the broker that tests share: LANEKEEPER_AMQP_URL, else one that is started (`./dev test` starts it once)
vhost         a virtual host of the test's own on it
own_broker    a broker of the test's own, which it may kill and start again

With `--every-version`, as `./dev test` does it, tests in tests/broker and tests/journeys that use one of them run on
RabbitMQ in containers: those marked `every_version` three times, on 3.10, 4.0 and 4.3; those marked `oldest_version`
twice, on 3.10 and 4.3; and the others on the newest (`-k 4.3`: those on one version). With
`--every-test-on-every-version` all of them run three times. If there is no container for a version, its tests are
skipped; in CI they fail. If there is none at all, all tests run on the broker above, once.
"""

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support import keeper
from tests.support.brokers import RunningBroker, Vhost, fresh_vhost
from tests.support.defaults import DELAY_LEVELS, stores
from tests.support.engine import Unavailable
from tests.support.examples import examples
from tests.support.private_broker import PrivateBroker, private_broker
from tests.support.with_broker import private_broker_beside
from topology import delays

DEFAULT = "default"
SLOW_FILE = "\npytestmark = pytest.mark.slow"
ON_EVERY_VERSION = ("tests/broker/", "tests/journeys/")
MISSING = "TESTS_MISSING"
"""The environment variable that tells the workers which versions are unavailable, and why: a JSON object."""
MEMORY = Path("/dev/shm")
LEAST_BYTES = 2 * 1024**3
SAY_EVERY_S = 30
_STACK = pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-version", action="store_true", help="on RabbitMQ in containers: 4.3, marked ones on all")
    parser.addoption("--every-test-on-every-version", action="store_true", help="on RabbitMQ 3.10, 4.0 and 4.3")
    parser.addoption("--schedules", type=int, default=200, metavar="N", help="of faults, in test_schedules.py")


def pytest_configure(config: pytest.Config) -> None:
    """Set how properties are tested. In the session's first process, also start the keeper of brokers and have images
    made, so that no test's time limit includes that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `./dev test &`; processes that tests start inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long an example takes depends on how busy the machine is.
    settings.register_profile(
        "any machine", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")
    # tests log errors by the hundred, and nobody looks at most: rich would colour each line of the source
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
    # SQLite waits for the disk at each commit, which took half of its tests' time; a container may have 64 MB only
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= LEAST_BYTES:
        tempfile.tempdir = str(MEMORY)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
        # where a store is put that no setting names: not below the developer's home
        state = tempfile.TemporaryDirectory(prefix="lanekeeper-tests-state-")
        config.add_cleanup(state.cleanup)
        os.environ["XDG_STATE_HOME"] = state.name
    if _in_containers(config) and not hasattr(config, "workerinput"):
        stack = config.stash[_STACK] = ExitStack()
        with _on_screen(config):
            os.environ[keeper.FOLDER] = stack.enter_context(keeper.keeping())
        missing = {each: why for each in keeper.VERSIONS if (why := _missing(each))}
        os.environ[MISSING] = json.dumps(missing)
        if len(missing) == len(keeper.VERSIONS):
            with _on_screen(config):
                why = missing[keeper.VERSIONS[-1]]
                print(f"no RabbitMQ in containers ({why}): all tests run on the one broker", file=sys.stderr)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """`./dev check` does not import files whose tests are all slow: some build the models of a vendor's client."""
    if os.environ.get("TESTS_QUICK") and collection_path.suffix == ".py":
        return True if SLOW_FILE in collection_path.read_text() else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported out of garbage collection: it stays for the whole session, and looking through it again and
    again took a fifth of the fast tests' time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


class Progress:
    """Says every half a minute how many tests are done, and for how long the others may take."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._total = self._done = self._failed = 0
        self._monotonic = time.monotonic  # tests patch the module's
        self._began_s = self._said_s = self._monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = self._total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._total = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed += report.failed
        self._done += report.when == "teardown"
        now_s = self._monotonic()
        if report.when == "setup" and not self._done:  # what came before was collection
            self._began_s = now_s
        if now_s - self._said_s < SAY_EVERY_S or not self._done:
            return
        self._said_s = now_s
        took_s = now_s - self._began_s
        left_s = took_s / self._done * (self._total - self._done)
        text = f"{self._done} of {self._total} tests in {took_s / 60:.1f} min, about {left_s / 60:.1f} min left"
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(f"{text}, {self._failed} failed" if self._failed else text)


def pytest_unconfigure(config: pytest.Config) -> None:
    if stack := config.stash.get(_STACK, None):
        stack.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`: what uses a broker runs in one process, one after the other, and the rest in another."""
    if config.getoption("dist", "no") == "loadgroup":
        for item in items:
            ring = "with a broker" if item.nodeid.startswith(ON_EVERY_VERSION) else "without"
            item.add_marker(pytest.mark.xdist_group(ring))


def _on_screen(config: pytest.Config) -> AbstractContextManager[object]:
    """A process that is started inside writes to the terminal, and not into what pytest keeps of the output."""
    capturing = config.pluginmanager.getplugin("capturemanager")
    return nullcontext() if capturing is None else capturing.global_and_fixture_disabled()


def _in_containers(config: pytest.Config) -> bool:
    return bool(config.option.every_version or config.option.every_test_on_every_version)


def _missing(version: str) -> str | None:
    try:
        keeper.ask(os.environ[keeper.FOLDER], "image", version)
    except Unavailable as error:
        return str(error)
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Without garbage collection while a failed test's source is parsed.

    What the collector finds may print a traceback, which parses as well; Python 3.11 then raises SystemError (AST
    constructor recursion depth mismatch). That ends the session, and nobody learns which test had failed."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Multiply the tests that use a broker by RabbitMQ's versions."""
    if "broker_version" in metafunc.fixturenames:
        versions: list[object] = [DEFAULT]
        if _in_containers(metafunc.config) and metafunc.definition.nodeid.startswith(ON_EVERY_VERSION):
            every = metafunc.config.option.every_test_on_every_version
            marked = {mark.name for mark in metafunc.definition.iter_markers()}
            missing = json.loads(os.environ[MISSING])
            newest = [each for each in keeper.VERSIONS if each not in missing][-1:]
            wanted: list[str] = newest
            if every or "every_version" in marked:
                wanted = list(keeper.VERSIONS)
            elif "oldest_version" in marked:
                wanted = sorted({keeper.VERSIONS[0], *newest}, key=keeper.VERSIONS.index)
            if newest or _in_ci():
                versions = [_version(each, missing.get(each)) for each in wanted or keeper.VERSIONS[-1:]]
        metafunc.parametrize("broker_version", versions, indirect=True, scope="session")


def _in_ci() -> bool:
    return os.environ.get("CI") == "true"


def _version(version: str, missing: str | None) -> object:
    if missing is None or _in_ci():  # in CI it fails with that reason
        return version
    return pytest.param(version, marks=pytest.mark.skip(reason=missing))


@pytest.fixture(autouse=True)
def _own_stores() -> Iterator[None]:
    with stores():
        yield


@pytest.fixture(scope="session")
def broker_version(request: pytest.FixtureRequest) -> str:
    """`default`, or the version of RabbitMQ that the test runs on."""
    return str(request.param)


@pytest.fixture(scope="session")
def broker(broker_version: str) -> Iterator[RunningBroker]:
    """The broker that all tests share."""
    if broker_version != DEFAULT:
        yield RunningBroker(**_kept("broker", broker_version))
    elif url := os.environ.get("LANEKEEPER_AMQP_URL"):
        yield RunningBroker.at(url, os.environ.get("LANEKEEPER_MANAGEMENT_URL"))
    else:
        with private_broker_beside() as started:
            yield RunningBroker(started.amqp_url, started.management_url, started.version)


@pytest.fixture
def vhost(broker: RunningBroker) -> Iterator[Vhost]:
    """A virtual host for one test: `.amqp_url`, `.management_url`, `.name`, `.version`, `.api(…)`."""
    with fresh_vhost(broker) as made:
        yield made


@pytest.fixture(autouse=True)
def _few_delay_levels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a broker, and without the marks `all_delay_levels` and `timing`: what this process declares has only the
    lowest `DELAY_LEVELS` levels of the delay cascade. The processes that a test starts declare all of them."""
    all_levels = any(map(request.node.get_closest_marker, ("all_delay_levels", "timing")))
    if request.node.nodeid.startswith(ON_EVERY_VERSION) and not all_levels:
        monkeypatch.setattr(delays, "LEVELS", DELAY_LEVELS)


@pytest.fixture
async def own_broker(broker_version: str) -> AsyncIterator[PrivateBroker]:
    """A broker for one test: `await own_broker.kill()`, `await own_broker.start()`."""
    if broker_version == DEFAULT:
        own = private_broker()
    else:
        own = private_broker(sources=["docker"], image=_kept("image", broker_version)["image"])
    async with own as started:
        yield started


def _kept(what: str, version: str) -> dict[str, str]:
    try:
        return keeper.ask(os.environ[keeper.FOLDER], what, version)
    except Unavailable as error:
        pytest.fail(str(error))


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
