"""Settings for another broker, store or provider than the environment names: of the demo, `--simulate` and tests."""

from pydantic import SecretStr

from service.config.settings import Settings
from topology.lanes import DEFAULT_LANES


def on_broker(settings: Settings, url: str, *, namespace: str) -> Settings:
    """A copy for another broker and namespace."""
    return settings.model_copy(update={"amqp_url": SecretStr(url), "namespace": namespace})


def kept_in(settings: Settings, store_url: str) -> Settings:
    """A copy with another store."""
    return settings.model_copy(update={"store_url": SecretStr(store_url)})


def answered_by(settings: Settings, url: str, *, key: str) -> Settings:
    """A copy whose only provider is this one."""
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
