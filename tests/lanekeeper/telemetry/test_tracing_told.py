"""docs/tracing.md lists all spans and attributes, and no others."""

import re
from pathlib import Path

from lanekeeper.telemetry import signals

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/tracing.md").read_text(encoding="utf-8")
LIST = Path(signals.__file__).read_text(encoding="utf-8")


def first_column(title: str) -> list[str]:
    """The names in backquotes in the first column of a section's table."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_docs_tracing_lists_every_span_and_no_other() -> None:
    operations = {
        signals.ASK, signals.SEND, signals.WAIT, signals.DELAY, signals.PROCESS, signals.CHAT, signals.ACK,
        signals.REJECT,
    }  # fmt: skip
    assert {name.partition(" ")[0] for name in first_column("The spans")} == operations
    for stands_for in (signals.REPLY_TEMPLATE, signals.TURN, signals.DEAD_LETTER):
        assert stands_for in PAGE


def test_docs_tracing_lists_every_attribute_and_no_other() -> None:
    listed = re.findall(r'Final = "([a-z_]+(?:\.[a-z_]+)+)"', LIST.partition("# Attributes: general.")[2])
    assert len(listed) > 30
    assert sorted(first_column("Attributes")) == sorted(listed)
