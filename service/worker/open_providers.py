"""Creates the providers from the settings, but only those that requests can be routed to."""

from collections.abc import Callable
from typing import Any

from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.cloud import KINDS, ExtraMissing
from consumers.reading import Reading
from lanekeeper.contract.problems import SettingsError
from service.config.budget_sections import FIRST
from service.config.settings import Settings


def open_providers(
    settings: Settings, *, traceparent: Callable[[], str | None], reading: Reading
) -> tuple[AnthropicProvider, ...]:
    """All providers, in the order in which they are called. Raises SettingsError that names everything that is
    missing."""
    found: list[AnthropicProvider] = []
    problems: list[str] = []
    for each in settings.routes_spec().providers:
        try:
            found.append(open_provider(settings, each.name, traceparent=traceparent, reading=reading))
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
    reading: Reading | None = None,
) -> AnthropicProvider:
    """One provider. Raises SettingsError."""
    how: dict[str, Any] = {
        "traceparent": traceparent,
        "reading": reading,
        "max_answer_bytes": settings.results.answer_bytes,
        "values": settings.json_values,
    }
    if name == FIRST:
        if settings.api_key is None:
            raise SettingsError(
                "ANTHROPIC_API_KEY is not set: set it, or answer without a provider: lanekeeper serve --simulate"
            )
        return AnthropicProvider.at(settings.provider_url, api_key=settings.api_key, **how)
    section = settings.providers[name]
    for lack in section.lacks():
        raise SettingsError(f"{key_setting(name)} is {lack.text}")
    given = {
        "api_key": None if section.api_key is None else section.api_key.get_secret_value(),
        "base_url": None if section.base_url is None else section.base_url.get_secret_value(),
        "region": section.region,
        "project": section.project,
    }
    said = {what: value for what, value in given.items() if value is not None}
    try:
        return KINDS[section.kind](name=name, **how, **said)
    except ExtraMissing as missing:
        raise SettingsError(f"providers.{name}: {missing}") from None


def key_setting(name: str) -> str:
    """The name of the setting that holds a provider's key."""
    return "ANTHROPIC_API_KEY" if name == FIRST else f"LANEKEEPER_PROVIDERS__{name.upper()}__API_KEY"
