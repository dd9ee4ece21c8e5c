"""Keys: how they are made, kept and read; what a setting of them may be."""

import json
import tomllib

import pytest

from lanekeeper.contract.problems import SettingsError
from service.cli import main
from service.config.loading import load_settings
from service.gateway.access import hash_of, is_loopback, new_key

HASH = hash_of("lane-a")


def test_each_key_is_new_and_long() -> None:
    assert len({new_key() for _ in range(10)}) == 10
    assert len(new_key()) >= 43


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::1%lo", True),
        ("127.0.0.1%2eevil.example", False),
        ("localhost", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_what_is_this_machine(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


@pytest.mark.parametrize("tenant", ["", " crm", "a\nb", "*"])
def test_no_key_is_made_for_a_tenant_that_the_settings_refuse(tenant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["key", "new", tenant]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "TENANT" in printed.err) == ("", True)


def test_a_new_key_is_printed_once_and_its_hash_is_what_the_settings_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["key", "new", "crm", "--lane", "normal", "--lane", "batch", "--model", "claude-x"]
    assert main.run(line) == 0
    told = capsys.readouterr().out
    key = told.split("this once: ")[1].split()[0]

    keys = tomllib.loads(told[told.index("[gateway.keys.") :])["gateway"]["keys"]
    assert key not in json.dumps(keys)
    settings = load_settings(environ={"LANEKEEPER_GATEWAY__KEYS": json.dumps(keys), "LANEKEEPER_SPEAKERS": "guest"})
    found = settings.gateway.keys[hash_of(key)]
    assert (found.tenant, found.lanes, found.models) == ("crm", ("normal", "batch"), ("claude-x",))

    assert main.run([*line, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"key", "keys"}


@pytest.mark.parametrize(
    "keys",
    [
        {"lane-a": {"tenant": "crm"}},
        {HASH.upper(): {"tenant": "crm"}},
        {HASH: {}},
        {HASH: {"tenant": "crm", "lanes": []}},
        {HASH: {"tenant": "crm", "lanes": ["urgent"]}},
        {HASH: {"tenant": "crm", "lane": "normal"}},
        {HASH: {"tenant": "*"}},
        {HASH: "crm"},
        {HASH: {"tenant": "crm", "models": [1]}},
    ],
)
def test_a_wrong_key_setting_is_told(keys: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="LANEKEEPER_GATEWAY__KEYS"):
        load_settings(environ={"LANEKEEPER_GATEWAY__KEYS": json.dumps(keys), "LANEKEEPER_SPEAKERS": "guest"})


def test_keys_of_other_tenants_need_a_user_that_may_speak_for_them() -> None:
    keys = json.dumps({HASH: {"tenant": "crm"}})

    with pytest.raises(SettingsError, match="LANEKEEPER_SPEAKERS"):
        load_settings(environ={"LANEKEEPER_GATEWAY__KEYS": keys})
    assert load_settings(environ={"LANEKEEPER_GATEWAY__KEYS": json.dumps({HASH: {"tenant": "guest"}})})
