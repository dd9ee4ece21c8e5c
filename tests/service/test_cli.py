"""The command line without a broker: exit codes, errors of one line, help, and no slow import before it is needed."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from lanekeeper import Final, Part
from service.cli import main
from service.cli.requests import _print_parts

COMMANDS = (
    "demo",
    "serve",
    "consume",
    "send",
    "cancel",
    "result",
    "status",
    "check",
    "simulate",
    "pause",
    "resume",
    "pauses",
)
TOPOLOGY = ("show", "plan", "apply", "verify", "export", "diagram")
NOWHERE = "amqp://guest:s3cret@127.0.0.1:1/"


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("LANEKEEPER_", "ANTHROPIC_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LANEKEEPER_AMQP_URL", NOWHERE)
    monkeypatch.setenv("TERMINAL_WIDTH", "200")


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    told = capsys.readouterr().err
    assert told.startswith("lanekeeper: ")
    assert told.count("\n") == 1
    return told


@pytest.mark.slow
@pytest.mark.parametrize("command", [*([each] for each in COMMANDS), *(["topology", each] for each in TOPOLOGY)])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*command, "--help"]) == 0
    assert f"Usage: lanekeeper {' '.join(command)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["dead", "list", "--since", "99999999999d"], ["pause", "--lane", "batch", "--for", "9" * 400 + "d"],
        ["dead", "replay", "--all", "--rate", "inf"], ["requests", "replay", "--lane", "batch", "--rate", "nan"],
    ],
)  # fmt: skip
def test_a_number_without_bounds_is_bad_use(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(command) == 2
    assert "no duration" in (told := capsys.readouterr().err) or "allowed is a number" in told


def imported_by(code: str) -> set[str]:
    code = f"import sys; {code}; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    return set(eval(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_help_imports_no_slow_package() -> None:
    imported = imported_by("from service.cli import main; main.run(['--help'])")

    assert not imported & {"anthropic", "aiohttp", "aiormq", "opentelemetry.sdk", "pydantic", "uvloop", "rich.live"}


@pytest.mark.slow
@pytest.mark.parametrize("line", [["status"], ["dead", "list"]])
def test_a_short_command_imports_no_client_of_a_provider(line: list[str]) -> None:
    imported = imported_by(f"from service.cli import main; assert main.run({line}) == 1")

    assert "lanekeeper.amqp.connection" in imported
    assert not imported & {"anthropic", "service.worker.assembly"}


@pytest.mark.parametrize(
    "line",
    [
        ["nonsense"],
        ["send"],
        ["send", "--delay", "soon", "x"],
        ["send", "--lane", "urgent", "x"],
        ["send", "--priority", "10", "x"],
        ["cancel"],
        ["result"],
        ["status", "--set", "namespace"],
        ["simulate", "--fault", "overloaded=2"],
        ["simulate", "--fault", "nonsense=0.5"],
        ["pause"],
        ["pause", "--lane", "batch", "--tenant", "crm"],
        ["pause", "--lane", "bach"],
        ["pause", "--lane", "batch", "--for", "soon"],
        ["pause", "--lane", "batch", "--until", "2026-11-21T18:00:00"],
        ["pause", "--lane", "batch", "--for", "1h", "--until", "2026-11-21T18:00:00Z"],
        ["resume"],
        ["resume", "a1b2", "--lane", "batch"],
        ["dead", "replay", "--all", "--edit", '{"max_tokens":5}'],
        ["topology", "show", "--for", "3.8"],
        ["topology", "export", "--for", "4.3", "--user", "crm:king"],
        ["topology", "export", "--for", "4.3", "--user", "c.rm:application"],
    ],
)
def test_wrong_usage_exits_with_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(line) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["serve"], ["consume"], ["send", "x"], ["status"], ["topology", "plan"], ["topology", "show"]]
)
def test_a_wrong_setting_ends_every_command_with_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LANEKEEPER_LANES__BATCH__SLOTS", "0")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "s3cret")

    assert main.run(command) == 2
    assert "LANEKEEPER_LANES__BATCH__SLOTS: found '0', allowed is" in one_line(capsys)


@pytest.mark.parametrize("command", [["serve"], ["consume"], ["serve", "--config", "x.toml"]])
def test_commands_that_call_providers_report_missing_keys_before_connecting_to_a_broker(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.toml").write_text("[lanes.batch]\nproviders = ['anthropic', 'eu']")
    monkeypatch.setenv("LANEKEEPER_PROVIDERS__EU__BASE_URL", "https://claude.example")

    assert main.run(command) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert "LANEKEEPER_PROVIDERS__EU__API_KEY: not set; a provider of kind anthropic needs it" in told
    assert ("ANTHROPIC_API_KEY: not set; set it, or answer without a provider" in told) == ("--config" in command)
    assert "broker" not in told
    assert "Traceback" not in told


def test_a_providers_missing_package_is_reported_before_connecting_to_a_broker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setenv("LANEKEEPER_PROVIDERS__AWS__KIND", "bedrock")
    monkeypatch.setenv("LANEKEEPER_PROVIDERS__AWS__REGION", "eu-central-1")

    assert main.run(["serve"]) == 2
    assert "providers.aws: needs a package that is not installed; run: pip install boto3" in one_line(capsys)


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--simulate", "--port", "0"],
        ["consume", "--simulate", "--lane", "batch"],
        ["send", "x"],
        ["send", "--stream", "x"],
        ["cancel", "id-1"],
        ["result", "id-1"],
        ["status"],
        ["status", "--json"],
        *(["topology", each] for each in ("show", "plan", "apply", "verify", "export")),
    ],
)
def test_an_unreachable_broker_ends_every_command_with_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(command) == 1
    told = one_line(capsys)
    assert "no broker at 127.0.0.1:1" in told
    assert "s3cret" not in told


def test_check_reports_each_problem_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["check", "--json"]) == 1
    found = {each["what"]: each for each in json.loads(capsys.readouterr().out)}

    assert found["settings"]["well"]
    assert not found["broker"]["well"]
    assert "ANTHROPIC_API_KEY is not set" in found["provider anthropic"]["text"]


@pytest.mark.slow
def test_a_command_that_sends_spans_logs_it_only_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "send", "--no-wait", "hi"],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )

    said = done.stderr.splitlines()
    assert done.stdout == "", "a script takes the id from here"
    assert [each.split(":")[0] for each in said if not each.startswith("{")] == ["lanekeeper", "lanekeeper"], said
    assert {json.loads(each)["event"] for each in said if each.startswith("{")} == {"traces.lost"}


def test_an_unexpected_error_is_one_line_and_its_traceback_is_shown_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("odd, at amqp://u:s3cret@host/\nand more")

    monkeypatch.setattr("service.config.loading.load_settings", broken)

    assert main.run(["status"]) == 1
    told = one_line(capsys)
    assert "unexpected RuntimeError" in told
    assert "lanekeeper --debug" in told
    assert "s3cret" not in told

    assert main.run(["--debug", "status"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "s3cret" not in told


@pytest.mark.parametrize(("text", "why"), [(b"\xff", "not UTF-8"), (b" \n", "empty")])
def test_standard_input_that_is_not_text_is_wrong_usage(
    text: bytes, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))

    assert main.run(["send", "-"]) == 2
    assert why in one_line(capsys)


def test_export_generates_passwords_shows_them_once_and_exports_only_hashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["topology", "export", "--for", "4.3", "--vhost", "prod", "--user", "crm:application:batch"]) == 0
    out, err = capsys.readouterr()
    definitions = json.loads(out)
    password = err.strip().rpartition(": ")[2]

    assert [user["name"] for user in definitions["users"]] == ["crm"]
    assert definitions["vhosts"] == [{"name": "prod"}]
    assert len(password) >= 24
    assert password not in out


def test_apply_generates_no_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "passwords").write_text("worker:x\n")
    users = ["--user", "worker:worker", "--user", "crm:client"]

    assert main.run(["topology", "apply", *users, "--passwords", "passwords"]) == 2
    assert "a line NAME:PASSWORD is missing for crm" in capsys.readouterr().err


HOSTILE = "a\x1b[2J\x9bb\u202ec\u2066d\u200f"
SHOWN = "a\\x1b[2J\\x9bb\\u202ec\\u2066d\\u200f"


def test_what_others_wrote_does_not_control_the_terminal_and_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    from service.cli.process import print_json, print_note, printable
    from service.telemetry import redaction

    assert printable(f"{HOSTILE}\r\n\tç\xa0") == f"{SHOWN}\\r\\n\\tç\xa0"
    assert redaction.lines(f"{HOSTILE}\r\n\tç") == f"{SHOWN}\\r\n\tç", "an answer has lines"
    print_note(HOSTILE)
    print_json({HOSTILE: [HOSTILE]})
    told, err = capsys.readouterr()
    assert err == f"lanekeeper: {SHOWN}\n"
    assert not set(told) & set("\x1b\x9b\u202e\u2066\u200f")
    assert json.loads(told) == {HOSTILE: [HOSTILE]}, "it means what it meant"


def test_an_answer_that_ends_within_a_character_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is cut off there writes half a surrogate pair, which UTF-8 cannot."""
    event = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "é \ud83d"}}
    part = Part(kind="event", seq=0, body=json.dumps(event).encode())
    final = Final(
        body=b"{}",
        request_id="r",
        lane="l",
        model="m",
        provider="p",
        attempt=1,
        wait_ms=0,
        run_ms=0,
        replayed=False,
        headers={},
    )

    async def replies() -> AsyncGenerator[Part | Final, None]:
        yield part
        yield final

    for as_json in (False, True):
        asyncio.run(_print_parts(replies(), json=as_json))
    text, line, _ = capsys.readouterr().out.splitlines()
    assert text == "é \N{REPLACEMENT CHARACTER}"
    assert json.loads(line)["event"] == event


def test_a_status_shows_what_workers_tell_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from service.cli.status import _show_status
    from service.status import Status

    waiting = (f"normal: model {HOSTILE} [bold]x[/bold]",)
    _show_status(Status(lanes=(), workers=(), waiting=waiting), Console())
    assert f"normal: model {SHOWN} [bold]x[/bold]" in capsys.readouterr().out
