"""One row of the table: a contestant's waits and answers, and its provider's counts."""

from dataclasses import dataclass

from contest.load import Board, Load
from contest.provider import Counts

HEAD = (
    "", "critical wait: p50", "p99", "max", "critical answered", "batch answered", "429s", "requests used",
    "input used", "calls per answer",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one contestant. If it did not run, `board` is None and `why_not` gives the reason."""

    name: str
    board: Board | None = None
    counts: Counts | None = None
    why_not: str = ""

    def cells(self) -> tuple[str, ...]:
        if self.board is None or self.counts is None:
            return (self.name, f"not run: {self.why_not}")
        waits = self.board.waits_s("critical")
        asked = len(waits)
        return (
            self.name,
            *(_seconds(quantile(waits, q)) for q in (0.5, 0.99, 1.0)),
            f"{self.board.answered('critical')} of {asked}" if asked else "-",
            str(self.board.answered("batch")),
            str(self.counts.refused),
            f"{100 * used(self.counts.requests, self.board.load.requests_per_minute, self.board.load):.1f} %",
            f"{100 * used(self.counts.input_tokens, self.board.load.input_tokens_per_minute, self.board.load):.1f} %",
            f"{self.calls_per_answer():.2f}",
        )

    def calls_per_answer(self) -> float:
        """Calls for each answer. Of the provider's count and the contestant's, the larger one is used, because some
        calls may not have reached the provider."""
        assert self.board is not None
        assert self.counts is not None
        answered = max(1, self.board.answered())
        attempts = sum(ask.attempts for ask in self.board.asks if ask.answered_s is not None)
        return max(self.counts.calls - self.counts.running, attempts) / answered


def used(amount: float, per_minute: float, load: Load) -> float:
    """The used part of what could be used: what the bucket held at the beginning, plus its refill."""
    return amount / (per_minute * (load.window_s + load.burst_s) / 60)


def quantile(values: list[float], q: float) -> float | None:
    """A quantile of sorted values, by nearest rank; None without values."""
    return values[min(len(values) - 1, int(q * len(values)))] if values else None


def table(rows: list[Row]) -> str:
    """The rows as an aligned Markdown table."""
    every = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(cells[each]) for cells in every if len(cells) == len(HEAD)) for each in range(len(HEAD))]
    widths[0] = max(len(cells[0]) for cells in every)
    lines = []
    for cells in every:
        padded = [f"{cells[0]:<{widths[0]}}"]
        if len(cells) == len(HEAD):
            padded += [f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True)]
        else:
            padded += cells[1:]
        lines.append("| " + " | ".join(padded) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
