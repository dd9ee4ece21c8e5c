"""Providers are made from the settings; if one cannot be, the error says why."""

import pytest

from consumers.decoding import Parsing
from service.worker.assembly import open_providers
from tests.support.settings import load, wrong

AWS = {"LANEKEEPER_PROVIDERS__AWS__KIND": "bedrock", "LANEKEEPER_PROVIDERS__AWS__REGION": "eu-central-1"}


def opened(env: dict[str, str]) -> list[str]:
    return [each.name for each in open_providers(load(env=env), parsing=Parsing())]


def test_each_provider_is_made_according_to_its_kind() -> None:
    env = {
        "ANTHROPIC_API_KEY": "k",
        **AWS,
        "LANEKEEPER_PROVIDERS__AWS__API_KEY": "k",
        "LANEKEEPER_PROVIDERS__AZURE__KIND": "foundry",
        "LANEKEEPER_PROVIDERS__AZURE__API_KEY": "k",
        "LANEKEEPER_PROVIDERS__AZURE__BASE_URL": "https://r.services.ai.azure.com/anthropic",
        "LANEKEEPER_PROVIDERS__GCP__KIND": "vertex",
        "LANEKEEPER_PROVIDERS__GCP__API_KEY": "token",
        "LANEKEEPER_PROVIDERS__GCP__REGION": "global",
        "LANEKEEPER_PROVIDERS__GCP__PROJECT": "p",
        "LANEKEEPER_PROVIDERS__OTHER__API_KEY": "k",
        "LANEKEEPER_PROVIDERS__OTHER__BASE_URL": "https://claude.example",
    }

    assert opened(env) == ["anthropic", "aws", "azure", "gcp", "other"]


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host.example",
        f"https://{'a' * 64}.example",
        "https://a..b",
        "ftp://host.example",
        "https://",
        "https://ho st.example",
    ],
)
@pytest.mark.parametrize("name", ["ANTHROPIC_BASE_URL", "LANEKEEPER_PROVIDERS__OTHER__BASE_URL"])
def test_a_base_url_that_nothing_can_be_sent_to_is_refused_at_the_start(name: str, url: str) -> None:
    text = wrong(env={name: url})

    assert name in text
    assert "allowed is" in text
    assert "secret" not in text


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://[::1]:8080/v1", "https://my_host-1.example./x"])
def test_a_base_url_may_be_a_name_or_an_address(url: str) -> None:
    assert load(env={"ANTHROPIC_BASE_URL": url}).provider_url == url
