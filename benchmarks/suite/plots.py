"""Draws the plots, in a light and a dark version. Runs in the environment .cache/bench, which has matplotlib:

plots.py RESULTS.json PICTURE        writes PICTURE-light.png and PICTURE-dark.png
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

ORDER = ("floor", "lanekeeper", "celery", "dramatiq", "faststream", "taskiq")
COLOURS = {"floor": "#8a8a8a", "lanekeeper": "#e8590c"}
OTHERS = "#4c8dc9"


def median(runs: list[dict[str, Any]], scenario: str, name: str, figure: str) -> float | None:
    found = [
        run["figures"][figure]
        for run in runs
        if run["scenario"] == scenario and run["contestant"] == name and figure in run["figures"]
    ]
    return statistics.median(found) if found else None


def bars(axes: Any, runs: list[dict[str, Any]], scenario: str, figure: str, title: str) -> None:
    found = {name: value for name in ORDER if (value := median(runs, scenario, name, figure)) is not None}
    names = list(reversed(found))
    drawn = axes.barh(names, [found[name] for name in names], color=[COLOURS.get(name, OTHERS) for name in names])
    axes.bar_label(drawn, fmt="{:.0f}", padding=3)
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=10)


def lines(axes: Any, runs: list[dict[str, Any]], figure: str, title: str) -> None:
    depths = sorted({int(run["scenario"].split()[1]) for run in runs if run["scenario"].startswith("flood ")})
    for name, colour in COLOURS.items():
        points = [(depth, median(runs, f"flood {depth}", name, figure)) for depth in depths]
        known = [(depth, value) for depth, value in points if value is not None]
        axes.plot([depth for depth, _ in known], [value for _, value in known], "o-", color=colour, label=name)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch jobs in the queue")
    axes.legend(frameon=False)
    axes.set_title(title, fontsize=10)


def main(results: Path, picture: str) -> None:
    runs = json.loads(results.read_text())["runs"]
    for name, style, background in (("light", "default", "white"), ("dark", "dark_background", "#0d1117")):
        with pyplot.style.context(style):
            figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.4), facecolor=background)
            bars(left, runs, "drain", "per_core_s", "requests a second and core")
            bars(middle, runs, "rpc", "callers_per_s", "50 callers: answers a second")
            lines(right, runs, "critical_p99_ms", "critical wait, p99 ms, 8 slots")
            for axes in (left, middle, right):
                axes.set_facecolor(background)
                axes.spines[["top", "right"]].set_visible(False)
            figure.tight_layout()
            figure.savefig(f"{picture}-{name}.png", dpi=110, facecolor=background)
            pyplot.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
