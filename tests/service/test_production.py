"""The production profile: each setting that it does not accept, alone and all together."""

import os
from pathlib import Path

import pytest

from lanekeeper.contract.problems import AccessRefused
from service.checks import of_file, of_settings, of_transport, risks
from service.config.settings import Settings
from tests.support.redis import redis_server
from tests.support.settings import load
from topology.declaration import RECOMMENDED

GOOD = {
    "LANEKEEPER_PROFILE": "production",
    "LANEKEEPER_AMQP_URL": "amqps://worker:secret@rabbit.example.com:5671/",
    "LANEKEEPER_STORE_URL": "rediss://:secret@redis.example.com:6379/0",
    "ANTHROPIC_API_KEY": "sk-ant-x",
}


def settings(**given: str) -> Settings:
    return load(env={**GOOD, **given})


def found(made: Settings) -> set[str]:
    return {risk.what for risk in (*of_transport(made), *of_settings(made), *of_file(made))}


@pytest.mark.parametrize(
    ("what", "setting", "value"),
    [
        ("broker TLS", "LANEKEEPER_AMQP_URL", "amqp://worker:secret@rabbit.example.com/"),
        ("broker TLS", "LANEKEEPER_AMQP_URL", "amqp://w:s@10.0.0.1/"),
        ("broker user", "LANEKEEPER_AMQP_URL", "amqps://guest:secret@rabbit.example.com/"),
        ("broker user", "LANEKEEPER_AMQP_URL", "amqps://rabbit.example.com/"),
        ("management TLS", "LANEKEEPER_MANAGEMENT_URL", "http://rabbit.example.com:15672"),
        ("store TLS", "LANEKEEPER_STORE_URL", "redis://redis.example.com:6379/0"),
        ("store TLS", "LANEKEEPER_STORE_URL", "redis+sentinel://localhost,redis.example.com:26379/main"),
        ("provider TLS", "ANTHROPIC_BASE_URL", "http://gateway.example.com"),
        ("user_id", "LANEKEEPER_REQUIRE_USER_ID", "false"),
        ("replies", "LANEKEEPER_REPLY_TO__BOUND_TO_USER", "false"),
        ("log content", "LANEKEEPER_LOG_CONTENT", "true"),
        ("failpoints", "LANEKEEPER_FAILPOINTS", "after_store:0.5"),
        ("webhooks", "LANEKEEPER_WEBHOOKS__ALLOW_PRIVATE", "true"),
        ("webhooks", "LANEKEEPER_WEBHOOKS__ALLOW_HTTP", "true"),
    ],
)
def test_each_unacceptable_setting_is_found_by_name(what: str, setting: str, value: str) -> None:
    assert found(settings(**{setting: value})) == {what}


def test_unencrypted_connections_to_hosts_that_the_operator_names_are_accepted() -> None:
    made = settings(
        LANEKEEPER_AMQP_URL="amqp://w:s@rabbitmq:5672/,amqp://w:s@other:5672/",
        LANEKEEPER_STORE_URL="redis://:s@redis:6379/0",
        LANEKEEPER_TLS__PLAIN_HOSTS="rabbitmq,redis",
    )
    assert [risk.text.split(",")[0] for risk in of_transport(made)] == ["plain text to other"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "[::1]"])
def test_unencrypted_connections_within_this_machine_are_accepted(host: str) -> None:
    made = settings(
        LANEKEEPER_AMQP_URL=f"amqp://w:s@{host}:5672/",
        LANEKEEPER_STORE_URL=f"redis://:s@{host}:6379/0",
        LANEKEEPER_MANAGEMENT_URL=f"http://{host}:15672",
        ANTHROPIC_BASE_URL=f"http://{host}:8000",
    )

    assert list(of_transport(made)) == []


def test_the_address_of_a_further_provider_is_checked_too() -> None:
    made = settings(
        LANEKEEPER_PROVIDERS__OTHER__API_KEY="x", LANEKEEPER_PROVIDERS__OTHER__BASE_URL="http://other.example.com"
    )

    (risk,) = of_transport(made)
    assert "LANEKEEPER_PROVIDERS__OTHER__BASE_URL" in risk.text


def test_no_finding_shows_a_password() -> None:
    made = settings(LANEKEEPER_AMQP_URL="amqp://guest:s3cret@rabbit.example.com/")

    assert not [risk for risk in (*of_transport(made), *of_settings(made)) if "s3cret" in risk.text]


def test_a_store_that_other_users_can_read_is_found(tmp_path: Path) -> None:
    file = tmp_path / "lane.sqlite"
    file.touch(mode=0o600)
    made = settings(LANEKEEPER_STORE_URL=f"sqlite:///{file}")
    assert found(made) == set()

    os.chmod(file, 0o640)

    assert found(made) == {"store file"}


async def test_a_redis_that_may_lose_data_is_found_and_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        made = settings(LANEKEEPER_STORE_URL=redis.url)
        found = [risk async for risk in risks(made, None)]

    assert [risk.what for risk in found] == ["store durability"]
    assert "appendonly is off" in found[0].text


@pytest.mark.parametrize(("version", "is_found"), [("4.3.4", True), (".".join(map(str, RECOMMENDED)), False)])
async def test_a_broker_version_with_known_weaknesses_is_found(version: str, is_found: bool) -> None:
    class Broker:
        def __init__(self) -> None:
            self.version = version

        async def flowing(self, *, timeout_s: float) -> None:
            raise AccessRefused("a worker may not publish requests")

    made = settings(LANEKEEPER_STORE_URL="sqlite:////nowhere/lane.sqlite")
    found = [risk.what async for risk in risks(made, Broker())]  # type: ignore[arg-type]
    assert found == (["broker version"] if is_found else [])


def test_without_the_profile_requests_without_a_user_are_accepted() -> None:
    assert not load(env={}).needs_user_id
    assert settings().needs_user_id
