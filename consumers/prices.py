"""Computes what a call costs, from prices per million tokens of each model. Does no I/O."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

AS_OF: Final = "2026-11-21"
"""The date on which the default prices were valid (docs/facts.md, section 10)."""
MILLION: Final = 1_000_000
_DATE_SUFFIX: Final = re.compile(r"[-@]\d{8}$")


@dataclass(frozen=True, slots=True)
class Price:
    """The prices of one model, in US dollars per million tokens."""

    input: float
    output: float
    cache_read: float | None = None
    """The price of input tokens that are read from the provider's prompt cache; None: a tenth of `input`."""
    cache_write: float | None = None
    """The price of input tokens that are written to the provider's prompt cache, to be kept there for five minutes;
    None: 1.25 times `input`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How many tokens a call used, as the provider counted them. `input_tokens`: the input tokens that were neither
    read from the provider's prompt cache nor written to it."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


DEFAULTS: Final[Mapping[str, Price]] = MappingProxyType(
    {
        "claude-fable-5-2": Price(8, 40),  # this price is from a reseller
        "claude-fable-5-1": Price(10, 50),
        "claude-opus-5-5": Price(4, 20, 0.20, 5),
        "claude-opus-5": Price(5, 25),
        "claude-sonnet-5-5": Price(2, 10, 0.20, 2.50),
        "claude-sonnet-5": Price(2, 10, 0.20, 2.50),
        "claude-haiku-5-5": Price(0.10, 0.50),  # the list says "from" this price; further tiers are unknown
        "claude-haiku-4-5": Price(1, 5),
    }
)


class Prices:
    """The prices of all models: those in `given`, and those in `DEFAULTS` for models that are not in `given`. `as_of`:
    the date on which the prices were valid."""

    def __init__(self, given: Mapping[str, Price] | None = None, *, as_of: str = AS_OF) -> None:
        self.as_of = as_of
        self._table = {**DEFAULTS, **(given or {})}

    @property
    def models(self) -> frozenset[str]:
        return frozenset(self._table)

    def of(self, model: str) -> Price | None:
        """The price of a model; None if it is unknown. A model name with a date (`claude-haiku-4-5-20251001`) has the
        price of the name without the date."""
        return self._table.get(model) or self._table.get(_DATE_SUFFIX.sub("", model))

    def cost_usd(self, model: str, usage: Usage) -> float | None:
        """What one call cost; None if the model has no price."""
        if (price := self.of(model)) is None:
            return None
        cache_read = price.input / 10 if price.cache_read is None else price.cache_read
        cache_write = price.input * 1.25 if price.cache_write is None else price.cache_write
        return (
            usage.input_tokens * price.input
            + usage.output_tokens * price.output
            + usage.cache_read_input_tokens * cache_read
            + usage.cache_creation_input_tokens * cache_write
        ) / MILLION
