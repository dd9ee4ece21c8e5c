"""What the simulated API of tests would send a bill for. Its prices are its own, in exact decimals, so that
Lanekeeper's figures can be compared with them."""

from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

_PRICES: Final[Mapping[str, tuple[str, str]]] = {
    "fable-5-2": ("8", "40"),
    "fable-5-1": ("10", "50"),
    "opus-5-5": ("4", "20"),
    "opus-5": ("5", "25"),
    "sonnet-5-5": ("2", "10"),
    "sonnet-5": ("2", "10"),
    "haiku-5-5": ("0.10", "0.50"),
    "haiku-4-5": ("1", "5"),
}
"""Of a million input and output tokens, in dollars. Other models are free."""
_BATCH_SHARE: Final = Decimal("0.5")


class Ledger:
    """What all answers cost, those in batches and the others (`live`), in dollars."""

    def __init__(self) -> None:
        self.live_usd = self.batch_usd = self.saved_usd = Decimal(0)
        self.answers: Counter[str] = Counter()

    def bill_live(self, model: str, *, input_tokens: int, output_tokens: int) -> None:
        self.answers["live"] += 1
        self.live_usd += _price(model, input_tokens, output_tokens)

    def bill_batched(self, model: str, *, input_tokens: int, output_tokens: int) -> Decimal:
        live_usd = _price(model, input_tokens, output_tokens)
        usd = live_usd * _BATCH_SHARE
        self.answers["batch"] += 1
        self.batch_usd += usd
        self.saved_usd += live_usd - usd
        return usd

    @property
    def usd(self) -> Decimal:
        return self.live_usd + self.batch_usd


def _price(model: str, input_tokens: int, output_tokens: int) -> Decimal:
    input_usd, output_usd = _PRICES.get(model.removeprefix("claude-"), ("0", "0"))
    return (input_tokens * Decimal(input_usd) + output_tokens * Decimal(output_usd)) / 1_000_000
