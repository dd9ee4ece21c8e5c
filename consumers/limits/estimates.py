"""Estimates what a request will use: input by its size, output by what its kind used before. Pure.

The estimated amount is reserved and later corrected, so estimates have to be right on average, not each time.
"""

from collections import OrderedDict
from typing import NamedTuple

KINDS = 4096
"""How many kinds are remembered: the latest ones."""
WEIGHT = 0.1
SPREAD = 1.0
"""The estimate is the mean plus this many mean deviations: seldom less than an answer uses, and less than
`max_tokens`."""


class UsageClass(NamedTuple):
    """Requests that are likely to use about the same."""

    lane: str
    task: str
    """The first two words of the routing key after the lane."""
    model: str


def task_of(routing_key: str) -> str:
    """The task of a routing key: `support.chat` for `critical.support.chat.eu`."""
    return ".".join(routing_key.split(".", 3)[1:3])


class _Seen:
    """Mean and mean deviation of the observed values; the latest one weighs most."""

    __slots__ = ("deviation", "mean")

    def __init__(self, first: float) -> None:
        self.mean = first
        self.deviation = first / 2

    @property
    def expected(self) -> float:
        return self.mean + SPREAD * self.deviation

    def see(self, value: float) -> None:
        off = value - self.mean
        self.mean += WEIGHT * off
        self.deviation += WEIGHT * (abs(off) - self.deviation)


class Estimates:
    """Learns from every answer; remembers at most `KINDS` kinds."""

    def __init__(self, *, first_output_tokens: float, first_bytes_per_token: float) -> None:
        self._first_output = first_output_tokens
        self._first_ratio = 1 / first_bytes_per_token
        self._outputs: OrderedDict[UsageClass, _Seen] = OrderedDict()
        self._runs: OrderedDict[UsageClass, _Seen] = OrderedDict()
        self._tokens_per_byte: OrderedDict[str, float] = OrderedDict()

    def input_tokens(self, model: str, body_bytes: int) -> float:
        return max(1.0, body_bytes * self._tokens_per_byte.get(model, self._first_ratio))

    def output_tokens(self, kind: UsageClass, *, max_tokens: int) -> float:
        known = self._outputs.get(kind)
        expected = self._first_output if known is None else known.expected
        return max(1.0, min(float(max_tokens), expected))

    def run_s(self, kind: UsageClass) -> float:
        """How long a call is likely to take at most; 0 if that is not known."""
        known = self._runs.get(kind)
        return 0.0 if known is None else known.expected

    def learn_run(self, kind: UsageClass, run_s: float, *, was_cut: bool) -> None:
        """Learn how long a call took. `was_cut`: its deadline ended it, and it would have taken longer."""
        if not was_cut or run_s > self.run_s(kind):
            _see(self._runs, kind, run_s)

    def learn(self, kind: UsageClass, *, body_bytes: int, input_tokens: float, output_tokens: float) -> None:
        """Learn what one answer used. Input is what counts against the limit: without what was read from the cache."""
        _see(self._outputs, kind, output_tokens)
        if body_bytes > 0:
            ratio = self._tokens_per_byte.pop(kind.model, None)
            found = input_tokens / body_bytes
            self._tokens_per_byte[kind.model] = found if ratio is None else ratio + WEIGHT * (found - ratio)
            if len(self._tokens_per_byte) > KINDS:
                self._tokens_per_byte.popitem(last=False)


def _see(seen: OrderedDict[UsageClass, _Seen], kind: UsageClass, value: float) -> None:
    known = seen.pop(kind, None)
    if known is None:
        known = _Seen(value)
    else:
        known.see(value)
    seen[kind] = known
    if len(seen) > KINDS:
        seen.popitem(last=False)
