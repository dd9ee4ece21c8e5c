"""Draws a trace as a picture with one row for each span, from the answer of Jaeger's query API.

python -m tests.support.waterfall http://127.0.0.1:16686 TRACE_ID >trace.svg
"""

import re
import sys
from collections.abc import Iterator, Sequence
from html import escape, unescape

from tests.support.jaeger import asked
from tests.support.otlp import ReceivedSpan

WIDTH, LEFT, RIGHT, TOP, ROW = 940, 292, 62, 64, 23
COLOURS = {"wait": "#c3c9d2", "delay": "#d9c08c", "process": "#3f6fb5", "chat": "#2f9068", "send": "#8a68b8"}
OTHER, FAILED, INK, QUIET, PAPER, LINE = "#66707d", "#c0392b", "#1f2630", "#5b6572", "#fbfcfd", "#e1e5ea"
STEPS_MS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
TICKS = 8
_NAME = re.compile(r'class="name"[^>]*>([^<]*)<')


def drawn(spans: Sequence[ReceivedSpan]) -> str:
    """The picture as SVG: indented names on the left, bars over time on the right, on a light background."""
    rows = list(_rows(spans, "", 0))
    begin = min(span.start_ns for span in spans)
    whole_ms = (max(span.end_ns for span in spans) - begin) / 1e6
    height = TOP + ROW * len(rows) + 14

    def x(ns: int) -> float:
        return LEFT + (ns - begin) / 1e6 / whole_ms * (WIDTH - LEFT - RIGHT)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13" role="img">',
        f"<title>{len(spans)} spans of one trace, {_ms(whole_ms)} in all</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}" stroke="{LINE}"/>',
        *_legend(),
    ]
    step_ms = next((each for each in STEPS_MS if whole_ms / each <= TICKS), STEPS_MS[-1])
    for at_ms in range(0, int(whole_ms) + 1, step_ms):
        at = x(begin + at_ms * 1_000_000)
        lines += [
            f'<path d="M{at:.1f} {TOP - 6}V{height - 10}" stroke="{LINE}"/>',
            f'<text x="{at:.1f}" y="{TOP - 12}" fill="{QUIET}" font-size="11" text-anchor="middle">{_ms(at_ms)}</text>',
        ]
    for number, (span, depth) in enumerate(rows):
        y = TOP + ROW * number
        start, end = x(span.start_ns), max(x(span.end_ns), x(span.start_ns) + 2)
        lines += [
            f'<text class="name" x="{14 + 11 * depth}" y="{y + 15}" fill="{INK}">{escape(span.name)}</text>',
            f'<rect x="{start:.1f}" y="{y + 4}" width="{end - start:.1f}" height="14" rx="2" fill="{_colour(span)}"/>',
            f'<text x="{end + 5:.1f}" y="{y + 15}" fill="{QUIET}" font-size="11">'
            f"{_ms((span.end_ns - span.start_ns) / 1e6)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


def names(picture: str) -> list[str]:
    """The names of the spans in a picture, from top to bottom."""
    return [unescape(each) for each in _NAME.findall(picture)]


def _rows(spans: Sequence[ReceivedSpan], parent_id: str, depth: int) -> Iterator[tuple[ReceivedSpan, int]]:
    for span in sorted((each for each in spans if each.parent_id == parent_id), key=lambda each: each.start_ns):
        yield span, depth
        yield from _rows(spans, span.span_id, depth + 1)


def _legend() -> Iterator[str]:
    at = 14
    for what, colour in {**COLOURS, "ack, ask": OTHER, "failed": FAILED}.items():
        yield f'<rect x="{at}" y="14" width="12" height="12" rx="2" fill="{colour}"/>'
        yield f'<text x="{at + 17}" y="25" fill="{QUIET}" font-size="12">{what}</text>'
        at += 40 + 7 * len(what)


def _colour(span: ReceivedSpan) -> str:
    return FAILED if span.status == "ERROR" else COLOURS.get(span.name.partition(" ")[0], OTHER)


def _ms(ms: float) -> str:
    return f"{ms:.1f} ms" if 0 < ms < 10 else f"{ms:,.0f} ms"


if __name__ == "__main__":
    print(drawn(asked(*sys.argv[1:3])), end="")
