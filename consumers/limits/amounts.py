"""What a call uses of an account's limits: requests, input tokens and output tokens, always in this order."""

from typing import Final, NamedTuple


class Amounts(NamedTuple):
    """What a call to a provider uses, or an account's limits per minute."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0


NOTHING: Final = Amounts()
INPUT: Final = 1
"""The index of the input tokens in a value of `Amounts`."""
REASONS: Final = ("rpm", "itpm", "otpm")
"""Names of the limits that a request may wait for: requests, input tokens, output tokens per minute."""
CONCURRENCY: Final = "concurrency"
PAUSED: Final = "paused"
