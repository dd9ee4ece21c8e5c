"""Draws the waits of requests over their arrivals, as an SVG."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil

WIDTH, HEIGHT, LEFT, TOP = 760, 260, 60, 56
COLOURS = ("#9a9a9a", "#c2255c")

Points = Sequence[tuple[float, float]]
"""For each request: its arrival and its wait."""


def svg(title: str, ends_s: float, drawn: Mapping[str, Points]) -> str:
    """Draw the points of each of `drawn`, which has at most two names."""
    tallest_s = max([1.0, *(wait_s for each in drawn.values() for _, wait_s in each)])
    step_s = next((step for step in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if tallest_s / step <= 6), 200)
    top_s = step_s * ceil(tallest_s / step_s)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{TOP + HEIGHT + 40}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_axes(ends_s, top_s, step_s),
    ]
    for number, (name, each) in enumerate(drawn.items()):
        x, colour = LEFT + 180 * number, COLOURS[number]
        lines.append(
            f'<circle cx="{x + 4}" cy="36" r="4" fill="{colour}"/><text x="{x + 14}" y="40">{escape(name)}</text>'
        )
        lines += [
            f'<circle cx="{LEFT + WIDTH * at_s / ends_s:.1f}" cy="{_y(wait_s, top_s):.1f}" r="2.2" fill="{colour}"/>'
            for at_s, wait_s in each
        ]
    return "\n".join([*lines, "</svg>\n"])


def _axes(ends_s: float, top_s: float, step_s: float) -> Iterator[str]:
    yield f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>'
    for number in range(round(top_s / step_s) + 1):
        y = _y(number * step_s, top_s)
        yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * step_s:g} s</text>'
    for eighth in range(9):
        x = LEFT + WIDTH * eighth / 8
        yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{ends_s * eighth / 8:.0f} s</text>'


def _y(wait_s: float, top_s: float) -> float:
    return TOP + HEIGHT * (1 - max(0.0, wait_s) / top_s)
