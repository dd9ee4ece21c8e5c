"""A bound for comparison: the waits at a gate without reserves and with exact estimates. The first request by lane,
then by arrival, starts as soon as the buckets hold what it will use. A batch job starts only if no other request waits.
Pure.
"""

import random
from math import inf

from benchmarks.replaying.load import Ask, job, load
from benchmarks.replaying.result import Result
from benchmarks.replaying.scenarios import LANES

Lines = dict[str, list[Ask]]
Found = dict[str, list[float]]


def starts_s(result: Result) -> dict[str, list[float]]:
    """When each critical and normal request would start, in the order of arrival."""
    scenario, limits = result.scenario, result.load.limits
    jobs, rng = load(scenario).jobs, random.Random(scenario.seed)
    per_s = [limit / 60 for limit in limits]
    most = [max(1.0, limit * scenario.bucket_s / 60) for limit in limits]
    levels, now_s = list(most), 0.0
    lines = {lane: [ask for ask in result.of(lane) if ask.counts] for lane in LANES[:2]}
    found: dict[str, list[float]] = {lane: [] for lane in lines}
    waiting = job(next(jobs), 0.0, rng)
    while any(len(found[lane]) < len(line) for lane, line in lines.items()):
        lane, first = _first(lines, found, now_s) or ("", waiting)
        need = [min(used, full) for used, full in zip(first.used, most, strict=True)]
        in_s = max((n - level) / rate for n, level, rate in zip(need, levels, per_s, strict=True))
        if in_s > 1e-9:
            comes_s = _next_s(lines, found, now_s)
            until_s = min(now_s + in_s, comes_s)
            gained = until_s - now_s
            levels = [min(full, level + gained * rate) for full, level, rate in zip(most, levels, per_s, strict=True)]
            now_s = until_s
            continue
        levels = [level - used for level, used in zip(levels, first.used, strict=True)]
        if lane:
            found[lane].append(now_s)
        else:
            waiting = job(next(jobs), now_s, rng)
    return found


def _first(lines: Lines, found: Found, now_s: float) -> tuple[str, Ask] | None:
    for lane, line in lines.items():
        at = len(found[lane])
        if at < len(line) and line[at].arrived_s <= now_s:
            return lane, line[at]
    return None


def _next_s(lines: Lines, found: Found, now_s: float) -> float:
    """When the next critical or normal request arrives."""
    nexts = (line[len(found[lane])].arrived_s for lane, line in lines.items() if len(found[lane]) < len(line))
    return min((at_s for at_s in nexts if at_s > now_s), default=inf)
