"""What calls cost, in US dollars.

The prices are those of genai-prices, a table that others keep: by date, by the length of the prompt, for fast mode, and
for Bedrock by endpoint. What it does not have is below: batches, inference in one country, a few models of limited
access. The settings may name prices for models that it lacks, or other prices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import genai_prices
from genai_prices import data_snapshot
from genai_prices.types import TieredPrices

if TYPE_CHECKING:
    from genai_prices.types import ModelPrice

MILLION: Final = 1_000_000
BATCH_SHARE: Final = 0.5
"""The price of tokens in a batch, as a share of their price in a live call. Web searches cost the same."""
GEO_FACTORS: Final[Mapping[str, float]] = {"us": 1.1}
"""What tokens cost more where `inference_geo` keeps them (Anthropic's pricing page, "Data residency pricing"). Models
before Opus 4.6 and Sonnet 4.6 report no `inference_geo`."""
SAME_PRICES: Final[Mapping[str, str]] = {
    "claude-mythos-5-1": "claude-fable-5-1",
    "claude-mythos-5": "claude-fable-5",
    "claude-mythos-preview": "claude-fable-5",
}
"""Models of limited access, which the table does not have, by the model whose prices they share (LiteLLM 1.110.2)."""
VENDORS: Final = ("anthropic", "openai")
"""Whose models the table is asked for, by its names."""
WEB_SEARCH_USD: Final = 0.01
CACHED: Final = 1024


@dataclass(frozen=True, slots=True)
class Price:
    """The prices of one model, in US dollars per million tokens."""

    input: float
    output: float
    cache_read: float | None = None
    """Of input tokens that are read from the prompt cache; None: a tenth of `input`."""
    cache_write: float | None = None
    """Of input tokens that are written to the prompt cache for five minutes; None: 1.25 times `input`."""
    cache_write_1h: float | None = None
    """Of input tokens that are written to the prompt cache for an hour; None: twice `input`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """How many tokens a call used, as the provider counted them. `input_tokens`: those that were neither read from the
    prompt cache nor written to it. `cache_creation_1h_tokens` are contained in `cache_creation_input_tokens`."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation_1h_tokens: int = 0
    cache_read_input_tokens: int = 0

    @property
    def prompt(self) -> int:
        return self.input_tokens + self.cache_creation_input_tokens + self.cache_read_input_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(Tokens):
    """What a call used, and how it was served."""

    web_searches: int = 0
    is_fast: bool = False
    geo: str = ""
    is_batch: bool = False
    iterations: tuple[tuple[str, Tokens], ...] = ()
    """If the call took several inferences (compaction, an advisor, a fallback at the provider): the tokens of each, and
    its model, or "" for the request's. All are on the bill, and the counts above contain only some of them."""


class _Rates(NamedTuple):
    """Prices per token, for prompts from a length on, and of one web search."""

    input: "Bands"
    output: "Bands"
    cache_read: "Bands"
    cache_write: "Bands"
    cache_write_1h: "Bands"
    web_search: float


Bands = tuple[tuple[int, float], ...]
"""From which length of the prompt on (exclusive) a price holds: the shortest first."""
FREE: Final[Bands] = ((0, 0.0),)


class Prices:
    """The prices of all models: those in `given`, else those of the table. `as_of`: the day whose prices hold; None:
    today. `batch`: see `BATCH_SHARE`."""

    def __init__(
        self, given: Mapping[str, Price] | None = None, *, as_of: date | None = None, batch: float = BATCH_SHARE
    ) -> None:
        self._given = given or {}
        self._as_of = as_of
        self._batch = batch
        self._rates = lru_cache(maxsize=CACHED)(self._find)

    @property
    def source(self) -> str:
        """Where the prices come from, for people."""
        return f"genai-prices {genai_prices.__version__}" + (f" as of {self._as_of}" if self._as_of else "")

    @property
    def models(self) -> frozenset[str]:
        """The models with a price, by the names under which they are listed."""
        snapshot = data_snapshot.get_snapshot()
        listed = {model.id for name in VENDORS for model in snapshot.find_provider(None, name, None).models}
        return frozenset(self._given) | frozenset(SAME_PRICES) | listed

    def has(self, model: str, name: str = "") -> bool:
        return self._rates(model, name, False, self._day()) is not None

    def cost_usd(self, model: str, usage: Usage, *, name: str = "") -> float | None:
        """What a call cost; None if the price of a model that it used is unknown. `name`: the provider's own name for
        the model, which on Bedrock tells the endpoint."""
        return self._usd(model, usage, name, self._batch if usage.is_batch else 1.0)

    def saved_usd(self, model: str, usage: Usage, *, name: str = "") -> float:
        """How much more the call would have cost outside of a batch."""
        if not usage.is_batch:
            return 0.0
        return (self._usd(model, usage, name, 1.0) or 0.0) - (self.cost_usd(model, usage, name=name) or 0.0)

    def _usd(self, model: str, usage: Usage, name: str, factor: float) -> float | None:
        day, of_tokens = self._day(), 0.0
        searches = usage.web_searches
        for used_model, tokens in _inferences(model, usage):
            own = used_model == model
            rates = self._rates(used_model, name if own else "", usage.is_fast and own, day)
            if rates is None:
                return None
            of_tokens += _of_tokens(rates, tokens)
        if searches and (rates := self._rates(model, name, False, day)) is not None:
            searched_usd = searches * rates.web_search
        else:
            searched_usd = 0.0
        return of_tokens * factor * GEO_FACTORS.get(usage.geo, 1.0) + searched_usd

    def _day(self) -> date:
        return self._as_of or datetime.now(UTC).date()

    def _find(self, model: str, name: str, is_fast: bool, day: date) -> _Rates | None:
        if (own := self._given.get(model)) is not None:
            return _own_rates(own)
        snapshot = data_snapshot.get_snapshot()
        listings = [("aws", name if "anthropic." in name else ""), *((vendor, model) for vendor in VENDORS)]
        for provider, listed in listings:
            try:
                found = snapshot.find_provider_model(SAME_PRICES.get(listed, listed), None, provider, None)[1]
            except LookupError:
                continue
            noon = datetime.combine(day, time(12), UTC)
            return _table_rates(found.get_prices(noon, {"speed": "fast"} if is_fast else None))
        return None


def _inferences(model: str, usage: Usage) -> Iterator[tuple[str, Tokens]]:
    if not usage.iterations:
        yield model, usage
    for used_model, tokens in usage.iterations:
        yield used_model or model, tokens


def _of_tokens(rates: _Rates, tokens: Tokens) -> float:
    prompt = tokens.prompt
    for_5m = tokens.cache_creation_input_tokens - tokens.cache_creation_1h_tokens
    return (
        tokens.input_tokens * _at(rates.input, prompt)
        + tokens.output_tokens * _at(rates.output, prompt)
        + tokens.cache_read_input_tokens * _at(rates.cache_read, prompt)
        + for_5m * _at(rates.cache_write, prompt)
        + tokens.cache_creation_1h_tokens * _at(rates.cache_write_1h, prompt)
    )


def _at(bands: Bands, prompt: int) -> float:
    return next((price for start, price in reversed(bands) if prompt > start), bands[0][1])


def _own_rates(price: Price) -> _Rates:
    read = None if price.cache_read is None else ((0, price.cache_read / MILLION),)
    write = None if price.cache_write is None else ((0, price.cache_write / MILLION),)
    write_1h = None if price.cache_write_1h is None else ((0, price.cache_write_1h / MILLION),)
    return _rates_of(
        ((0, price.input / MILLION),), ((0, price.output / MILLION),), read, write, write_1h, WEB_SEARCH_USD
    )


def _table_rates(price: "ModelPrice") -> _Rates:
    def bands(name: str) -> Bands | None:
        found = getattr(price, f"{name}_mtok", None)
        if isinstance(found, TieredPrices):
            return ((0, float(found.base) / MILLION), *((t.start, float(t.price) / MILLION) for t in found.tiers))
        return None if found is None else ((0, float(found) / MILLION),)

    searches = getattr(price, "web_searches_kcount", None)
    return _rates_of(
        bands("input") or FREE,
        bands("output") or FREE,
        bands("cache_read"),
        bands("cache_write"),
        bands("cache_write_1h"),
        WEB_SEARCH_USD if searches is None else float(searches) / 1000,
    )


def _rates_of(
    input: Bands, output: Bands, read: Bands | None, write: Bands | None, write_1h: Bands | None, search_usd: float
) -> _Rates:
    """What is missing costs what it does for all models of Anthropic, relative to `input`."""

    def times(factor: float) -> Bands:
        return tuple((start, usd * factor) for start, usd in input)

    return _Rates(input, output, read or times(0.1), write or times(1.25), write_1h or times(2.0), search_usd)
