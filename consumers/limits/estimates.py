"""Estimates how many tokens a request will use and how long its call will take, from earlier requests of its kind."""

from typing import NamedTuple, TypeVar

from cachetools import LRUCache

KINDS = 4096
WEIGHT = 0.1
SPREAD = 1.0
Key = TypeVar("Key")


class UsageClass(NamedTuple):
    """A kind of requests, which are likely to use similar numbers of tokens."""

    lane: str
    task: str
    model: str


def task_of(routing_key: str) -> str:
    """The task of a routing key: `support.chat` for `critical.support.chat.eu`."""
    return ".".join(routing_key.split(".", 3)[1:3])


class _Average:
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
    """Estimates how many tokens a request will use and how long its call will take."""

    def __init__(self, *, first_output_tokens: float, first_bytes_per_token: float) -> None:
        self._first_output = first_output_tokens
        self._first_ratio = 1 / first_bytes_per_token
        self._outputs: LRUCache[UsageClass, _Average] = LRUCache(KINDS)
        self._runs: LRUCache[UsageClass, _Average] = LRUCache(KINDS)
        self._tokens_per_byte: LRUCache[str, _Average] = LRUCache(KINDS)

    def input_tokens(self, model: str, text_bytes: int, media_tokens: int = 0) -> float:
        known = self._tokens_per_byte.get(model)
        return max(1.0, media_tokens + text_bytes * (self._first_ratio if known is None else known.mean))

    def output_tokens(self, kind: UsageClass, *, max_tokens: int) -> float:
        known = self._outputs.get(kind)
        expected = self._first_output if known is None else known.expected
        return max(1.0, min(float(max_tokens), expected))

    def run_s(self, kind: UsageClass) -> float:
        known = self._runs.get(kind)
        return 0.0 if known is None else known.expected

    def learn_run(self, kind: UsageClass, run_s: float, *, was_cut: bool) -> None:
        """Learn from a call how long it took. `was_cut`: True if the deadline ended the call, which would have taken
        longer."""
        if not was_cut or run_s > self.run_s(kind):
            _learn_value(self._runs, kind, run_s)

    def learn(
        self, kind: UsageClass, *, text_bytes: int, media_tokens: int = 0, input_tokens: float, output_tokens: float
    ) -> None:
        """Learn how many tokens one answer has used. `input_tokens`: only those that count against the limit, so not
        those read from the cache. If the request had images or documents, its text is taken to have its part of them;
        if these are more than the text, the answer teaches nothing about text."""
        _learn_value(self._outputs, kind, output_tokens)
        expected = self.input_tokens(kind.model, text_bytes)
        if text_bytes > 0 and media_tokens < expected:
            part = expected / (expected + media_tokens)
            _learn_value(self._tokens_per_byte, kind.model, part * input_tokens / text_bytes)


def _learn_value(averages: LRUCache[Key, _Average], key: Key, value: float) -> None:
    if (known := averages.get(key)) is None:
        averages[key] = _Average(value)
    else:
        known.add(value)
