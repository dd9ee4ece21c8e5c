"""`lanekeeper settings` lists the settings in effect and their sources."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from service.cli.main import run
from service.config.names import SETTINGS, variable


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (*map(variable, SETTINGS), *(name for name in os.environ if name.startswith("LANEKEEPER_"))):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    assert run(["settings", "--json", *line]) == 0
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def test_each_setting_has_its_source_and_a_later_source_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "lanekeeper.toml").write_text('namespace = "staging"\ngrace_s = 1\n[lanes.batch]\nslots = 12\n')
    (folder / ".env").write_text("LANEKEEPER_GRACE_S=5\nLANEKEEPER_LOG_LEVEL=debug\n")
    monkeypatch.setenv("LANEKEEPER_LOG_LEVEL", "error")

    found = shown(capsys, "--set", "lanes.normal.slots=3")

    told = {name: (each["value"], each["source"]) for name, each in found.items() if each["source"] != "default"}
    assert told == {
        "namespace": ("staging", "lanekeeper.toml"),
        "lanes.batch.slots": (12, "lanekeeper.toml"),
        "grace_s": (5, ".env"),
        "log_level": ("error", "environment"),
        "lanes.normal.slots": (3, "option"),
    }
    assert found["lanes.critical.slots"]["variable"] == "LANEKEEPER_LANES__CRITICAL__SLOTS"
    assert found["budget.lanes.batch.share"]["value"] == 0.05, "by its rank"
    assert found.keys() == {
        ".".join(place).replace("*", lane)
        for place in SETTINGS
        for lane in ("critical", "normal", "batch")
        if place[0] not in ("providers", "handlers", "pipelines", "schedules") and place[:2] != ("webhooks", "tenants")
    }


def test_keys_and_passwords_are_hidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "LANEKEEPER_AMQP_URL": "amqp://app:s3cret@one/,amqp://app:s3cret@two/",
        "LANEKEEPER_MANAGEMENT_URL": "http://app:s3cret@one:15672",
        "LANEKEEPER_STORE_URL": "redis://:s3cret@redis:6379/0",
        "ANTHROPIC_API_KEY": "sk-ant-s3cret",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:s3cret@jaeger:4318",
        "LANEKEEPER_PROVIDERS__OTHER__API_KEY": "s3cret",
        "LANEKEEPER_PROVIDERS__OTHER__BASE_URL": "https://other",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for line in (["settings"], ["settings", "--json"], ["settings", "--given"]):
        assert run(line) == 0
        out, err = capsys.readouterr()
        assert "s3cret" not in out + err
        assert "amqp://***@one/, amqp://***@two/" in out
        assert "(hidden)" in out
    assert shown(capsys)["providers.other.api_key"]["variable"] == "LANEKEEPER_PROVIDERS__OTHER__API_KEY"


def test_wrong_settings_end_the_command_like_every_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["settings", "--set", "grace_s=soon"]) == 2
    assert "grace_s on the command line" in capsys.readouterr().err
