"""The results as Markdown tables."""

from collections.abc import Iterator, Sequence

from benchmarks.replaying import guarantees
from benchmarks.replaying.result import Errors, Result, Spread
from benchmarks.replaying.scenarios import LANES
from consumers.limits.base import REASONS

Rows = Sequence[Sequence[str]]


def waits(results: Sequence[Result]) -> str:
    """A table of all scenarios: waits, used budget, and the longest times without a grant."""
    head = [
        "", *(f"{lane} p50 / p95 / p99 / max, s" for lane in LANES), "429s", "used: rpm / itpm / otpm, %", "lost, %",
        "longest nothing: critical / normal / batch, s",
    ]  # fmt: skip
    rows = [
        [
            each.scenario.name,
            *(_spread(each.waits(lane)) for lane in LANES),
            str(each.refused),
            " / ".join(f"{100 * used:.1f}" for used in each.use),
            f"{100 * each.lost[REASONS.index(each.binding)]:.1f} {each.binding}",
            " / ".join(f"{each.longest_nothing_s(lane):.1f}" for lane in LANES),
        ]
        for each in results
    ]
    return aligned([head, *rows])


def predictions(results: Sequence[Result]) -> str:
    """A table of the errors of predicted waits, for requests that waited or were predicted to wait."""
    head = ["prediction off by", *(f"{lane} p50 / p90 / p99 (bias), s" for lane in LANES)]
    rows = [[each.scenario.name, *(_errors(each.predictions(lane)) for lane in LANES)] for each in results]
    return aligned([head, *rows])


def bounds(results: Sequence[Result]) -> str:
    """A table of each lane's waits beside those at other gates, and of the comparison, request by request, with an
    account of the lane's own."""
    head = [
        "", "lane", "waits p50 / p95 / p99, s", "clairvoyant", "strict order", "own account",
        "later than in its own (at most, s)", "least of its reserve in 4 min, %",
    ]  # fmt: skip
    return aligned([head, *(row for each in results for row in _beside(each))])


def _beside(result: Result) -> Iterator[list[str]]:
    clairvoyant, strict = guarantees.clairvoyant(result), guarantees.strict_order(result)
    for lane in LANES:
        reserve = guarantees.reserve(result, lane)
        least = "-" if reserve.least is None else f"{100 * reserve.least:.0f} of {reserve.windows} windows"
        row = [result.scenario.name, lane, _short(result.waits(lane)), "-", "-", "-", "-", least]
        if lane in clairvoyant:
            own = guarantees.beside_own(result, lane)
            row[3:7] = [
                _short(clairvoyant[lane]),
                _short(strict[lane]),
                f"{_short(own.waits)} ({own.own})",
                f"{own.late} of {own.count} ({own.latest_s:.2f})",
            ]
        yield row


def aligned(rows: Rows) -> str:
    """The rows as an aligned Markdown table."""
    widths = [max(len(row[each]) for row in rows) for each in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _errors(found: Errors) -> str:
    off = found.off
    return f"{off.p50:.2f} / {off.p90:.2f} / {off.p99:.2f} ({found.bias_s:+.2f}) of {off.count}"


def _short(found: Spread) -> str:
    return " / ".join(f"{value:.2f}" for value in (found.p50, found.p95, found.p99))


def _spread(found: Spread) -> str:
    return " / ".join(f"{value:.2f}" for value in (found.p50, found.p95, found.p99, found.most)) if found.count else "-"
