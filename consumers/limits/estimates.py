"""Estimates what a request will use: input tokens by the size of its body, output tokens by earlier requests of its
kind (lane, task and model). Without I/O.

The estimated amount is reserved before the call and corrected after it, so estimates need to be right only on average.
"""

from collections import OrderedDict
from typing import NamedTuple, TypeVar

KINDS = 4096
"""The number of kinds of requests (lane, task and model) for which estimates are kept; the kind for which no call has
ended for the longest time is removed first."""
WEIGHT = 0.1
"""The weight of the latest call in the smoothed means from which the tokens and the duration of a call are
estimated."""
SPREAD = 1.0
"""The estimate of an answer's length in tokens, or of a call's duration, is the mean plus this many mean deviations, so
that few answers or calls exceed their estimate."""
Key = TypeVar("Key")


class UsageClass(NamedTuple):
    """A kind of requests: those of one lane, task and model, which are likely to use similar numbers of tokens."""

    lane: str
    task: str
    """The first two words of the routing key after the lane."""
    model: str


def task_of(routing_key: str) -> str:
    """The task of a routing key: `support.chat` for `critical.support.chat.eu`."""
    return ".".join(routing_key.split(".", 3)[1:3])


class _Average:
    """The smoothed mean of observed values, and their smoothed mean deviation from it; later values weigh more."""

    def __init__(self, first: float) -> None:
        self.mean = first
        self.deviation = first / 2

    @property
    def expected(self) -> float:
        return self.mean + SPREAD * self.deviation

    def add(self, value: float) -> None:
        off = value - self.mean
        self.mean += WEIGHT * off
        self.deviation += WEIGHT * (abs(off) - self.deviation)


class Estimates:
    """Estimates how many tokens a request will use and how long its call will take, from earlier answers to requests of
    the same lane, task and model. At most `KINDS` such kinds are kept."""

    def __init__(self, *, first_output_tokens: float, first_bytes_per_token: float) -> None:
        self._first_output = first_output_tokens
        self._first_ratio = 1 / first_bytes_per_token
        self._outputs: OrderedDict[UsageClass, _Average] = OrderedDict()
        self._runs: OrderedDict[UsageClass, _Average] = OrderedDict()
        self._tokens_per_byte: OrderedDict[str, _Average] = OrderedDict()

    def input_tokens(self, model: str, body_bytes: int) -> float:
        known = self._tokens_per_byte.get(model)
        return max(1.0, body_bytes * (self._first_ratio if known is None else known.mean))

    def output_tokens(self, kind: UsageClass, *, max_tokens: int) -> float:
        known = self._outputs.get(kind)
        expected = self._first_output if known is None else known.expected
        return max(1.0, min(float(max_tokens), expected))

    def run_s(self, kind: UsageClass) -> float:
        """In how many seconds a call of this kind is expected to end; only few calls take longer. 0 if no call of the
        kind has ended yet."""
        known = self._runs.get(kind)
        return 0.0 if known is None else known.expected

    def learn_run(self, kind: UsageClass, run_s: float, *, was_cut: bool) -> None:
        """Learn from a call how long it took. `was_cut`: True if the deadline ended the call, which would have taken
        longer. Its duration then counts only if it is longer than the estimate."""
        if not was_cut or run_s > self.run_s(kind):
            _learn_value(self._runs, kind, run_s)

    def learn(self, kind: UsageClass, *, body_bytes: int, input_tokens: float, output_tokens: float) -> None:
        """Learn how many tokens one answer has used. `input_tokens`: only those that count against the limit, so not
        those read from the cache."""
        _learn_value(self._outputs, kind, output_tokens)
        if body_bytes > 0:
            _learn_value(self._tokens_per_byte, kind.model, input_tokens / body_bytes)


def _learn_value(averages: OrderedDict[Key, _Average], key: Key, value: float) -> None:
    if (known := averages.get(key)) is not None:
        known.add(value)
        averages.move_to_end(key)
        return
    averages[key] = _Average(value)
    if len(averages) > KINDS:
        averages.popitem(last=False)
