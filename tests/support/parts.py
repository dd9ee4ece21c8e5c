"""A request's trace: its tree of spans, and how much of its time the waits, delays and attempts account for."""

from collections.abc import Iterator, Sequence

from tests.support.otlp import ReceivedSpan, one, tree

MS = 1_000_000
PASSED = ("wait ", "delay ")


def outline(spans: Sequence[ReceivedSpan]) -> str:
    """The tree as text, each span under its parent; fails if a parent is missing. Waits and delays, which stand beside
    the attempt that ended them, are left out: their number depends on how busy the machine is."""
    known = {span.span_id: span for span in spans}
    attempted = {span.parent_id for span in spans if span.kind == "CONSUMER"}
    assert all(
        span.parent_id in attempted for span in spans if span.name.startswith(PASSED) and "turn" not in span.name
    )
    assert [span.name for span in spans if not span.parent_id] == ["ask"], "one root"
    assert not [span for span in spans if span.parent_id and span.parent_id not in known], tree(spans)

    def below(parent_id: str, indent: str) -> Iterator[str]:
        for span in spans:
            if span.parent_id == parent_id:
                if not span.name.startswith(PASSED):
                    yield f"\n{indent}{span.name.partition('.delay.')[0]}{'.delay' * ('.delay.' in span.name)}"
                yield from below(span.span_id, indent + "  ")

    return "".join(below("", " " * 8)) + "\n    "


def unaccounted_ms(spans: Sequence[ReceivedSpan]) -> float:
    """The time from the start of `ask` to the end of the last attempt, minus all waits, delays and attempts. An attempt
    counts only until the next part begins."""
    parts = [span for span in spans if span.name.startswith(("wait lane", "wait (dead", "delay ", "process "))]
    begun = [*(span.start_ns for span in parts[1:]), parts[-1].end_ns]
    sum_ns = 0
    for span, after_ns in zip(parts, begun, strict=True):
        assert span.start_ns <= after_ns
        sum_ns += (after_ns if span.kind == "CONSUMER" and after_ns < span.end_ns else span.end_ns) - span.start_ns
    return (parts[-1].end_ns - one(spans, "ask").start_ns - sum_ns) / MS


def ms(span: ReceivedSpan) -> float:
    """The span's duration."""
    return (span.end_ns - span.start_ns) / MS
