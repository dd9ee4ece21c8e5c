"""Copies of settings with another broker, store or provider, for the demo, `--simulate` and tests."""

from pydantic import SecretStr

from service.config.settings import Settings
from topology.lanes import DEFAULT_LANES


def with_broker(settings: Settings, url: str, *, namespace: str) -> Settings:
    """A copy of the settings with another broker URL and namespace."""
    return settings.model_copy(update={"amqp_url": SecretStr(url), "namespace": namespace})


def with_store(settings: Settings, store_url: str) -> Settings:
    """A copy of the settings with another store URL."""
    return settings.model_copy(update={"store_url": SecretStr(store_url)})


def with_provider(settings: Settings, url: str, *, key: str) -> Settings:
    """A copy of the settings in which all lanes use a single provider: an API like Anthropic's at `url`, called with
    the API key `key`."""
    lanes = settings.lanes
    unnamed = {lane.name: getattr(lanes, lane.name).model_copy(update={"providers": None}) for lane in DEFAULT_LANES}
    return settings.model_copy(
        update={
            "anthropic_base_url": SecretStr(url),
            "anthropic_api_key": SecretStr(key),
            "providers": {},
            "lanes": lanes.model_copy(update=unnamed),
        }
    )
