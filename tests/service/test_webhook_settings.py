"""Wrong settings of webhooks are refused at start, all at once and by name."""

import pytest

from tests.support.settings import load, wrong

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = f"whsec_{'A' * 44}"


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


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ("[2606:4700::1111]", ("[2606:4700::1111]",)),
        ("[2606:4700:0:0:0::1111]:8443, b.example", ("[2606:4700::1111]:8443", "b.example")),
        ('["[2606:4700::1111]", "B.example.:8443"]', ("[2606:4700::1111]", "b.example:8443")),
        ("b.example,[::1]", ("b.example", "[::1]")),
        ("*.b.example.", ("*.b.example",)),
    ],
)
def test_ipv6_addresses_and_names_with_a_dot_at_the_end_are_hosts(given: str, hosts: tuple[str, ...]) -> None:
    env = {"LANEKEEPER_WEBHOOKS__ALLOW_HOSTS": given, "LANEKEEPER_WEBHOOKS__SECRETS": SECRET}
    assert load(env=env).webhooks.spec().hooks.hosts == hosts


TENANTS = "LANEKEEPER_WEBHOOKS__TENANTS"


def test_each_tenant_has_hosts_and_secrets_of_its_own() -> None:
    env = {
        f"{TENANTS}__CRM__ALLOW_HOSTS": "crm.example.com", f"{TENANTS}__CRM__SECRETS": SECRET,
        f"{TENANTS}__SHOP__ALLOW_HOSTS": "shop.example.com,[::1]", f"{TENANTS}__SHOP__SECRETS": OTHER,
    }  # fmt: skip
    spec = load(env=env).webhooks.spec()
    assert spec.is_on
    assert (spec.of("crm").hosts, spec.of("shop").secrets) == (("crm.example.com",), (OTHER,))
    assert SECRET not in repr(spec)
    assert (spec.of("").hosts, spec.of("other").secrets) == ((), ())


def test_tenants_that_share_a_secret_or_lack_one_are_refused() -> None:
    crm = {f"{TENANTS}__CRM__ALLOW_HOSTS": "crm.example.com", f"{TENANTS}__CRM__SECRETS": f"{SECRET},{OTHER}"}
    shop = {f"{TENANTS}__SHOP__ALLOW_HOSTS": "shop.example.com", f"{TENANTS}__SHOP__SECRETS": OTHER}
    assert "tenants.crm, tenants.shop have one secret" in wrong(env={**crm, **shop})
    common = {"LANEKEEPER_WEBHOOKS__ALLOW_HOSTS": "b.example", "LANEKEEPER_WEBHOOKS__SECRETS": SECRET}
    assert "secrets, tenants.crm have one secret" in wrong(env={**crm, **common})
    for missing in shop:
        told = wrong(env={name: value for name, value in shop.items() if name != missing})
        assert missing in told
