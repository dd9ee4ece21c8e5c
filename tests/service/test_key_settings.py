"""What a setting of the gateway's keys may be, and when it is read again."""

import json
from pathlib import Path

import pytest

from lanekeeper.contract.problems import SettingsError
from service.config.loading import Changed
from service.config.value_types import read_tenant
from service.gateway.access import hash_of
from tests.support.settings import load

HASH = hash_of("lane-a")


@pytest.mark.parametrize(
    "keys",
    [
        {"lane-a": {"tenant": "crm"}},
        {HASH.upper(): {"tenant": "crm"}},
        {HASH: {}},
        {HASH: {"tenant": "crm", "lanes": []}},
        {HASH: {"tenant": "crm", "lanes": ["urgent"]}},
        {HASH: {"tenant": "crm", "lane": "normal"}},
        *({HASH: {"tenant": tenant}} for tenant in ("*", "a*", "", " crm", "crm ", "a\nb", "x" * 256, 5)),
        {HASH: {"tenant": "crm", "expires": "soon"}},
        {HASH: {"tenant": "crm", "expires": "2027-01-31T18:00:00"}},
        {HASH: {"tenant": "crm", "expires": 1}},
        {HASH: {"tenant": "crm", "operator": "root"}},
        {HASH: {"tenant": "crm", "operator": ["act"]}},
        {HASH: {"tenant": "crm", "name": "two words"}},
    ],
)
def test_a_wrong_key_setting_is_told(keys: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="LANEKEEPER_GATEWAY__KEYS"):
        load(env={"LANEKEEPER_GATEWAY__KEYS": json.dumps(keys), "LANEKEEPER_SPEAKERS": "guest"})


@pytest.mark.parametrize("name", ["x", "x" * 128, "Straße/7", "crm.eu_1:a@b-c"])
def test_a_tenants_name_has_letters_digits_and_a_few_signs(name: str) -> None:
    assert read_tenant(name) == name


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "a\x00b", "a\n", "*", "a*", "\ud83d", "a\u202eb", 7, None])
def test_no_other_name_is_a_tenants(name: object) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        read_tenant(name)


def test_keys_of_other_tenants_need_a_user_that_may_speak_for_them() -> None:
    keys = json.dumps({HASH: {"tenant": "crm"}})

    with pytest.raises(SettingsError, match="LANEKEEPER_SPEAKERS"):
        load(env={"LANEKEEPER_GATEWAY__KEYS": keys})
    assert load(env={"LANEKEEPER_GATEWAY__KEYS": json.dumps({HASH: {"tenant": "guest"}})})


def test_keys_are_read_again_when_their_file_has_changed_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lanekeeper.toml"
    head, entry = 'speakers = ["guest"]\n', '[gateway.keys.%s]\ntenant = "crm"\nexpires = 2027-01-31T18:00:00Z\n'
    file.write_text(head + entry % HASH)
    changed = Changed(lambda settings: settings.gateway.keys)
    assert changed() is None

    file.write_text(head + entry % hash_of("lane-bb"))
    keys = changed()
    assert keys is not None
    assert [(hashed, key.expires_at) for hashed, key in keys.items()] == [(hash_of("lane-bb"), 1_801_418_400.0)]
    assert changed() is None

    file.write_text("gateway = wrong")
    with pytest.raises(SettingsError, match=r"lanekeeper\.toml"):
        changed()
    file.unlink()
    assert changed() == {}
