"""Draws the waits over time as an SVG, with a panel for each contestant. All panels have the same axes; that of the
waits is logarithmic."""

from collections.abc import Iterator, Sequence
from html import escape
from math import log10

from contest.load import Ask, Load
from contest.score import Row

WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 130, 60, 56, 34
SHORTEST_S, LONGEST_S = 0.01, 1000.0
COLOURS = {"batch": "#b8b8b8", "critical": "#c2255c"}
"""The lanes' colours, in the order of drawing."""


def svg(rows: Sequence[Row], load: Load) -> str:
    """Draw the contestants that ran."""
    panels = [row for row in rows if row.board is not None]
    height = TOP + len(panels) * (HEIGHT + GAP) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Wait of each request by the time it was asked or, of batch jobs, '
        "answered</text>",
    ]
    for each, (lane, colour) in enumerate(COLOURS.items()):
        x = LEFT + 90 * each
        lines.append(f'<circle cx="{x + 4}" cy="36" r="4" fill="{colour}"/><text x="{x + 14}" y="40">{lane}</text>')
    x = LEFT + 90 * len(COLOURS)
    lines.append(f'<circle cx="{x + 4}" cy="36" r="3.5" fill="none" stroke="black"/>')
    lines.append(f'<text x="{x + 14}" y="40">not answered in the end</text>')
    for number, row in enumerate(panels):
        lines += _panel(row, load, top=TOP + number * (HEIGHT + GAP))
    return "\n".join([*lines, "</svg>\n"])


def _panel(row: Row, load: Load, *, top: int) -> Iterator[str]:
    assert row.board is not None
    yield f'<text x="{LEFT}" y="{top + 12}" font-weight="bold">{escape(row.name)}</text>'
    top += 18
    bottom = top + HEIGHT - 18
    yield f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{bottom - top}" fill="none" stroke="#888"/>'
    for seconds in (0.1, 1, 10, 100):
        y = _y(seconds, top, bottom)
        yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds:g} s</text>'
    for tenth in range(0, 11, 2):
        x = LEFT + WIDTH * tenth / 10
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{load.window_s * tenth / 10:g} s</text>'
    for lane, colour in COLOURS.items():
        for ask in row.board.asks:
            at_s = ask.asked_s if ask.asked_s else ask.answered_s  # batch jobs are all asked at the beginning
            if ask.lane == lane and at_s is not None and at_s <= load.window_s:
                yield _dot(ask, load, x=LEFT + WIDTH * at_s / load.window_s, colour=colour, top=top, bottom=bottom)


def _dot(ask: Ask, load: Load, *, x: float, colour: str, top: int, bottom: int) -> str:
    y = _y(ask.wait_s(load.window_s, load.latency_s), top, bottom)
    edge = ' stroke="black"' if ask.answered_s is None else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"{edge}/>'


def _y(seconds: float, top: int, bottom: int) -> float:
    bounded = min(LONGEST_S, max(SHORTEST_S, seconds))
    return bottom - (bottom - top) * log10(bounded / SHORTEST_S) / log10(LONGEST_S / SHORTEST_S)
