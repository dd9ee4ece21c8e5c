"""A store that cannot be used: the worker says so and is unready, no provider is called, nothing is acknowledged, and
when the store is well again it goes on by itself."""

import asyncio
import json
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

import pytest

from service.gateway.server import Server
from tests.journeys.test_providers import status
from tests.support.brokers import Vhost
from tests.support.defaults import store_url
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.waiting import until


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 99")


def corrupt(path: Path) -> None:
    path.write_bytes(b"this is no database. " * 500)


def a_folder(path: Path) -> None:
    path.mkdir()


def of_somebody_else(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE theirs (a)")


def remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()


async def readiness(health: Server) -> tuple[int, dict[str, str]]:
    def ask() -> tuple[int, dict[str, str]]:
        try:
            with urllib.request.urlopen(f"{health.url}/readyz") as answer:
                return answer.status, json.loads(answer.read())["reasons"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())["reasons"]

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [(newer, "newer"), (corrupt, "not a"), (a_folder, "open"), (of_somebody_else, "something else")],
    ids=["newer version", "corrupt", "a folder", "another program's"],
)
async def test_a_worker_started_without_a_usable_store_waits_and_then_recovers(
    vhost: Vhost, spoil: Callable[[Path], None], word: str
) -> None:
    path = Path(unquote(store_url(vhost.amqp_url).removeprefix("sqlite:///")))
    spoil(path)
    async with (
        serving(vhost, waits=False) as worker,
        requester(vhost) as app,
        Server(worker.parts.reasons, host="127.0.0.1", port=0) as health,
    ):
        await until(lambda: worker.parts.store.trouble)
        asked = await app.publish({"prompt": "hello"}, message_id="m-1")
        await until(lambda: worker.parts.pausing.reasons())
        code, reasons = await readiness(health)
        assert code == 503
        assert word in (await status(worker)).troubles[0], "`lanekeeper status` says it too"
        assert word in reasons["store"], reasons
        assert str(path.name) in reasons["store"], "which file"
        assert not worker.api.calls
        assert not app.finals(asked)
        remove(path)
        assert (await app.final(asked)).status == "ok"
        await until(lambda: worker.is_well)
        assert (await readiness(health))[0] == 200
        assert len(worker.api.calls) == 1


async def test_a_worker_whose_store_is_locked_waits_and_then_recovers(vhost: Vhost) -> None:
    async with serving(vhost) as worker, requester(vhost) as app:
        first = await app.publish({"prompt": "long [[held]]"})
        await until(lambda: worker.api.running == 1)
        path = Path(unquote(store_url(vhost.amqp_url).removeprefix("sqlite:///")))
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            await until(lambda: worker.parts.store.trouble)
            second = await app.publish({"prompt": "later"})
            worker.api.release("long")
            await until(lambda: worker.api.running == 0)
            await asyncio.sleep(0.5)  # nothing must happen meanwhile, so there is no condition to wait for
            assert not app.finals(first), "an answer that is not recorded is not told"
            assert len(worker.api.calls) == 1, "no call without a claim"
            other.execute("ROLLBACK")
        assert (await app.final(first)).status == "ok"
        assert (await app.final(second)).status == "ok"
        assert len(worker.api.calls) == 2, "what was answered meanwhile was kept in hand"
