"""Draws the wait of every critical request over its arrival, as an SVG; optionally together with those of an earlier
run."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil
from typing import Any

from topology.lanes import CRITICAL

WIDTH, HEIGHT, LEFT, TOP = 760, 260, 60, 56
NOW, BEFORE = "#c2255c", "#9a9a9a"

Points = Sequence[tuple[float, float]]
"""For each request: its arrival and its wait."""


def points(result: Mapping[str, Any]) -> Points:
    """The points of a result. It has the form of `Result.as_json`."""
    return [
        (arrived_s, wait_s)
        for lane, arrived_s, wait_s, *_ in result["asks"]
        if lane == CRITICAL.name and wait_s is not None
    ]


def svg(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Draw one or two results of the same scenario, each in the form of `Result.as_json`."""
    drawn = (
        [("now", NOW, points(now))]
        if before is None
        else [
            ("before", BEFORE, points(before)),
            ("after", NOW, points(now)),
        ]
    )
    ends_s = float(now["ends_s"])
    tallest_s = max([1.0, *(wait_s for _, _, each in drawn for _, wait_s in each)])
    step_s = next((step for step in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if tallest_s / step <= 6), 200)
    top_s = step_s * ceil(tallest_s / step_s)
    title = f"Wait of each critical request by when it came ({escape(now['scenario'])})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{TOP + HEIGHT + 40}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
        *_axes(ends_s, top_s, step_s),
    ]
    for number, (name, colour, each) in enumerate(drawn):
        x = LEFT + 90 * number
        lines.append(f'<circle cx="{x + 4}" cy="36" r="4" fill="{colour}"/><text x="{x + 14}" y="40">{name}</text>')
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
