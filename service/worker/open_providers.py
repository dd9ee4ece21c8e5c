"""Creates the clients of the configured providers, but only of those to which requests can be routed."""

from collections.abc import Callable
from typing import Any

from consumers.parsing import Parsing
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.cloud import KINDS, ExtraMissing
from lanekeeper.contract.problems import SettingsError
from service.config.budget_sections import FIRST
from service.config.names import variable
from service.config.settings import Settings


def open_providers(
    settings: Settings, *, traceparent: Callable[[], str | None], parsing: Parsing
) -> tuple[AnthropicProvider, ...]:
    """Create the clients of all providers to which requests can be routed, in the order in which they are called.
    Raises SettingsError, which names all missing settings."""
    found: list[AnthropicProvider] = []
    problems: list[str] = []
    for provider in settings.routes_spec().providers:
        try:
            found.append(open_provider(settings, provider.name, traceparent=traceparent, parsing=parsing))
        except SettingsError as wrong:
            problems.append(str(wrong))
    if problems:
        raise SettingsError("\n".join(problems))
    return tuple(found)


def open_provider(
    settings: Settings,
    name: str,
    *,
    traceparent: Callable[[], str | None] = lambda: None,
    parsing: Parsing | None = None,
) -> AnthropicProvider:
    """Create the client of one configured provider. Raises SettingsError if a setting is missing."""
    common: dict[str, Any] = {
        "traceparent": traceparent,
        "parsing": parsing,
        "max_answer_bytes": settings.answer_bytes,
        "max_values": settings.json_values,
    }
    if name == FIRST:
        if settings.api_key is None:
            raise SettingsError(
                "ANTHROPIC_API_KEY is not set: set it, or answer without a provider: lanekeeper serve --simulate"
            )
        return AnthropicProvider.at(settings.provider_url, api_key=settings.api_key, **common)
    section = settings.providers[name]
    for missing_setting in section.missing_for_calls():
        raise SettingsError(f"{key_setting(name)} is {missing_setting.text}")
    given = {
        "api_key": None if section.api_key is None else section.api_key.get_secret_value(),
        "base_url": None if section.base_url is None else section.base_url.get_secret_value(),
        "region": section.region,
        "project": section.project,
    }
    options = {option: value for option, value in given.items() if value is not None}
    try:
        return KINDS[section.kind](name=name, **common, **options)
    except ExtraMissing as missing:
        raise SettingsError(f"providers.{name}: {missing}") from None


def key_setting(name: str) -> str:
    """The name of the setting that holds a provider's key."""
    return variable(("anthropic_api_key",) if name == FIRST else ("providers", name, "api_key"))
