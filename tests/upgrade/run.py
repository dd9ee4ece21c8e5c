"""Upgrades a running service from another revision, with requests in flight on both: none is lost. `./dev upgrade-test`

    ./dev upgrade-test [REVISION]          without one: the latest tag, or else the last release

The old version's worker runs from a checkout of its revision, with the packages of that time. It has running calls,
waiting requests and delayed ones when `topology apply` of the new version runs and a new worker starts beside it; more
requests come; the old one gets SIGTERM; then more come. Both share one Redis."""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.brokers import RunningBroker, Vhost, fresh_vhost
from tests.support.defaults import ENVIRONMENT, stores
from tests.support.faulty_api import FaultyAPI
from tests.support.processes import environment, interpreter, run
from tests.support.redis import redis_server
from tests.support.requester import Ledger
from tests.support.waiting import until

HOUSE = Path(__file__).parents[2]
EACH = 60
"""Requests in each of the three phases."""
WITHIN_S = 120
LANES = ("critical", "normal", "batch")


def revision(given: str | None) -> str | None:
    """The commit to upgrade from; None if the clone has no earlier one."""
    if given is None:
        tagged = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], cwd=HOUSE, capture_output=True, text=True)
        released = ["git", "log", "-1", "--format=%h", "-G^__version__", "--", "lanekeeper/__init__.py"]
        given = tagged.stdout.strip() or subprocess.check_output(released, cwd=HOUSE, text=True).strip()
        known = subprocess.run(["git", "rev-parse", "--verify", "--quiet", given], cwd=HOUSE, capture_output=True)
        if known.returncode:
            return None
    return subprocess.check_output(["git", "rev-parse", "--short", given], cwd=HOUSE, text=True).strip()


async def publish(ledger: Ledger, phase: str) -> None:
    """Calls that take a second, some that fail at first, and some that are delayed."""
    for number in range(EACH):
        kind = ("[[latency: 1s]]", "[[fault: overloaded x1]]", "[[latency: 2s]]", "")[number % 4]
        headers = {"x-lane-delay-ms": 4000} if number % 4 == 3 else {}
        prompt = f"{phase} {number} {kind}"
        await ledger.ask(LANES[number % 3], prompt, id=f"{phase}-{number}", headers=headers)


def packages_of(old: Path) -> Path:
    """Python in an environment with what this revision needs."""
    environment = old / ".venv"
    uv = Path(sys.executable).with_name("uv")
    install = (uv, "pip", "install", "--quiet", "--require-hashes", "--only-binary", ":all:")
    python = environment / "bin/python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    subprocess.run([*install, "--python", python, "-r", old / "requirements.lock"], check=True)
    return python


async def upgrade(vhost: Vhost, old: Path, python: Path, folder: Path, redis: str) -> dict[str, object]:
    """What was seen; raises AssertionError if a request was lost, or answered in two ways."""
    async with FaultyAPI() as api:
        shared = environment(vhost, api, LANEKEEPER_STORE_URL=redis, LANEKEEPER_GRACE_S="20")
        for name in ENVIRONMENT:  # an older version may not know it
            shared.pop(name)
        before = {**shared, "PYTHONPATH": str(old)}
        new = {
            **shared,
            "LANEKEEPER_LANES__BATCH__BATCHES__ENABLED": "false",
        }  # a batch would take longer than this test
        ledger = Ledger(vhost.amqp_url)
        async with interpreter("serve", environ=before, folder=folder, python=python) as first:
            await first.ready(within_s=60)
            async with ledger.writing(), ledger.reading():
                await publish(ledger, "old")
                await until(lambda: len(api.calls) >= 10, within_s=WITHIN_S)
                on_old = len(ledger.lost)
                code, said = await run("topology", "apply", environ=new, folder=folder)
                assert code == 0, said
                async with interpreter("serve", environ=new, folder=folder) as second:
                    await second.ready(within_s=60)
                    await publish(ledger, "both")
                    on_both = len(ledger.lost)
                    first.send(signal.SIGTERM)
                    code = await first.ended(within_s=60)
                    assert code == 0, first.events[-5:]
                    on_new = len(ledger.lost)
                    await publish(ledger, "new")
                    await until(lambda: not ledger.lost, within_s=WITHIN_S)
                    ledger.check()
        calls = Counter(call.prompt for call in api.calls if call.status == 200)
        return {
            "requests": len(ledger.confirmed),
            "open when the new version came": on_old,
            "open on both": on_both,
            "open when the old one had ended": on_new,
            "replies that came twice": ledger.repeated,
            "calls answered twice": sum(count - 1 for count in calls.values()),
        }


def main(from_revision: str) -> None:
    broker = RunningBroker.at(os.environ["LANEKEEPER_AMQP_URL"], os.environ.get("LANEKEEPER_MANAGEMENT_URL"))
    with tempfile.TemporaryDirectory() as name, stores(), fresh_vhost(broker) as vhost:
        folder, old = Path(name), Path(name, "old")
        archive = subprocess.run(["git", "archive", from_revision], cwd=HOUSE, capture_output=True, check=True).stdout
        old.mkdir()
        subprocess.run(["tar", "-x", "-C", old], input=archive, check=True)
        python = packages_of(old)
        with redis_server(folder) as redis:
            began = time.monotonic()
            seen = asyncio.run(upgrade(vhost, old, python, folder, redis.url))
    print(f"from {from_revision}: nothing lost, in {time.monotonic() - began:.0f} s")
    for what, count in seen.items():
        print(f"  {what}: {count}")
    assert seen["open when the new version came"], "nothing was in flight"
    print("1 passed, 0 failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="./dev upgrade-test", description=__doc__)
    parser.add_argument("revision", nargs="?")
    try:
        if (found := revision(parser.parse_args().revision)) is None:
            print("SKIPPED: this clone has no earlier revision to upgrade from")
            sys.exit(0)
        main(found)
    except AssertionError as error:
        sys.exit(f"FAILED: {error}")
