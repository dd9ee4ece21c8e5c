"""`lanekeeper batch …` at an API that has Message Batches: what it sends, prints, refuses, and how it ends."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from service.cli import batch, main
from service.simulated.app import SimulatedAPI, SimulatedOptions
from service.simulated.batches import BatchOptions
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("LANEKEEPER_", "ANTHROPIC_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(batch, "LOOK_EVERY_S", 0.05)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return capsys


async def command(api: SimulatedAPI, *line: str, key: str = "lane-secret") -> int:
    given = (f"client.url={api.base_url}", f"client.api_key={key}")
    sets = [word for each in given for word in ("--set", each)]
    return await asyncio.to_thread(main.run, ["batch", *line, *sets])


def line(id: str, prompt: str = "hello", **params: Any) -> str:
    said = [{"role": "user", "content": f"{prompt} {id}"}]
    return json.dumps(
        {"custom_id": id, "params": {"model": "claude-haiku-5-5", "max_tokens": 20, "messages": said, **params}}
    )


def written(lines: Sequence[str]) -> str:
    Path("requests.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return "requests.jsonl"


def read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


async def test_a_file_is_submitted_followed_and_its_results_are_fetched(told: Any) -> None:
    options = SimulatedOptions(api_key="lane-secret")
    async with SimulatedAPI(options) as api:
        file = written([line("a-1"), "", line("a-2", "[[fault: invalid]]"), line("a-3")])
        assert await command(api, "submit", file, "--lane", "night", "--deadline", "6h") == 0
        out, err = told.readouterr()
        id = out.strip()
        assert id.startswith("msgbatch_")
        assert f"{id}: 3 requests submitted" in err
        sent = next(call for call in api.batches.calls if call.endpoint == "create")
        assert [each["custom_id"] for each in json.loads(sent.body)["requests"]] == ["a-1", "a-2", "a-3"]
        assert (sent.headers["x-lane-name"], sent.headers["x-lane-deadline-ms"]) == ("night", "21600000")

        assert await command(api, "status", id, "--wait") == 0
        assert told.readouterr().out == f"{id} ended: 3 of 3 requests have ended (2 succeeded, 1 errored)\n"
        assert await command(api, "results", id) == 1, "one of them has failed"
        found = [json.loads(each) for each in told.readouterr().out.splitlines()]
        assert {each["custom_id"]: each["result"]["type"] for each in found} == {
            "a-1": "succeeded",
            "a-2": "errored",
            "a-3": "succeeded",
        }
        assert await command(api, "results", id, "--output", "results.jsonl") == 1
        assert len(read("results.jsonl").splitlines()) == 3
        assert "results.jsonl.part" not in os.listdir()


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([], "no requests"),
        (["{", line("a")], "line 1: not JSON"),
        ([line("a"), '{"params": {}}'], "line 2: not {"),
        ([line("a"), '{"custom_id": "b"}'], "line 2: params is missing"),
        ([line("a"), line("b"), line("a")], "line 3: custom_id 'a' is that of line 1 too"),
        (["1"] * 9, "line 5"),
    ],
)
async def test_a_wrong_file_is_refused_by_its_lines_before_anything_is_sent(
    told: Any, lines: list[str], wanted: str
) -> None:
    async with SimulatedAPI() as api:
        assert await command(api, "submit", written(lines)) == 2
        err = told.readouterr().err
        assert err.startswith("lanekeeper: nothing was sent: ")
        assert wanted in err
        assert not api.batches.calls


async def test_a_file_may_begin_with_the_mark_that_windows_puts_there(told: Any) -> None:
    async with SimulatedAPI() as api:
        assert await command(api, "submit", written([f"\ufeff{line('a')}", line("b")])) == 0, told.readouterr().err
        (sent,) = api.batches.calls
        assert [each["custom_id"] for each in json.loads(sent.body)["requests"]] == ["a", "b"]


async def test_what_the_gateway_refuses_is_told_in_one_line(told: Any) -> None:
    async with SimulatedAPI(SimulatedOptions(api_key="lane-secret")) as api:
        file = written([line("no spaces")])
        for wanted, key, asked in (
            ("requests.0.custom_id", "lane-secret", ("submit", file)),
            ("LANEKEEPER_CLIENT__API_KEY", "wrong", ("status", "msgbatch_x")),
            ("404", "lane-secret", ("status", "../models")),
        ):
            assert await command(api, *asked, key=key) == 1
            err = told.readouterr().err
            assert (err.count("\n"), wanted in err) == (1, True), err
    assert await command(api, "status", "msgbatch_x") == 1
    assert "LANEKEEPER_CLIENT__URL" in told.readouterr().err
    assert await command(api, "submit", "nowhere.jsonl") == 2


async def test_waiting_goes_on_while_the_gateway_is_restarted(told: Any) -> None:
    api = SimulatedAPI(SimulatedOptions(batches=BatchOptions(processing_s=0.5)))
    await api.start()
    try:
        waiting = asyncio.create_task(command(api, "submit", written([line("a-1")]), "--wait", "--json"))
        await until(lambda: any(call.endpoint == "retrieve" for call in api.batches.calls))
        await api.stop()
        await asyncio.sleep(0.3)
        await api.start()
        assert await waiting == 0
    finally:
        await api.stop()
    out, err = told.readouterr()
    assert json.loads(out)["processing_status"] == "ended"
    assert "in_progress: 0 of 1 requests have ended\n" in err
