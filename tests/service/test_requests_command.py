"""`lanekeeper requests …`: what it reads from the store, prints and refuses."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from consumers.state.base import Identity, Labels
from consumers.state.sqlite.store import SqliteStore
from service.cli import main
from tests.support.completions import answered, failed

pytestmark = pytest.mark.slow


async def test_requests_are_listed_and_cancelled_by_a_filter_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("LANEKEEPER_", "ANTHROPIC_", "OTEL_")):
            monkeypatch.delenv(name)
    file = tmp_path / "store.sqlite"

    async def command(*line: str) -> tuple[int, str]:
        capsys.readouterr()
        code = await asyncio.to_thread(main.run, ["requests", *line, "--set", f"store_url=sqlite:///{file}"])
        out, err = capsys.readouterr()
        return code, out + err

    async with SqliteStore(file, namespace="lane") as store:
        labels: Any = {"labels": Labels("batch", "night", "haiku")}
        for id in ("later-1", "later-2"):
            await store.defer(Identity("crm", id), due_ms=LATE_MS, keep_until_ms=LATE_MS, **labels)
        await store.note(Identity("crm", "bad"), failed("timeout"), labels=Labels("normal", "web", "haiku"))
        await store.note(Identity("shop", "good"), answered(), **labels)

        code, told = await command("list")
        assert code == 0
        assert {line.split()[1] for line in told.splitlines()} == {"good", "bad", "later-2", "later-1"}
        _, told = await command("list", "--status", "failed", "--json")
        assert [(each["id"], each["code"]) for each in json.loads(told)["requests"]] == [("bad", "timeout")]
        assert (await command("list", "--tenant", "nobody"))[1].strip() == "no requests match"
        assert "allowed: waiting" in (await command("list", "--status", "done"))[1]

        assert (await command("cancel"))[0] == 2, "it does not cancel everything by mistake"
        assert "2 would be cancelled" in (await command("cancel", "--lane", "batch", "--dry-run"))[1]
        assert "2 cancelled" in (await command("cancel", "--lane", "batch", "--since", "1h"))[1]
        found = await store.find(Identity("crm", "later-1"))
        assert found is not None
        assert found.completion is not None
        assert found.completion.code == "cancelled"


LATE_MS = 4_000_000_000_000
