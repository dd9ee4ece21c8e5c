"""What a call uses of an account: requests, input tokens, output tokens; always in this order."""

from typing import Final, NamedTuple


class Amounts(NamedTuple):
    """Of one call, or a minute's limit."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0


NOTHING: Final = Amounts()
REASONS: Final = ("rpm", "itpm", "otpm")
"""What a request waits for that waits for one of the three: requests, input tokens, output tokens per minute."""
CONCURRENCY: Final = "concurrency"
PAUSED: Final = "paused"
