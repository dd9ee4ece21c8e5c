"""Wrong settings of webhooks are refused at start, all at once and by name."""

import pytest

from tests.support.settings import load, wrong

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = f"whsec_{'A' * 44}"


def test_hosts_and_secrets_are_lists() -> None:
    env = {
        "LANEKEEPER_WEBHOOKS__ALLOW_HOSTS": "Hooks.Example.com, *.crm.example.com:8443",
        "LANEKEEPER_WEBHOOKS__SECRETS": f"{SECRET},{OTHER}",
    }
    spec = load(env=env).webhooks.spec()
    assert spec.hosts == ("hooks.example.com", "*.crm.example.com:8443")
    assert spec.secrets == (SECRET, OTHER)
    assert SECRET not in repr(spec)


def test_hosts_without_a_secret_are_refused() -> None:
    told = wrong(env={"LANEKEEPER_WEBHOOKS__ALLOW_HOSTS": "hooks.example.com"})
    assert "LANEKEEPER_WEBHOOKS__ALLOW_HOSTS: needs LANEKEEPER_WEBHOOKS__SECRETS" in told


@pytest.mark.parametrize(
    "secret", ["no-secret", SECRET.removeprefix("whsec_"), f"{SECRET}!", "whsec_" + "A" * 8, "whsec_" + "A" * 100]
)
def test_what_is_no_secret_is_refused_and_never_shown(secret: str) -> None:
    told = wrong(env={"LANEKEEPER_WEBHOOKS__SECRETS": secret})
    assert "LANEKEEPER_WEBHOOKS__SECRETS" in told
    assert "whsec_ and 24 to 64 random bytes in base64" in told
    assert secret not in told


def test_all_that_is_wrong_is_told_at_once() -> None:
    told = wrong(
        env={
            "LANEKEEPER_WEBHOOKS__ALLOW_HOSTS": "a/b",
            "LANEKEEPER_WEBHOOKS__SECRETS": "x",
            "LANEKEEPER_WEBHOOKS__TIMEOUT_S": "0",
            "LANEKEEPER_WEBHOOKS__RETRIES": "3",
        }
    )
    for name in ("ALLOW_HOSTS", "SECRETS", "TIMEOUT_S", "RETRIES"):
        assert f"LANEKEEPER_WEBHOOKS__{name}" in told
