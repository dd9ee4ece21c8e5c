"""What a request will use, before it is known: input from its size, output from what its kind used before. Pure.

A guess is reserved and then settled by what was used, so that it has to be good on the average, not each time.
"""

from collections import OrderedDict
from typing import NamedTuple

KINDS = 4096
"""How many kinds are remembered, the latest."""
WEIGHT = 0.1
SPREAD = 1.0
"""How many mean deviations above the mean an answer is expected: seldom less than is used, and less than
`max_tokens`."""


class Kind(NamedTuple):
    """Requests that are likely to use the same."""

    lane: str
    task: str
    """The first two words of the routing key after the lane."""
    model: str


def task_of(routing_key: str) -> str:
    """`critical.support.chat.eu`: `support.chat`."""
    return ".".join(routing_key.split(".", 3)[1:3])


class _Output:
    __slots__ = ("deviation", "mean")

    def __init__(self, first: float) -> None:
        self.mean = first
        self.deviation = first / 2


class Estimates:
    """Learns with every answer; bounded."""

    def __init__(self, *, first_output_tokens: float, first_bytes_per_token: float) -> None:
        self._first_output = first_output_tokens
        self._first_ratio = 1 / first_bytes_per_token
        self._outputs: OrderedDict[Kind, _Output] = OrderedDict()
        self._tokens_per_byte: OrderedDict[str, float] = OrderedDict()

    def input_tokens(self, model: str, body_bytes: int) -> float:
        return max(1.0, body_bytes * self._tokens_per_byte.get(model, self._first_ratio))

    def output_tokens(self, kind: Kind, *, max_tokens: int) -> float:
        known = self._outputs.get(kind)
        expected = self._first_output if known is None else known.mean + SPREAD * known.deviation
        return max(1.0, min(float(max_tokens), expected))

    def learn(self, kind: Kind, *, body_bytes: int, input_tokens: float, output_tokens: float) -> None:
        """What one answer used. Input is what counts against the limit: without what was read from the cache."""
        known = self._outputs.pop(kind, None)
        if known is None:
            known = _Output(output_tokens)
        else:
            off = output_tokens - known.mean
            known.mean += WEIGHT * off
            known.deviation += WEIGHT * (abs(off) - known.deviation)
        self._outputs[kind] = known
        if len(self._outputs) > KINDS:
            self._outputs.popitem(last=False)
        if body_bytes > 0:
            ratio = self._tokens_per_byte.pop(kind.model, None)
            found = input_tokens / body_bytes
            self._tokens_per_byte[kind.model] = found if ratio is None else ratio + WEIGHT * (found - ratio)
            if len(self._tokens_per_byte) > KINDS:
                self._tokens_per_byte.popitem(last=False)
