"""Providers are made from the settings; if one cannot be, the error says why."""

from consumers.decoding import Parsing
from service.config.loading import load_settings
from service.worker.assembly import open_providers

AWS = {"LANEKEEPER_PROVIDERS__AWS__KIND": "bedrock", "LANEKEEPER_PROVIDERS__AWS__REGION": "eu-central-1"}


def opened(env: dict[str, str]) -> list[str]:
    return [each.name for each in open_providers(load_settings(environ=env), parsing=Parsing())]


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
